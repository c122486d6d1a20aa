"""The engine `jax` on a GPU: the answers of transformers in FP32, and the model in memory once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from servers.language.engine import GenerationSettings, make_engine
from servers.language.module import build_module, count_parameters
from servers.language.specification import LanguageModel, language_model
from tests.gpu.language.test_decoder import BESIDE_A_LONG_ONE, LENGTH, NAMES
from tests.language_answers import assert_generates_as, model_of

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
    assert_generates_as(module, engine, BESIDE_A_LONG_ONE, LENGTH)
    engine.close()


def test_the_weights_are_in_memory_once() -> None:
    import torch

    model = language_model("language:tinyllama-1.1b")
    torch.cuda.reset_peak_memory_stats()  # of the tests before this one
    before, held = torch.cuda.mem_get_info()[0], torch.cuda.memory_allocated()
    engine = loaded(model, slots=1, max_length=256)
    weights_bytes = 2 * count_parameters(model)
    assert before - torch.cuda.mem_get_info()[0] < 1.5 * weights_bytes
    assert torch.cuda.max_memory_allocated() - held < 1.5 * weights_bytes
    engine.close()
