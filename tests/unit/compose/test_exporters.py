"""What Prometheus is shown of runs and of the load generator."""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from loadgen.base.documents import read_record
from loadgen.locust.metrics import LoadMetrics
from loadgen.records.store import running
from loadgen.report import prometheus
from loadgen.report.prometheus import SILENT_SECONDS, RunsCollector
from loadgen.stats.durations import BOUNDS_S, DurationCounts


def scraped(collector: Any) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def store(run: Path, /, **documents: object) -> None:
    run.mkdir(parents=True, exist_ok=True)
    for name, document in {"experiment": {}, **documents}.items():
        (run / f"{name}.json").write_text(json.dumps(document))


COMPARISON = {
    "scenario": "single", "metric": "throughput", "verdict": "arm_better", "baseline": "a", "arm": "b", "ratio": 1.2,
    "ci95": [1.1, 1.3],
}  # fmt: skip
OTHER = {**COMPARISON, "arm": "torch", "ratio": 0.9}


def test_a_run_is_followed_from_its_start_to_its_verdict(tmp_path: Path) -> None:
    run = tmp_path / "r1"
    collector = RunsCollector(tmp_path)
    assert scraped(collector) == {}
    store(run, run={"state": "running", "phase": "load"})
    assert scraped(collector)["abserve_run_running"] == {(("phase", "load"), ("run", "r1")): 1.0}
    store(
        run,
        run={"state": "finished", "phase": "finished"},
        result={
            "valid": True, "rough": False, "verdict": {"sentence": "B wins"}, "comparisons": [COMPARISON, OTHER],
            "arms": [],
        },
        evidence={"records": [
            {"label": "a", "workload": None, "finding": "GPU_VERIFIED", "code": None},
            {"label": "a", "workload": None, "finding": "CPU_FALLBACK", "code": None, "control": True},
        ]},
    )  # fmt: skip
    found = scraped(collector)
    assert list(found["abserve_run_running"].values()) == [0.0]
    assert found["abserve_run_valid"] == {(("run", "r1"), ("sentence", "B wins")): 1.0}
    assert list(found["abserve_run_rough"].values()) == [0.0]
    ratios = [(dict(key), value) for key, value in found["abserve_comparison_ratio"].items()]
    assert [(key["baseline"], key["arm"], value) for key, value in ratios] == [("a", "b", 1.2), ("a", "torch", 0.9)]
    assert list(found["abserve_comparison_ratio_high"].values()) == [1.3, 1.3]
    (evidence,) = found["abserve_run_gpu_evidence"]
    assert dict(evidence)["finding"] == "GPU_VERIFIED"


def test_a_killed_run_does_not_run_for_ever(tmp_path: Path) -> None:
    store(tmp_path / "r1", run={"state": "running", "phase": "load"})
    later = RunsCollector(tmp_path, wall_s=lambda: time.time() + SILENT_SECONDS + 1)
    assert list(scraped(later)["abserve_run_running"].values()) == [0.0]


@pytest.mark.parametrize("folder", ["trials", "blocks", "causes/0-payload-a/samples"])
def test_a_run_runs_as_long_as_it_writes_anything_or_its_process_lives(tmp_path: Path, folder: str) -> None:
    run = tmp_path / "r1"
    store(run, run={"state": "running", "phase": "searching"})
    (run / folder).mkdir(parents=True)
    past = time.time() - SILENT_SECONDS - 60
    for path in (run, *run.rglob("*")):
        os.utime(path, (past, past))
    collector = RunsCollector(tmp_path)
    assert list(scraped(collector)["abserve_run_running"].values()) == [0.0]
    with running(run):  # which writes its own file, long ago
        os.utime(run, (past, past))
        assert list(scraped(collector)["abserve_run_running"].values()) == [1.0]
    os.utime(run, (past, past))
    (run / folder / "0007.json").touch()
    os.utime(run, (past, past))
    assert list(scraped(collector)["abserve_run_running"].values()) == [1.0]


def test_a_comparison_without_a_ratio_shows_none(tmp_path: Path) -> None:
    store(tmp_path / "r1", result={"valid": False, "comparisons": [{**COMPARISON, "ratio": None, "ci95": None}]})
    found = scraped(RunsCollector(tmp_path))
    assert list(found["abserve_run_valid"].values()) == [0.0]
    assert "abserve_comparison_ratio" not in found


def test_half_a_file_shows_nothing_and_breaks_nothing(tmp_path: Path) -> None:
    store(tmp_path / "r1", run={"state": "finished", "phase": "finished"})
    (tmp_path / "r1/result.json").write_text('{"valid": tr')
    (tmp_path / "r1/evidence.json").write_text("[]")
    assert "abserve_run_valid" not in scraped(RunsCollector(tmp_path))
    assert scraped(RunsCollector(tmp_path / "absent")) == {}


FILLINGS = {
    "values": "[" + "[],[]," * 1_000_000 + "0]",
    "rows": json.dumps([{**COMPARISON, "scenario": f"s{number}"} for number in range(20_000)]),
    "long texts": json.dumps([{**COMPARISON, "scenario": f"{number}" + "x" * 100_000} for number in range(50)]),
    "ratios": json.dumps([{**COMPARISON, "ratio": -2, "ci95": [0, 1e300]}, {**COMPARISON, "arm": "c", "ratio": 2**62}]),
}


@pytest.mark.parametrize("filling", FILLINGS)
def test_a_hostile_result_costs_itself(tmp_path: Path, filling: str) -> None:
    """Not the time of a scrape, not megabytes of metrics, not the other runs."""
    store(tmp_path / "r1", run={"state": "finished", "phase": "finished"})
    (tmp_path / "r1/result.json").write_text(f'{{"valid": true, "comparisons": {FILLINGS[filling]}}}')
    store(tmp_path / "r2", result={"valid": True, "comparisons": [COMPARISON]})
    registry = CollectorRegistry(auto_describe=False)
    registry.register(RunsCollector(tmp_path))
    assert len(generate_latest(registry)) < 2**20
    ratios = scraped(RunsCollector(tmp_path))["abserve_comparison_ratio"]
    assert [value for labels, value in ratios.items() if ("run", "r2") in labels] == [1.2]
    assert all(value > 0 for value in ratios.values())


def test_a_changed_result_is_read_again(tmp_path: Path) -> None:
    collector = RunsCollector(tmp_path)
    store(tmp_path / "r1", result={"valid": False})
    assert list(scraped(collector)["abserve_run_valid"].values()) == [0.0]
    store(tmp_path / "r1", result={"valid": True})
    os.utime(tmp_path / "r1/result.json", ns=(1, time.time_ns() + 10**9))
    assert list(scraped(collector)["abserve_run_valid"].values()) == [1.0]


def test_runs_that_are_no_longer_shown_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus, "NEWEST", 2)
    collector = RunsCollector(tmp_path)
    for number in range(5):
        store(tmp_path / f"r{number}", result={"valid": True})
        os.utime(tmp_path / f"r{number}/experiment.json", (number, number))
        scraped(collector)
    assert {path.parent.name for path in collector._read_files} == {"r3", "r4"}


def test_a_scrape_misses_no_file_that_another_one_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store(tmp_path / "r1", result={"valid": True})
    collector = RunsCollector(tmp_path)
    beside: list[dict[str, Any]] = []

    def reading(*arguments: Any) -> Any:
        if not beside:
            beside.append({})
            beside[0] = scraped(collector)
        return read_record(*arguments)

    monkeypatch.setattr(prometheus, "read_record", reading)
    assert scraped(collector) == beside[0]
    assert "abserve_run_valid" in beside[0]


def environment(**runner: object) -> Any:
    state = {"user_count": 4, "state": "running", "current_cpu_usage": 50, **runner}
    return SimpleNamespace(runner=SimpleNamespace(**state), user_classes=[], host="http://h")


def test_the_latency_says_from_when_it_counts() -> None:
    """The locustfile counts from the due time where there is a rate; see test_open_loop_run."""
    (latency,) = [one for one in LoadMetrics(environment()).collect() if one.name == "abserve_load_latency_seconds"]
    assert "From when a request was due (in a closed loop: sent)" in latency.documentation


def test_a_master_shows_the_sum_of_its_workers() -> None:
    workers = [LoadMetrics(environment()), LoadMetrics(environment())]
    total = LoadMetrics(environment())
    for worker in workers:
        for _ in range(3):
            worker.on_request(name="infer", response_time=10.0, response_length=2000, exception=None)
        worker.on_request(name="infer", response_time=1.0, response_length=0, exception=RuntimeError())
        worker.lag.add(0.001)
        total.merge(json.loads(json.dumps(worker.take())))
        total.merge(worker.take())  # nothing counts twice
    found = scraped(total)
    name = (("name", "infer"),)
    assert found["abserve_load_requests_total"] == {name: 8.0}
    assert found["abserve_load_failures_total"] == {name: 2.0}
    assert found["abserve_load_response_bytes_total"] == {name: 12000.0}
    assert found["abserve_load_latency_seconds_count"] == {name: 6.0}
    assert found["abserve_load_latency_seconds_sum"][name] == pytest.approx(0.06)
    assert found["abserve_load_send_lag_seconds_count"] == {(): 2.0}
    assert found["abserve_load_users"] == {(): 4.0}
    assert found["abserve_load_cpu_ratio"] == {(("process", "local"),): 0.5}


def test_buckets_hold_every_duration_once() -> None:
    chance = random.Random(1)
    counts = DurationCounts()
    values = [10 ** chance.uniform(-6, 2.5) for _ in range(500)]
    for value in values:
        counts.add(value)
    cumulative = list(counts.cumulative())
    assert cumulative[-1] == ("+Inf", 500.0)
    for bound_s, (_, count) in zip(BOUNDS_S, cumulative, strict=False):
        assert count == sum(value <= bound_s for value in values)


NONSENSE = [None, True, -1, 2**70, 1e308, "\x1b[31m\nx", "\ud800", [], [1], {}, {"a": 1}, "x" * 100]


def test_a_malformed_run_takes_nothing_from_the_others(tmp_path: Path) -> None:
    """Any value of any record may be anything; a pipe is not waited for, a link may lead nowhere."""
    good = {"valid": True, "verdict": {"sentence": "B wins"}, "comparisons": [COMPARISON], "arms": [{"label": "a"}]}
    evidence = {"records": [{"label": "a", "workload": None, "finding": "GPU_VERIFIED"}]}
    store(tmp_path / "good", run={"state": "finished", "phase": "finished"}, result=good, evidence=evidence)
    expected = scraped(RunsCollector(tmp_path))
    random.seed(3)
    for number in range(18):
        run = tmp_path / f"bad{number}"
        store(run, run={"state": random.choice(NONSENSE)}, result=spoilt(good), evidence=spoilt(evidence))
    for number, content in enumerate((b"[" * 100_000, b"\xff", b"", b"9" * 5000)):
        (tmp_path / f"bad{number}" / "result.json").write_bytes(content)
    (tmp_path / "bad9" / "result.json").unlink()
    os.mkfifo(tmp_path / "bad9" / "result.json")
    (tmp_path / "bad10" / "experiment.json").unlink()
    (tmp_path / "bad10" / "experiment.json").symlink_to(tmp_path / "nowhere")
    found = scraped(RunsCollector(tmp_path))
    for name, samples in expected.items():
        assert samples.items() <= found[name].items()


def spoilt(value: Any) -> Any:
    """With some values replaced by nonsense."""
    if random.random() < 0.2:
        return random.choice(NONSENSE)
    if isinstance(value, dict):
        return {key: spoilt(one) for key, one in value.items()}
    return [spoilt(one) for one in value] if isinstance(value, list) else value
