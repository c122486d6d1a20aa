"""The engine `slots` on a GPU: the answers of transformers in FP32, small deficits in BF16, no stalls."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from servers.language.engine import GenerationRequest, GenerationSettings
from servers.language.module import build_module
from servers.language.slots import SlotsEngine
from servers.language.specification import LanguageModel, language_model
from servers.language.torch_engine import generation_kernels
from tests.language_answers import PROMPTS, Answers, assert_generates_as, finish, model_of

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

LENGTH = 24
BESIDE_A_LONG_ONE = (*PROMPTS, range(1, 101))
NAMES = ("llama", "llama3-rope", "qwen2-window", "gpt2", "gpt-oss")


def loaded(model: LanguageModel, **requested: Any) -> SlotsEngine:
    engine = SlotsEngine(model, GenerationSettings("slots", **{"device": "cuda:0", "slots": 8, **requested}))
    engine.load()
    engine.warm_up()
    return engine


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_fp32_answers_are_those_of_transformers(name: str, graphs: bool, tmp_path: Path) -> None:
    model = model_of(name, tmp_path)
    engine = loaded(model, precision="fp32", graphs=graphs, max_length=128)
    assert bool(engine.settings()["cuda_graphs"]) == graphs
    module = build_module(model, "cuda:0", "fp32")
    assert_generates_as(module, engine, BESIDE_A_LONG_ONE, LENGTH)
    engine.close()


@pytest.fixture(scope="module")
def tinyllama() -> Iterator[SlotsEngine]:
    engine = loaded(language_model("language:tinyllama-1.1b"), slots=17, max_length=2048)
    yield engine
    engine.close()


def test_a_long_prompt_does_not_stall_running_answers(tinyllama: SlotsEngine) -> None:
    """The longest gap while a prompt of 2,000 tokens is read is at most three times the median gap."""
    engine = tinyllama
    for number in range(16):
        engine.add(GenerationRequest(number, list(range(3 + number, 131 + number)), 400))
    for _ in range(40):
        engine.step()
    engine.add(GenerationRequest(99, list(range(3, 2003)), 8))
    gaps, last, tokens = [], time.perf_counter_ns(), 0
    for _ in range(80):
        emissions = engine.step()
        now = time.perf_counter_ns()
        gaps.append(now - last)
        last = now
        tokens += sum(emission.number == 99 for emission in emissions)
    for number in range(16):
        engine.cancel(number)
    finish(engine, Answers())
    assert tokens == 8
    assert sorted(gaps)[-2] <= 3 * sorted(gaps)[len(gaps) // 2], sorted(gaps)[-5:]


def test_a_cancelled_request_frees_its_slot(tinyllama: SlotsEngine) -> None:
    engine, answers = tinyllama, Answers()
    for number in range(3):
        engine.add(GenerationRequest(number, list(range(5, 40 + number)), 50))
    for _ in range(5):
        answers.take(engine.step())
    engine.cancel(0)
    assert engine.active == 2
    finish(engine, answers)
    assert set(answers.finishes) == {1, 2}


def test_the_kernels_of_an_answer_prove_the_gpu(tinyllama: SlotsEngine) -> None:
    """Of the native server and of Triton's python backend."""
    probe: Any = generation_kernels(tinyllama)
    assert probe["kernel_probe"]["kernel_count"] > 100
    assert set(cast(Any, tinyllama.settings()["parameters_by_device"])) == {"cuda:0"}
