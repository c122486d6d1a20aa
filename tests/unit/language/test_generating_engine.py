"""The interface of generating engines, with the scripted one that other tests use."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import pytest

from servers.engines.settings import EngineError
from servers.language.engine import GeneratingEngine, GenerationRequest, GenerationSettings, make_engine
from servers.language.specification import language_model
from servers.protocol.errors import InvalidRequestError
from tests.scripted_generation import ScriptedEngine, scripted_answer


def answers(engine: GeneratingEngine) -> dict[int, tuple[list[int], str]]:
    """Step until the engine is idle; by request, its tokens and why it finished."""
    tokens: dict[int, list[int]] = {}
    finishes: dict[int, str] = {}
    while engine.active or engine.waiting:
        for emission in engine.step():
            assert emission.number not in finishes
            tokens.setdefault(emission.number, []).extend(emission.tokens)
            if emission.finish:
                finishes[emission.number] = emission.finish
    return {number: (tokens[number], finish) for number, finish in finishes.items()}


def test_more_requests_than_slots_are_all_answered() -> None:
    engine = ScriptedEngine(slots=2)
    for number in range(5):
        engine.add(GenerationRequest(number, [number + 1, 7], max_tokens=number + 1))
    assert answers(engine) == {n: (scripted_answer([n + 1, 7], n + 1), "length") for n in range(5)}
    assert engine.step() == ()


def test_an_answer_stops_at_eos_only_where_the_request_allows_it() -> None:
    engine = ScriptedEngine(stops_at=3)
    engine.add(GenerationRequest(1, [5], max_tokens=6, ignore_eos=False))
    engine.add(GenerationRequest(2, [5], max_tokens=6))
    assert answers(engine) == {1: ([*scripted_answer([5], 2), 0], "stop"), 2: (scripted_answer([5], 6), "length")}


def test_a_cancelled_request_frees_its_slot_for_the_next_step() -> None:
    engine = ScriptedEngine(slots=1)
    engine.add(GenerationRequest(1, [5], max_tokens=100))
    engine.add(GenerationRequest(2, [6], max_tokens=1))
    engine.step()
    engine.cancel(1)
    engine.cancel(99)
    assert answers(engine) == {2: (scripted_answer([6], 1), "length")}


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ([], 1, "the prompt is empty"),
        ([1], 0, "max_tokens is 0"),
        ([1] * 250, 7, "must not exceed the maximum length of 256"),
        ([1, 1000], 1, "token id 1000 is not in the vocabulary; ids are from 0 to 999"),
        ([-1], 1, "token id -1"),
    ],
)
def test_what_can_never_run_is_refused(prompt: list[int], max_tokens: int, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        ScriptedEngine().add(GenerationRequest(1, prompt, max_tokens))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (GenerationSettings(engine="slot"), "did you mean"),
        (GenerationSettings(precision="int8"), "precision 'int8' is not offered"),
        (GenerationSettings(slots=-1), "slots -1: it must be 0"),
    ],
)
def test_settings_that_are_wrong_everywhere_are_refused(settings: GenerationSettings, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        make_engine(None, settings)


@pytest.mark.skipif(find_spec("jax") is not None, reason="JAX is installed in this environment")
def test_an_engine_whose_library_is_missing_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ABSERVE_ENGINES_PYTHON", sys.executable)  # no second environment
    with pytest.raises(EngineError, match=r"^the jax engine needs jax, which is not installed; run: pip install 'jax"):
        make_engine(language_model("language:tiny"), GenerationSettings("jax", device="cpu"))
