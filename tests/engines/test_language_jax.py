"""The engine `jax` of language models generates what transformers does, in the environment that has JAX: `make
test-engines`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from servers.engines.settings import EngineError
from servers.language.engine import GenerationRequest, GenerationSettings, make_engine
from servers.language.module import build_module
from servers.language.specification import LanguageModel, language_model
from tests.language_answers import (
    CONFIGS,
    LONGEST,
    PROMPTS,
    Answers,
    assert_generates_as,
    expected,
    finish,
    model_of,
    tiny,
)

pytest.importorskip("jax", reason="JAX is not installed in this environment; run: make test-engines")

from servers.language.jax_engine import JaxGeneratingEngine

THREADS = 2
"""As in the other tests of JAX, which starts its threads once in a process."""


def jax_engine(model: LanguageModel, **requested: Any) -> JaxGeneratingEngine:
    values = {"device": "cpu", "threads": THREADS, "max_length": 64, **requested}
    engine = make_engine(model, GenerationSettings("jax", **values))
    assert isinstance(engine, JaxGeneratingEngine)
    engine.load()
    return engine


@pytest.mark.parametrize("name", CONFIGS)
def test_every_architecture_generates_what_transformers_does(name: str, tmp_path: Path) -> None:
    model = model_of(name, tmp_path)
    engine = jax_engine(model, slots=2, prefill_chunk=16)
    assert_generates_as(build_module(model), engine, PROMPTS, LONGEST)
    engine.close()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("chunk", [1, 40])
def test_requests_share_steps_and_slots(chunk: int, late: bool) -> None:
    """Also where tokens reach the host a step late, as on a GPU."""
    engine = jax_engine(tiny(), slots=3, prefill_chunk=chunk)
    engine._late = late
    answers = Answers()
    for number, prompt in enumerate(PROMPTS):
        engine.add(GenerationRequest(number, prompt, LONGEST - number))
    for _ in range(6):
        answers.take(engine.step())
    engine.cancel(0)
    finish(engine, answers)
    whole: Sequence[int] = answers.tokens.pop(0, [])
    assert whole == expected()[0][: len(whole)]
    assert answers.tokens == {n: answer[: LONGEST - n] for n, answer in enumerate(expected()) if n}
    assert (engine.active, engine.waiting, engine.step()) == (0, 0, ())


def test_an_answer_may_fill_its_slot() -> None:
    """The position behind the last one is where rows without a request write; it must not exist."""
    engine = jax_engine(tiny(), slots=3, max_length=len(PROMPTS[4]) + LONGEST)
    for number in range(3):
        engine.add(GenerationRequest(number, PROMPTS[4], LONGEST))
    assert finish(engine, Answers()).tokens == dict.fromkeys(range(3), expected()[4])


def test_warm_up_compiles_all_sizes_of_a_step() -> None:
    engine = jax_engine(tiny(), slots=4, prefill_chunk=32, max_length=300)
    engine.warm_up()
    described = engine.settings()
    assert described["executables"] == 10
    for number, prompt in enumerate([*PROMPTS, range(1, 280)]):
        engine.add(GenerationRequest(number, list(prompt), LONGEST))
    assert finish(engine, Answers()).tokens.items() >= dict(enumerate(expected())).items()
    assert engine.settings() == described
    assert (described["engine"], described["mode"], described["threads"]) == ("jax", "jit", THREADS)
    assert described["cache_bytes"] == 2 * 2 * 4 * 300 * 32 * 4
    json.dumps(described)


def test_bf16_weights_are_those_of_the_module() -> None:
    engine = jax_engine(tiny(), slots=2, precision="bf16")
    forward: Any = engine._forward
    module = build_module(tiny(), precision="bf16")
    layer = forward._weights.layers[1]
    assert layer.down.weight.tolist() == module.model.layers[1].mlp.down_proj.weight.tolist()
    assert forward._weights.frequencies.tolist() == module.model.rotary_emb.inv_freq.tolist()
    assert forward._weights.head.tolist() == module.lm_head.weight.tolist()
    engine.add(GenerationRequest(1, PROMPTS[3], LONGEST))
    assert len(finish(engine, Answers()).tokens[1]) == LONGEST


def test_a_model_that_is_not_laid_out_is_refused(tmp_path: Path) -> None:
    fields = {**CONFIGS["llama"], "model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(EngineError, match="no mistral models, only llama, qwen2, gpt2, gpt_oss"):
        jax_engine(language_model(f"language:{tmp_path}"))
