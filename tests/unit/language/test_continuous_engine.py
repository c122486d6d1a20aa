"""The baseline engine: transformers' continuous batching behind the interface, with a real tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from servers.engines.settings import EngineError
from servers.language.continuous import ContinuousEngine
from servers.language.engine import Emission, GenerationRequest, GenerationSettings, make_engine
from servers.language.module import build_module
from servers.language.reference import GivenAnswer, judge
from servers.language.specification import language_model
from servers.protocol.errors import InvalidRequestError

MODEL = language_model("language:tiny")
SETTINGS = GenerationSettings(engine="continuous", device="cpu", slots=3, max_length=128, threads=1)


@pytest.fixture(scope="module")
def engine() -> Iterator[ContinuousEngine]:
    engine = make_engine(MODEL, SETTINGS)
    assert isinstance(engine, ContinuousEngine)
    engine.load()
    engine.warm_up()
    yield engine
    engine.close()


def run(engine: ContinuousEngine) -> dict[int, list[Emission]]:
    """Step until all is answered."""
    emissions: dict[int, list[Emission]] = {}
    while engine.active:
        for emission in engine.step():
            emissions.setdefault(emission.number, []).append(emission)
    return emissions


def requests(count: int, max_tokens: int) -> list[GenerationRequest]:
    generator = np.random.default_rng(count)
    return [
        GenerationRequest(number, generator.integers(1, 1024, 5 + 7 * number).tolist(), max_tokens + number)
        for number in range(count)
    ]


def test_more_requests_than_slots_get_the_reference_s_tokens(engine: ContinuousEngine) -> None:
    asked = requests(7, 12)
    for request in asked:
        engine.add(request)
    assert (engine.active, engine.waiting) == (3, 4)
    emissions = run(engine)
    answers = [
        GivenAnswer(request.prompt, [token for part in emissions[request.number] for token in part.tokens])
        for request in asked
    ]
    assert [len(answer.output) for answer in answers] == [request.max_tokens for request in asked]
    assert all(
        [part.finish for part in parts] == [None] * (len(parts) - 1) + ["length"] for parts in emissions.values()
    )
    assert max(max(map(len, (part.tokens for part in parts))) for parts in emissions.values()) <= 2  # streamed
    assert all(max(judged.deficits) < 1e-4 for judged in judge(build_module(MODEL), answers))
    assert engine.step() == ()


def test_eos_ends_an_answer_unless_it_is_ignored(engine: ContinuousEngine) -> None:
    """The first token of the answer is declared to be the end, as no prompt is known whose answer has id 0."""
    engine.add(GenerationRequest(1, [5, 6, 7], 4))
    tokens = [token for part in run(engine)[1] for token in part.tokens]
    engine.eos = (tokens[2],)
    try:
        engine.add(GenerationRequest(1, [5, 6, 7], 4, ignore_eos=False))
        engine.add(GenerationRequest(2, [5, 6, 7], 4))
        emissions = run(engine)
    finally:
        engine.eos = MODEL.eos
    assert [token for part in emissions[1] for token in part.tokens] == tokens[:3]
    assert emissions[1][-1].finish == "stop"
    assert [token for part in emissions[2] for token in part.tokens] == tokens
    assert emissions[2][-1].finish == "length"


def test_a_cancelled_request_says_nothing_more_and_its_number_is_free(engine: ContinuousEngine) -> None:
    first, second = requests(2, 60)
    engine.add(first)
    engine.add(second)
    while not any(emission.number == first.number for emission in engine.step()):
        pass
    engine.cancel(first.number)
    engine.cancel(99)
    assert engine.active == 1
    engine.add(GenerationRequest(first.number, [9, 8, 7], 3))
    emissions = run(engine)
    assert sum(len(part.tokens) for part in emissions[first.number]) == 3
    assert emissions[second.number][-1].finish == "length"


def test_what_never_runs_is_refused(engine: ContinuousEngine) -> None:
    for request in (GenerationRequest(1, [1] * 100, 29), GenerationRequest(1, [], 1), GenerationRequest(1, [1024], 1)):
        with pytest.raises(InvalidRequestError):
            engine.add(request)
    assert (engine.active, engine.waiting) == (0, 0)
    with pytest.raises(EngineError, match="has at most 1024 positions"):
        make_engine(MODEL, GenerationSettings(engine="continuous", device="cpu", max_length=2048))


def test_settings_in_effect(engine: ContinuousEngine) -> None:
    settings = engine.settings()
    assert settings["prefix_cache"] is False
    assert (settings["engine"], settings["precision"], settings["slots"]) == ("continuous", "fp32", 3)


def test_the_end_of_a_text_may_come_before_the_last_result(engine: ContinuousEngine) -> None:
    """The library may say that a request is finished in a result without new tokens."""
    engine.add(GenerationRequest(77, [5, 6], 8, False))
    name, emissions = engine._names[77], []
    for finished in (False, True):
        tokens = [9, engine.eos[0]]
        result = SimpleNamespace(request_id=name, error=None, generated_tokens=tokens, is_finished=lambda f=finished: f)
        emissions.append(engine._emission(result))
    assert emissions == [Emission(77, (9, engine.eos[0])), Emission(77, (), "stop")]
    run(engine)


def test_a_request_that_fails_without_a_message_fails_alone(engine: ContinuousEngine) -> None:
    """As one in which the library's own `assert` fails: it ended the server."""
    engine.add(GenerationRequest(78, [5, 6], 8, False))
    result = SimpleNamespace(request_id=engine._names[78], error="", generated_tokens=[], is_finished=lambda: True)
    assert engine._emission(result) == Emission(78, (), "error", "the engine failed: without a message")
    run(engine)
