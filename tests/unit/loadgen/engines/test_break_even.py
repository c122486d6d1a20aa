"""After how many items a conversion pays: the closed form, its interval, and never."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from loadgen.engines.analyse import PATHS, items_until, path_of
from loadgen.engines.sections import pays_after
from loadgen.records.matrix import BreakEven, Configuration, Conversion
from loadgen.stats.estimates import Estimate
from servers.engines.settings import engine_names
from servers.language.engine import GENERATING_ENGINES
from tests.unit.loadgen.engines.simulated_matrix import ONNX, TORCH, configuration, matrix, per_item, plan

EXPORT = {"onnxruntime": [Conversion(step="export", seconds=20.0), Conversion(step="quantise", seconds=4.0)]}


def result_of(speed: float, **given: object) -> BreakEven:
    (result,) = matrix(plan(TORCH, ONNX, batches=(8,)), per_item({"onnxruntime": speed}), **given).break_even  # type: ignore[arg-type]
    return result


def test_it_is_the_closed_form() -> None:
    """24 s of conversion, 3 − 1 s of load; first calls take 460 and 20 ms longer than others; 10 ms become 5."""
    result = result_of(
        2.0,
        noise=1e-6,
        conversions=EXPORT,
        load_seconds=lambda configuration: 3.0 if configuration.engine == "onnxruntime" else 1.0,
        first_call_ms=lambda configuration: 500.0 if configuration.engine == "onnxruntime" else 100.0,
    )
    assert result.one_time_seconds == pytest.approx(26.44, abs=0.01)  # the drift of five rounds
    assert result.items is not None
    assert result.items.value == pytest.approx(26.44 / 0.005, rel=0.1)
    assert result.items.low is not None
    assert result.items.high is not None
    assert result.items.low < 26.44 / 0.005 < result.items.high
    assert (result.path, result.batch, result.baseline) == ("PyTorch → ONNX → ONNX Runtime", 8, 0)
    assert result.parity == "cosine at least 0.999999, top-1 agreement 100 %, relative error at most 1e-06"


def test_a_slower_path_never_pays() -> None:
    result = result_of(0.5, conversions=EXPORT)
    assert result.items is None
    assert pays_after(result) == "never"


def test_a_gain_that_may_be_zero_has_no_upper_bound() -> None:
    rows = [result_of(1.005, conversions=EXPORT, noise=0.05, seed=seed) for seed in range(30)]
    assert {row.items is None for row in rows} == {True, False}
    for row in rows:
        gain = row.gain_seconds_per_item
        assert gain.low is not None
        if row.items is not None and gain.low <= 0.0:
            assert row.items.high is None
            assert row.items.low is not None
            assert 0.0 <= row.items.low <= row.items.value
            assert "may never pay" in pays_after(row)


def test_a_path_that_starts_sooner_and_runs_faster_pays_from_the_first_item() -> None:
    result = result_of(2.0, load_seconds=lambda configuration: 0.5 if configuration.engine == "onnxruntime" else 3.0)
    assert result.one_time_seconds < 0.0
    assert result.items == Estimate(value=0.0, low=0.0, high=0.0)
    assert pays_after(result) == "at once"


def test_the_interval_covers_what_was_planted() -> None:
    """Fieller's interval where load and first call vary from round to round, too."""
    random = np.random.default_rng(5)
    covered = []
    for _ in range(400):
        costs, gains = random.normal(20.0, 2.0, 5), random.normal(0.01, 0.002, 5)
        estimate = items_until(list(costs), list(gains))
        assert estimate is not None
        assert estimate.low is not None
        covered.append(estimate.low <= 2000.0 and (estimate.high is None or estimate.high >= 2000.0))
    assert 0.92 <= np.mean(covered) <= 0.98


def test_few_rounds_have_no_interval() -> None:
    assert items_until([10.0], [0.5]) == Estimate(value=20.0)
    assert items_until([10.0, 10.0], [0.5, 0.5]) == Estimate(value=20.0)


def test_a_kept_process_pays_its_start_once() -> None:
    asked = plan(TORCH, ONNX, batches=(8,), processes="kept")
    (result,) = matrix(asked, per_item({"onnxruntime": 2.0}), conversions=EXPORT).break_even
    assert result.one_time_seconds == pytest.approx(24.04, abs=0.01)


def test_an_engine_that_compiles_at_load_and_one_that_does_at_the_first_calls_pay_the_same() -> None:
    """Three shapes of 2 s each, prepared while loading or at their first calls."""
    lazy = configuration("jax", "jit")
    paid = matrix(
        plan(TORCH, ONNX, lazy, batches=(1, 4, 8)),
        per_item({"onnxruntime": 2.0, "jax": 2.0}),
        noise=1e-6,
        load_seconds=lambda each_configuration: 7.0 if each_configuration.engine == "onnxruntime" else 1.0,
        first_call_ms=lambda each_configuration: 2000.0 if each_configuration.engine == "jax" else 0.0,
    ).break_even
    assert len(paid) == 6
    assert {round(result.one_time_seconds, 1) for result in paid} == {6.1}


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

    def latency(configuration: Configuration, _batch: int, _length: int | None) -> float:
        return ms[configuration.precision] - (1.0 if configuration.engine == "onnxruntime" else 0.0)

    def inaccurate(configuration: Configuration, _round: int, fields: dict[str, Any]) -> dict[str, Any]:
        return fields | {"cosine_min": 0.5} if configuration == half else fields

    def gains(**given: Any) -> dict[int, tuple[int, float]]:
        paid = matrix(asked, latency, noise=1e-6, conversions=EXPORT, **given).break_even
        return {
            result.configuration: (result.baseline, round(result.gain_seconds_per_item.value * 1e3)) for result in paid
        }

    assert gains() == {2: (1, 1), 3: (0, 9)}
    assert gains(change=inaccurate) == {2: (0, 6), 3: (0, 9)}


@pytest.mark.parametrize(
    ("asked", "path"),
    [
        (TORCH, "PyTorch"),
        (configuration(mode="compile"), "PyTorch → torch.compile"),
        (configuration("tensorrt", "graph"), "PyTorch → ONNX → TensorRT"),
        (configuration("onnxruntime-jax", "session"), "PyTorch → JAX → ONNX → ONNX Runtime"),
        (configuration("tensorrt-jax", "graph"), "PyTorch → JAX → ONNX → TensorRT"),
        (configuration("mine", "fast"), "PyTorch → mine"),
    ],
)
def test_the_path_of_an_engine(asked: Configuration, path: str) -> None:
    assert path_of(asked) == path


def test_every_path_is_that_of_an_engine() -> None:
    assert {key.partition("/")[0] for key in PATHS} < {*engine_names(), *GENERATING_ENGINES}
