"""The engine `jax` on a GPU: the answers of transformers in FP32, and the model in memory once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from servers.language.engine import GenerationRequest, GenerationSettings, make_engine
from servers.language.module import build_module, count_parameters
from servers.language.specification import LanguageModel, language_model
from tests.gpu.language.test_decoder import LENGTH, NAMES, generated, model_of
from tests.language_answers import PROMPTS, Answers, finish

pytest.importorskip("jax", reason="JAX is not installed in this environment; run: pip install 'jax[cuda13]'")

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]


def loaded(model: LanguageModel, **requested: Any) -> Any:
    engine = make_engine(model, GenerationSettings("jax", **{"device": "cuda:0", "slots": 4, **requested}))
    engine.load()
    engine.warm_up()
    return engine


@pytest.mark.parametrize("name", [name for name in NAMES if name != "llama3-rope"])  # each compiles for seconds
def test_fp32_answers_of_jax_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = model_of(name, tmp_path)
    engine = loaded(model, precision="fp32", max_length=128)
    module = build_module(model, "cuda:0", "fp32")
    prompts = [[token % 900 for token in prompt] for prompt in (*PROMPTS, range(1, 101))]
    answers = Answers()
    for number, prompt in enumerate(prompts):  # the later ones are read beside the earlier ones
        engine.add(GenerationRequest(number, prompt, LENGTH))
        answers.take(engine.step())
    finish(engine, answers)
    assert answers.tokens == {number: generated(module, prompt) for number, prompt in enumerate(prompts)}
    engine.close()


def test_the_weights_are_in_memory_once() -> None:
    import torch

    model = language_model("language:tinyllama-1.1b")
    before = torch.cuda.mem_get_info()[0]
    engine = loaded(model, slots=1, max_length=256)
    weights_bytes = 2 * count_parameters(model)
    assert before - torch.cuda.mem_get_info()[0] < 1.5 * weights_bytes
    assert torch.cuda.max_memory_allocated() < 1.5 * weights_bytes
    engine.close()
