"""The plans of convolutional models on a real GPU: the chosen ones are the fastest, and right at every batch size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from servers.engines.agreement import disagreement, proof_batch
from servers.engines.interface import PLANS_FOLDER
from servers.engines.settings import EngineSettings
from servers.engines.torch import plans
from servers.engines.torch.engine import TorchEngine
from servers.engines.torch.forms import expected_answers
from servers.engines.torch.plans import MEASURING_SECONDS, PLANS, ModulePlan
from servers.models.registry import get_variant
from servers.models.uint8_module import executed_module
from servers.models.weights import RandomWeights

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

WEIGHTS = RandomWeights(0)
ROWS = (1, 2, 4, 8, 12, 16, 24, 32)
MODELS = [
    ("torchvision:resnet50", "uint8", "fp16"),
    ("torchvision:resnet50", "fp32", "fp32"),
    ("torchvision:efficientnet_b0", "uint8", "fp16"),
    ("torchvision:mobilenet_v3_large", "uint8", "fp16"),
]
SHARE = 0.95
"""The least speed of the chosen plan, in units of the fastest single plan's."""
ONE_SIZE_SECONDS = 10.0
"""The last batch size that is measured may take as long beyond the limit."""

Load = Callable[..., TorchEngine]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Load]:
    engines: list[TorchEngine] = []

    def loaded(
        reference: str, payload: str, precision: str, only: tuple[ModulePlan, ...] = PLANS, rows: int = ROWS[-1]
    ) -> TorchEngine:
        monkeypatch.setenv(PLANS_FOLDER, str(tmp_path / str(len(only)) / only[0].title))
        with monkeypatch.context() as patched:
            patched.setattr(plans, "PLANS", only)
            settings = EngineSettings("torch", precision, "auto", "cuda:0", 0, rows)
            engine = TorchEngine(get_variant(reference, payload), settings, WEIGHTS)
            engine.load()
        engines.append(engine)
        return engine

    yield loaded
    for engine in engines:
        engine.close()


@pytest.mark.parametrize(("reference", "payload", "precision"), MODELS)
def test_the_chosen_plan_is_as_fast_as_the_best_one(load: Load, reference: str, payload: str, precision: str) -> None:
    chosen = load(reference, payload, precision)
    singles = {plan.title: load(reference, payload, precision, (plan,)) for plan in PLANS}
    slower = {}
    for rows in ROWS:
        times: dict[str, list[int]] = {name: [] for name in ("auto", *singles)}
        for _ in range(7):
            for name, engine in {"auto": chosen, **singles}.items():
                times[name] += engine.execution_ns(rows, 10) or []
        medians = {name: median(taken) for name, taken in times.items()}
        best = min(medians[name] for name in singles)
        if best < SHARE * medians["auto"]:
            slower[rows] = medians
    assert not slower, (chosen.describe().details["plans"], slower)


@pytest.mark.parametrize(("reference", "payload", "precision"), MODELS)
def test_answers_agree_at_every_batch_size(load: Load, reference: str, payload: str, precision: str) -> None:
    engine, specification = load(reference, payload, precision), get_variant(reference, payload)
    module = executed_module(specification, specification.load_module(WEIGHTS))
    for rows in (*ROWS, 3, 31):
        proof = proof_batch(specification, rows, rows)
        expected = partial(expected_answers, specification, module)(proof.inputs)
        assert disagreement(specification, expected, engine.infer(proof.inputs), precision).fault is None, rows


@pytest.mark.parametrize(("reference", "payload", "precision"), MODELS)
def test_measuring_is_bounded_and_not_repeated(load: Load, reference: str, payload: str, precision: str) -> None:
    first: Any = load(reference, payload, precision).describe().details
    assert first["plan_seconds"] <= MEASURING_SECONDS + ONE_SIZE_SECONDS
    assert set(first["plans"]) == {str(rows) for rows in ROWS}
    if "not measured" not in first["plan_origins"].values():
        again: Any = load(reference, payload, precision).describe().details
        assert again["plans"] == first["plans"]
        assert set(again["plan_origins"].values()) == {"cached"}
        assert again["plan_seconds"] < first["plan_seconds"]


def test_memory_that_runs_out_in_a_capture_costs_one_plan(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    in_layout = plans._in_layout

    def full(layout: torch.memory_format, module: Any, arguments: Any) -> Any:
        if layout == torch.channels_last and torch.cuda.is_current_stream_capturing():
            raise torch.OutOfMemoryError("out of memory")
        return in_layout(layout, module, arguments)

    monkeypatch.setattr(plans, "_in_layout", full)
    details: Any = load("torchvision:resnet50", "uint8", "fp16", rows=4).describe().details
    assert set(details["plans_left_out"]) == {plan.title for plan in PLANS if plan.channels_last}
    assert not any("channels-last" in plan for plan in details["plans"].values())


def test_the_memory_of_other_plans_is_given_back(load: Load) -> None:
    """The engine with all plans keeps at most the weights of those that it executes."""
    before = torch.cuda.memory_allocated()
    engine = load("torchvision:resnet50", "uint8", "fp16", rows=4)
    with_plans = torch.cuda.memory_allocated() - before
    details: Any = engine.describe().details
    kept = len(set(details["plans"].values()))
    single = load("torchvision:resnet50", "uint8", "fp16", PLANS[:1], rows=4)
    alone = torch.cuda.memory_allocated() - before - with_plans
    assert single.describe().details["plans"]
    assert with_plans < alone * (kept + 0.5)
