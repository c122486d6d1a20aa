"""The baseline engine: transformers' generate() behind the interface, with a real tiny model."""

from __future__ import annotations

import numpy as np

from servers.language.engine import GenerationRequest, GenerationSettings, make_engine
from servers.language.generate import GenerateEngine
from servers.language.module import build_module
from servers.language.reference import GivenAnswer, judge
from servers.language.specification import language_model

MODEL = language_model("language:tiny")
SETTINGS = GenerationSettings(engine="generate", device="cpu", slots=3, max_length=128, threads=1)


def loaded() -> GenerateEngine:
    engine = make_engine(MODEL, SETTINGS)
    assert isinstance(engine, GenerateEngine)
    engine.load()
    engine.warm_up()
    return engine


def test_batches_of_equal_prompts_are_answered_in_turn() -> None:
    engine, outputs, ends = loaded(), dict[int, list[int]](), dict[int, str | None]()
    random = np.random.default_rng(0)
    prompts = [random.integers(1, 1024, length).tolist() for length in (8, 8, 5, 8, 8)]
    for number, prompt in enumerate(prompts):
        engine.add(GenerationRequest(number, prompt, 4 + number))
    while engine.active or engine.waiting:
        assert engine.active <= 3
        for emission in engine.step():
            assert emission.number not in ends
            outputs.setdefault(emission.number, []).extend(emission.tokens)
            if emission.finish:
                ends[emission.number] = emission.finish
    assert [len(outputs[number]) for number in range(5)] == [4, 5, 6, 7, 8]
    assert set(ends.values()) == {"length"}
    answers = [GivenAnswer(prompt, outputs[number]) for number, prompt in enumerate(prompts)]
    assert max(max(view.deficits) for view in judge(build_module(MODEL), answers)) < 1e-4
    engine.close()


def test_a_cancelled_request_gets_no_more_tokens_and_an_empty_batch_ends() -> None:
    engine = loaded()
    engine.add(GenerationRequest(1, [5, 6], 100))
    engine.add(GenerationRequest(2, [6, 7], 100))
    engine.step()
    engine.cancel(1)
    assert {emission.number for emission in engine.step()} == {2}
    engine.cancel(2)
    engine.step()
    assert (engine.active, engine.waiting, list(engine.step())) == (0, 0, [])
    engine.close()
