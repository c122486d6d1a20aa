"""The engine `slots` generates what transformers' `generate()` does, whatever else runs beside a request."""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from servers.engines.settings import EngineError
from servers.language.decoder import decoder_weights
from servers.language.engine import GenerationRequest, GenerationSettings, make_engine
from servers.language.forward import SlotForward, TorchForward
from servers.language.module import build_module
from servers.language.slots import SlotsEngine
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


def slots_engine(model: LanguageModel, **requested: Any) -> SlotsEngine:
    values = {"device": "cpu", "threads": 1, "max_length": 64, **requested}
    engine = make_engine(model, GenerationSettings("slots", **values))
    assert isinstance(engine, SlotsEngine)
    engine.load()
    assert isinstance(engine._forward, TorchForward)
    engine._forward.cache.fill_(50.0)  # what an earlier request left must not be seen
    return engine


@pytest.mark.parametrize("name", CONFIGS)
def test_every_architecture_generates_what_transformers_does(name: str, tmp_path: Path) -> None:
    model = model_of(name, tmp_path)
    assert_generates_as(build_module(model), slots_engine(model, slots=4, prefill_chunk=1), PROMPTS, LONGEST)


@pytest.mark.parametrize("chunk", [1, 5, 32])
def test_requests_share_steps_and_slots(chunk: int) -> None:
    engine = slots_engine(tiny(), slots=3, prefill_chunk=chunk)
    for number, prompt in enumerate(PROMPTS):
        engine.add(GenerationRequest(number, prompt, LONGEST - number))
    assert engine.waiting == len(PROMPTS)
    answers = finish(engine, Answers())
    assert answers.tokens == {n: answer[: LONGEST - n] for n, answer in enumerate(expected())}
    assert set(answers.finishes.values()) == {"length"}
    assert engine.step() == ()


def test_an_answer_may_fill_its_slot() -> None:
    engine = slots_engine(tiny(), slots=2, max_length=len(PROMPTS[4]) + LONGEST)
    engine.add(GenerationRequest(1, PROMPTS[4], LONGEST))
    assert finish(engine, Answers()).tokens == {1: expected()[4]}


def test_a_long_prompt_is_read_beside_running_answers() -> None:
    """While it is read each step gives every running answer its token."""
    engine = slots_engine(tiny(), slots=3, prefill_chunk=4)
    for number in (0, 1):
        engine.add(GenerationRequest(number, PROMPTS[number], LONGEST))
    answers = Answers()
    answers.take(engine.step())
    engine.add(GenerationRequest(5, PROMPTS[5], LONGEST))
    for _ in range(len(PROMPTS[5]) // 4):
        assert 5 not in answers.tokens
        emissions = engine.step()
        answers.take(emissions)
        assert {0, 1} <= {emission.number for emission in emissions}
    assert 5 in answers.tokens
    assert finish(engine, answers).tokens == {n: expected()[n] for n in (0, 1, 5)}


def test_a_cancelled_request_frees_its_slot_before_the_next_step() -> None:
    engine = slots_engine(tiny(), slots=2, prefill_chunk=64)
    for number in (0, 1, 2):
        engine.add(GenerationRequest(number, PROMPTS[number], LONGEST))
    answers = Answers()
    answers.take(engine.step())
    assert (engine.active, engine.waiting) == (2, 1)
    engine.cancel(0)
    engine.cancel(77)
    assert (engine.active, engine.waiting) == (1, 1)
    emissions = engine.step()
    assert {emission.number for emission in emissions} == {1, 2}
    answers.take(emissions)
    assert finish(engine, answers).tokens == {0: expected()[0][:1], 1: expected()[1], 2: expected()[2]}


events = st.lists(
    st.tuples(
        st.integers(0, 3),  # steps before it arrives
        st.integers(0, len(PROMPTS) - 1),
        st.integers(1, LONGEST),
        st.booleans(),  # ignores EOS
        st.none() | st.integers(0, 12),  # the step of its cancel, from its arrival
    ),
    min_size=1,
    max_size=8,
)


@pytest.mark.parametrize("late", [False, True])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(events=events, slots=st.integers(1, 4), chunk=st.sampled_from([1, 3, 8, 64]))
def test_whatever_arrives_and_leaves_each_answer_is_right(
    late: bool, events: list[tuple[int, int, int, bool, int | None]], slots: int, chunk: int
) -> None:
    """Also where tokens reach the host a step late, as on a GPU."""
    model = replace(tiny(), eos=(expected()[2][5], expected()[4][9]))
    engine = SlotsEngine(model, GenerationSettings(device="cpu", slots=slots, max_length=64, prefill_chunk=chunk))
    engine._forward, engine._late = used_slots(), late
    answers, clock = Answers(), 0
    cancels: dict[int, int] = {}
    for number, (gap, prompt, length, ignores, leaves) in enumerate(events):
        for _ in range(gap):
            clock += 1
            for leaving in [n for n, at in cancels.items() if at <= clock]:
                engine.cancel(leaving)
                del cancels[leaving]
            answers.take(engine.step())
        engine.add(GenerationRequest(number, PROMPTS[prompt], length, ignores))
        if leaves is not None:
            cancels[number] = clock + leaves
    for leaving in cancels:
        engine.cancel(leaving)
    finish(engine, answers)
    for number, (_, prompt, length, ignores, leaves) in enumerate(events):
        answer = expected()[prompt][:length]
        stop = next((place for place, token in enumerate(answer) if token in model.eos), None)
        stops = not ignores and stop is not None
        if stops:
            assert stop is not None
            answer = answer[: stop + 1]
        given_tokens = answers.tokens.get(number, [])
        if number in answers.finishes:
            assert given_tokens == answer
            assert answers.finishes[number] == ("stop" if stops else "length")
        else:
            assert leaves is not None
            assert given_tokens == answer[: len(given_tokens)]
    assert (engine.active, engine.waiting, engine._decoding, engine._reading) == (0, 0, [], None)


@cache
def used_slots() -> SlotForward:
    """The same slots for all examples: what earlier ones left in them must not be seen."""
    forward = slots_engine(tiny(), slots=4)._forward
    assert forward is not None
    return forward


def test_the_settings_in_effect() -> None:
    engine = slots_engine(tiny(), slots=2, prefill_chunk=16)
    engine.warm_up()
    described = engine.settings()
    assert described | {"weights_sha256": "", "engine_version": "", "attention": "", "kernels": ""} == {
        "engine": "slots", "engine_version": "", "device": "cpu", "precision": "fp32", "threads": 1, "slots": 2,
        "max_length": 64, "prefill_chunk": 16, "weights": "random weights (seed 0)", "weights_sha256": "",
        "cache_bytes": 2 * 2 * 64 * 2 * 32 * 4, "prefix_cache": False, "speculation": False, "cuda_graphs": 0,
        "attention": "", "kernels": "", "mode": "eager", "parameters_by_device": {"cpu": 17},
    }  # fmt: skip
    json.dumps(described)


def test_a_collection_of_garbage_does_not_look_through_what_the_model_consists_of() -> None:
    gc.unfreeze()
    slots_engine(tiny(), slots=2).warm_up()
    assert gc.get_freeze_count() > 10_000
    gc.unfreeze()


def test_a_model_that_is_not_laid_out_is_refused(tmp_path: Path) -> None:
    fields = {**CONFIGS["llama"], "model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    engine = SlotsEngine(language_model(f"language:{tmp_path}"), GenerationSettings(device="cpu", threads=1))
    with pytest.raises(EngineError, match="no mistral models, only llama, qwen2, gpt2, gpt_oss; use --engine contin"):
        engine.load()


def test_more_positions_than_the_model_has_are_refused() -> None:
    with pytest.raises(EngineError, match=r"max_length 5000: Tiny .* has at most 1024 positions"):
        SlotsEngine(tiny(), GenerationSettings(device="cpu", max_length=5000))


def test_biases_that_only_some_products_have() -> None:
    module = build_module(tiny())
    attention = module.model.layers[0].self_attn
    query = attention.q_proj
    query.bias = torch.nn.Parameter(torch.randn(query.out_features), requires_grad=False)
    attention.k_proj.bias = attention.v_proj.bias = None
    layer = decoder_weights(module).layers[0]
    assert layer.qkv.bias is not None
    assert layer.qkv.bias[: query.out_features].any()
    assert not layer.qkv.bias[query.out_features :].any()


def test_weights_are_laid_out_once() -> None:
    weights = decoder_weights(build_module(tiny()))
    norm = weights.norm.weight.clone()
    forward = TorchForward(weights, 2, 64)
    assert len(forward.weights.layers) == forward.weights.shape.layers
    assert torch.equal(weights.norm.weight, norm)
    with pytest.raises(ValueError, match="another TorchForward"):
        TorchForward(weights, 2, 64)
