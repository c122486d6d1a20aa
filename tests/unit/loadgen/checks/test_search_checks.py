"""A search that came to nothing takes its verdict away, with the reason."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from loadgen.findings.rate_search import Trial
from loadgen.records.run import TokenLimits, Workload
from loadgen.verdict.result import Result, analyse
from tests.golden.synthetic_run import Plan, write_calibration, write_run
from tests.unit.loadgen.findings.test_searches import SLO, search

SINGLE = Workload(scenario="single", batch_size=1, concurrency=1, requests=30, seconds=1.0, max_seconds=30.0, rounds=2)


def analysed(folder: Path, workload: Workload, trials: list[Trial]) -> Result:
    write_run(folder, Plan(pairs=2, workloads=(SINGLE,)))
    document = msgspec.json.decode((folder / "experiment.json").read_bytes())
    document["workloads"].append(msgspec.to_builtins(workload))
    (folder / "experiment.json").write_bytes(msgspec.json.encode(document))
    (folder / "answers.json").unlink()
    (folder / "trials").mkdir()
    for number, trial in enumerate(trials):
        (folder / "trials" / f"{number:04d}.json").write_bytes(msgspec.json.encode(trial))
    return analyse(folder)


def failed(result: Result, name: str) -> list[str]:
    return [check.detail for check in result.checks if check.name == name and check.ok is False]


def both_pairs(a: float, b: float) -> list[Trial]:
    return [
        trial for pair in (0, 1) for label, rate in (("a", a), ("b", b)) for trial in search(label, rate, round_=pair)
    ]


def test_a_whole_search_is_compared(tmp_path: Path) -> None:
    result = analysed(tmp_path, SLO, both_pairs(300.0, 150.0))
    assert failed(result, "searches_ended") == []
    (comparison,) = [entry for entry in result.comparisons if entry.metric == "slo_rate"]
    assert comparison.verdict == "inconclusive"  # both ratios are the same, which says nothing of their spread
    assert comparison.ratio == pytest.approx(0.5, rel=0.05)
    assert comparison.workload == "slo(p99≤50ms)"


def test_a_bound_out_of_reach(tmp_path: Path) -> None:
    result = analysed(tmp_path, SLO, both_pairs(300.0, 1.0))
    (detail,) = failed(result, "searches_ended")
    assert detail.startswith("2 of 4 searches found a rate; Triton misses the bound even at 7.65/s")
    verdicts = {entry.workload: entry.verdict for entry in result.comparisons if entry.leading}
    assert verdicts["slo(p99≤50ms)"] == "invalid"
    assert verdicts["single"] != "invalid"


def test_a_generator_that_was_the_limit(tmp_path: Path) -> None:
    trials = [
        trial
        for pair in (0, 1)
        for trial in [*search("a", 300.0, round_=pair, cpu=0.97), *search("b", 90.0, round_=pair)]
    ]
    result = analysed(tmp_path, SLO, trials)
    (detail,) = failed(result, "generator_cpu")
    assert "97 % of a core at the lowest rate that failed" in detail


def test_several_processes_of_the_generator_are_told_by_their_mean(tmp_path: Path) -> None:
    trials = [
        msgspec.structs.replace(trial, generator_processes=2)
        for pair in (0, 1)
        for trial in [*search("a", 300.0, round_=pair, cpu=0.6), *search("b", 90.0, round_=pair)]
    ]
    result = analysed(tmp_path, SLO, trials)
    *_, busy = (check for check in result.checks if check.name == "generator_cpu")
    assert busy.ok
    assert "30 % of a core at the lowest rate that failed, on average over its processes" in busy.detail


@pytest.mark.parametrize(("ceiling", "ok"), [(1000.0, True), (400.0, False), (None, None)])
def test_a_rate_near_the_generators_ceiling(tmp_path: Path, ceiling: float | None, ok: bool | None) -> None:
    if ceiling is not None:
        write_calibration(tmp_path, ceiling)
    result = analysed(tmp_path, SLO, both_pairs(300.0, 150.0))
    (ceiling_check,) = [entry for entry in result.checks if entry.name == "generator_ceiling" and "slo" in entry.scope]
    assert ceiling_check.ok is ok
    if ceiling is not None:
        assert ceiling_check.detail.startswith("PyTorch (native) reached 29")
        assert isinstance(ceiling_check.value, float)
        assert ceiling_check.value == pytest.approx(300.0 / ceiling, rel=0.05)


@pytest.mark.parametrize(("lag_ms", "ok"), [(1.0, True), (20.0, False), (None, None)])
def test_requests_that_wait_for_a_connection(tmp_path: Path, lag_ms: float | None, ok: bool | None) -> None:
    trials = [msgspec.structs.replace(trial, send_lag_p99_ms=lag_ms) for trial in both_pairs(300.0, 150.0)]
    result = analysed(tmp_path, SLO, trials)
    (ceiling_check,) = [entry for entry in result.checks if entry.name == "connections_free"]
    assert ceiling_check.ok is ok
    if lag_ms is not None:
        assert ceiling_check.value == pytest.approx(lag_ms / 50.0)


@pytest.mark.parametrize(("ttft_ms", "ok"), [(500.0, True), (100.0, False), (None, None)])
def test_requests_of_a_language_model_may_wait_for_a_share_of_the_first_tokens_limit(
    tmp_path: Path, ttft_ms: float | None, ok: bool | None
) -> None:
    limits = TokenLimits(ttft_ms=ttft_ms, tpot_ms=50.0)
    workload = msgspec.structs.replace(SLO, scenario="goodput", latency_bound_ms=None, limits=limits)
    trials = [
        msgspec.structs.replace(trial, send_lag_p99_ms=20.0)
        for label in ("a", "b")
        for trial in search(label, 300.0, workload=workload)
    ]
    result = analysed(tmp_path, workload, trials)
    (free,) = [entry for entry in result.checks if entry.name == "connections_free"]
    assert free.ok is ok
    assert "20.0 ms, 4.0 % of the 500 ms" in free.detail or not ok
