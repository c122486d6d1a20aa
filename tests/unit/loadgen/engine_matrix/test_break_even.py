"""After how many items a conversion pays: the closed form, its interval, and never."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from loadgen.engine_matrix.analyse import PATHS, items_until, path_of
from loadgen.engine_matrix.records import BreakEven, Configuration, Conversion, Estimate
from loadgen.engine_matrix.sections import pays_after
from servers.engines.settings import engine_names
from tests.unit.loadgen.engine_matrix.simulated_matrix import ONNX, TORCH, configuration, matrix, per_item, plan

EXPORT = {"onnxruntime": [Conversion(step="export", seconds=20.0), Conversion(step="quantise", seconds=4.0)]}


def found(speed: float, **given: object) -> BreakEven:
    (one,) = matrix(plan(TORCH, ONNX, batches=(8,)), per_item({"onnxruntime": speed}), **given).break_even  # type: ignore[arg-type]
    return one


def test_it_is_the_closed_form() -> None:
    """24 s of conversion, 3 − 1 s of load; first calls take 460 and 20 ms longer than others; 10 ms become 5."""
    one = found(
        2.0,
        noise=1e-6,
        conversions=EXPORT,
        load_seconds=lambda one: 3.0 if one.engine == "onnxruntime" else 1.0,
        first_call_ms=lambda one: 500.0 if one.engine == "onnxruntime" else 100.0,
    )
    assert one.one_time_seconds == pytest.approx(26.44, abs=0.01)  # the drift of five rounds
    assert one.items is not None
    assert one.items.value == pytest.approx(26.44 / 0.005, rel=0.1)
    assert one.items.low is not None
    assert one.items.high is not None
    assert one.items.low < 26.44 / 0.005 < one.items.high
    assert (one.path, one.batch, one.baseline) == ("PyTorch → ONNX → ONNX Runtime", 8, 0)
    assert one.parity == "cosine at least 0.999999, top-1 agreement 100 %, relative error at most 1e-06"


def test_a_slower_path_never_pays() -> None:
    one = found(0.5, conversions=EXPORT)
    assert one.items is None
    assert pays_after(one) == "never"


def test_a_gain_that_may_be_zero_has_no_upper_bound() -> None:
    rows = [found(1.005, conversions=EXPORT, noise=0.05, seed=seed) for seed in range(30)]
    assert {one.items is None for one in rows} == {True, False}
    for one in rows:
        gain = one.gain_seconds_per_item
        assert gain.low is not None
        if one.items is not None and gain.low <= 0.0:
            assert one.items.high is None
            assert one.items.low is not None
            assert 0.0 <= one.items.low <= one.items.value
            assert "may never pay" in pays_after(one)


def test_a_path_that_starts_sooner_and_runs_faster_pays_from_the_first_item() -> None:
    one = found(2.0, load_seconds=lambda one: 0.5 if one.engine == "onnxruntime" else 3.0)
    assert one.one_time_seconds < 0.0
    assert one.items == Estimate(value=0.0, low=0.0, high=0.0)
    assert pays_after(one) == "at once"


def test_the_interval_covers_what_was_planted() -> None:
    """Fieller's interval where load and first call vary from round to round, too."""
    random = np.random.default_rng(5)
    covered = []
    for _ in range(400):
        costs, gains = random.normal(20.0, 2.0, 5), random.normal(0.01, 0.002, 5)
        one = items_until(list(costs), list(gains))
        assert one is not None
        assert one.low is not None
        covered.append(one.low <= 2000.0 and (one.high is None or one.high >= 2000.0))
    assert 0.92 <= np.mean(covered) <= 0.98


def test_few_rounds_have_no_interval() -> None:
    assert items_until([10.0], [0.5]) == Estimate(value=20.0)
    assert items_until([10.0, 10.0], [0.5, 0.5]) == Estimate(value=20.0)


def test_a_kept_process_pays_its_start_once() -> None:
    asked = plan(TORCH, ONNX, batches=(8,), processes="kept")
    (one,) = matrix(asked, per_item({"onnxruntime": 2.0}), conversions=EXPORT).break_even
    assert one.one_time_seconds == pytest.approx(24.04, abs=0.01)


def test_an_engine_that_compiles_at_load_and_one_that_does_at_the_first_calls_pay_the_same() -> None:
    """Three shapes of 2 s each, prepared while loading or at their first calls."""
    lazy = configuration("jax", "jit")
    paid = matrix(
        plan(TORCH, ONNX, lazy, batches=(1, 4, 8)),
        per_item({"onnxruntime": 2.0, "jax": 2.0}),
        noise=1e-6,
        load_seconds=lambda one: 7.0 if one.engine == "onnxruntime" else 1.0,
        first_call_ms=lambda one: 2000.0 if one.engine == "jax" else 0.0,
    ).break_even
    assert len(paid) == 6
    assert {round(one.one_time_seconds, 1) for one in paid} == {6.1}


def test_without_a_conversion_or_a_baseline_there_is_none() -> None:
    half = configuration(precision="bf16")
    assert matrix(plan(TORCH, half), per_item({})).break_even == ()
    assert matrix(plan(ONNX), per_item({}), conversions=EXPORT).break_even == ()


def test_the_gain_of_a_precision_is_not_one_of_the_conversion() -> None:
    """The baseline is in the same precision if it is ranked there, otherwise in FP32."""
    half, onnx_half = configuration(precision="fp16"), configuration("onnxruntime", "session", precision="fp16")
    onnx_int8 = configuration("onnxruntime", "session", precision="int8")
    asked = plan(TORCH, half, onnx_half, onnx_int8, batches=(1,))
    ms = {"fp32": 10.0, "fp16": 5.0, "int8": 2.0}

    def latency(one: Configuration, _batch: int, _length: int | None) -> float:
        return ms[one.precision] - (1.0 if one.engine == "onnxruntime" else 0.0)

    def inaccurate(one: Configuration, _round: int, fields: dict[str, Any]) -> dict[str, Any]:
        return fields | {"cosine_min": 0.5} if one == half else fields

    def gains(**given: Any) -> dict[int, tuple[int, float]]:
        paid = matrix(asked, latency, noise=1e-6, conversions=EXPORT, **given).break_even
        return {one.configuration: (one.baseline, round(one.gain_seconds_per_item.value * 1e3)) for one in paid}

    assert gains() == {2: (1, 1), 3: (0, 9)}
    assert gains(change=inaccurate) == {2: (0, 6), 3: (0, 9)}


@pytest.mark.parametrize(
    ("one", "path"),
    [
        (TORCH, "PyTorch"),
        (configuration(mode="compile"), "PyTorch → torch.compile"),
        (configuration("tensorrt", "graph"), "PyTorch → ONNX → TensorRT"),
        (configuration("onnxruntime-jax", "session"), "PyTorch → JAX → ONNX → ONNX Runtime"),
        (configuration("tensorrt-jax", "graph"), "PyTorch → JAX → ONNX → TensorRT"),
        (configuration("mine", "fast"), "PyTorch → mine"),
    ],
)
def test_the_path_of_an_engine(one: Configuration, path: str) -> None:
    assert path_of(one) == path


def test_every_path_is_that_of_an_engine() -> None:
    assert {key.partition("/")[0] for key in PATHS} < set(engine_names())
