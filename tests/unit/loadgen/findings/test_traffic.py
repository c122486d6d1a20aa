"""How recorded traffic arrives, and where an arm loses time on it."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from loadgen.experiment.replay import Replay
from loadgen.findings.traffic import PartOfTraffic, ReplayedTraffic, TrafficFound, describe
from loadgen.records.run import BlockRecord, StageTotals
from loadgen.records.samples import SAMPLE_DTYPE, Samples
from loadgen.report.contents import result_document
from loadgen.report.renderers.html import render_html
from loadgen.verdict.result import Result, analyse
from tests.golden.synthetic_run import ORIGIN_NS
from tests.recording import write_traffic
from tests.unit.loadgen.metrics.test_open_loop import MS, open_run

BURST_S = 0.5
"""A burst of 16 requests comes as often, and one request each 0.1 s."""


def due_ms(seconds: float) -> list[float]:
    quiet = np.arange(0.0, seconds, 0.1)
    bursts = (np.arange(0.25, seconds, BURST_S)[:, None] + np.arange(16) * 1e-3).ravel()
    return sorted(1000.0 * np.concatenate([quiet, bursts]))


def described(tmp_path: Path, arrivals: list[float], count: int = 1) -> ReplayedTraffic:
    """Traffic that arrives at these ms; the input of every second request has more rows, and few are different."""
    rows = [np.full((1 + number % 2 * count, 2), number % 5, np.float32) for number in range(len(arrivals))]
    folder = write_traffic(tmp_path / "traffic", zip((at / 1000 for at in arrivals), rows, strict=True))
    return describe(Replay(str(folder), "http", 1.0), 0.05)


def test_what_the_traffic_consists_of(tmp_path: Path) -> None:
    found = described(tmp_path, [1000.0 * second for second in range(101)])
    assert (found.requests, found.seconds, found.rate_per_s) == (101, 100.0, 1.0)
    assert found.shapes == {"x FP32 [1, 2]": 51, "x FP32 [2, 2]": 50}
    assert (found.contents, round(found.repeated_share, 3)) == (10, round(91 / 101, 3))
    assert found.bytes["max"] - found.bytes["min"] >= 8
    assert (sum(found.arrivals), found.bar_seconds, found.gap_variation) == (101, 0.5, 0.0)
    assert found.dispersion == pytest.approx(0.9, abs=0.01)


def test_bursts_are_more_than_independent_arrivals(tmp_path: Path) -> None:
    independent = np.cumsum(np.random.default_rng(0).exponential(100.0, 2000))
    found = described(tmp_path / "independent", list(independent))
    assert found.dispersion == pytest.approx(1.0, abs=0.3)
    assert found.gap_variation == pytest.approx(1.0, abs=0.1)
    bursts = described(tmp_path / "bursts", sorted([*independent, *np.repeat(np.arange(0.0, 200e3, 20e3), 50)]))
    assert bursts.dispersion is not None
    assert bursts.dispersion > 5.0


def bursty_run(
    directory: Path, slower: float, speed: float = 1.0, *, quiet_pairs: bool = False, labels: str = "ab", **own: object
) -> Result:
    """The last arm takes so many times as long in bursts, and as long in quiet. Every second pair may have fewer
    bursts. `own`: fields of the workload."""

    def play(label: str, pair: int) -> tuple[Samples, int]:
        due = np.array(due_ms(14.0)) * MS / speed
        if quiet_pairs and pair % 2:
            due = due[np.arange(len(due)) % 18 < 9]
        crowded = np.array([np.sum(abs(due - at) <= 50 * MS) > 10 for at in due])
        samples = np.zeros(len(due), dtype=SAMPLE_DTYPE)
        took_ms = 20.0 + np.random.default_rng([pair, label == labels[-1]]).exponential(0.2, len(due))
        took_ms[crowded] *= slower if label == labels[-1] else 1.0
        for name, values in {
            "intended_ns": due, "send_ns": due, "first_byte_ns": due + took_ms * MS, "end_ns": due + took_ms * MS
        }.items():  # fmt: skip
            samples[name] = ORIGIN_NS + values
        samples["user"], samples["batch"] = np.arange(len(due)) % 64, 1
        samples["status"], samples["error"] = 200, -1
        return samples, int(due[-1])

    arms = {label: lambda pair, label=label: play(label, pair) for label in labels}
    more = {"scenario": "traffic", "traffic": "folder", "arrivals": "trace", "concurrency": 64, "speed": speed}
    return open_run(directory, arms, 42.0 * speed, **more, **own)  # type: ignore[arg-type]


@pytest.mark.parametrize("speed", [1.0, 2.0])
def test_an_arm_that_loses_time_in_bursts_alone_is_shown_as_that(tmp_path: Path, speed: float) -> None:
    seen = described(tmp_path, due_ms(14.0))
    bursty_run(tmp_path / "run", 1.3, speed)
    (tmp_path / "run" / ReplayedTraffic.FILE).write_bytes(msgspec.json.encode(seen))
    result = analyse(tmp_path / "run")
    base, other = result.of(TrafficFound).latencies

    def within(part: PartOfTraffic, low: float, high: float) -> bool:
        return part.ci95 is not None and low < part.ci95[0] <= part.ci95[1] < high

    assert (base.label, base.bursts.ratio, base.quiet.ratio) == ("a", None, None)
    assert within(other.bursts, 1.25, 1.35)
    assert within(other.quiet, 0.97, 1.03)
    assert 0 < other.quiet.requests < other.bursts.requests
    assert other.bursts.under_way is not None
    assert other.quiet.under_way is not None
    assert other.bursts.under_way > 3 * other.quiet.under_way
    assert other.by_crowd[16] > 1.2 * base.by_crowd[16]
    page = render_html(result_document(result))
    assert "Arrivals over time" in page
    assert "In bursts and in quiet" in page


def test_a_server_at_its_best_is_compared_with_what_is_the_baseline_for_that_load(tmp_path: Path) -> None:
    """The baseline's other configuration is not loaded there, so nothing was compared."""
    run = tmp_path / "run"
    bursty_run(run, 1.3, labels="abc", arms=("b", "c"))
    (run / ReplayedTraffic.FILE).write_bytes(msgspec.json.encode(described(tmp_path, due_ms(14.0))))
    experiment = json.loads((run / "experiment.json").read_text())
    for arm, server in zip(experiment["arms"], "aac", strict=True):
        arm["server"] = server
    (run / "experiment.json").write_text(json.dumps(experiment))
    base, other = analyse(run).of(TrafficFound).latencies
    assert (base.label, base.bursts.ratio) == ("b", None)
    assert other.label == "c"
    assert other.bursts.ratio == pytest.approx(1.3, rel=0.05)


def test_batches_are_those_of_the_blocks_with_more_and_fewer_bursts(tmp_path: Path) -> None:
    seen = described(tmp_path, due_ms(14.0))
    bursty_run(tmp_path / "run", 1.0, quiet_pairs=True)
    (tmp_path / "run" / ReplayedTraffic.FILE).write_bytes(msgspec.json.encode(seen))
    for path in (tmp_path / "run" / "blocks").glob("*.json"):
        block = msgspec.json.decode(path.read_bytes(), type=BlockRecord)
        mean = (4 if block.label == "a" else 2) if block.round % 2 == 0 else 1
        times = block.requests - block.requests % mean
        stages = StageTotals(
            requests=None, items=times, executions=times // mean, queue_ns=None, compute_input_ns=None,
            compute_infer_ns=None, compute_output_ns=None,
        )  # fmt: skip
        path.write_bytes(msgspec.json.encode(msgspec.structs.replace(block, stages=stages)))
    result = analyse(tmp_path / "run")
    means = [(each.bursts.executed_batch, each.quiet.executed_batch) for each in result.of(TrafficFound).latencies]
    assert means == [(4.0, 1.0), (2.0, 1.0)]
    assert "executed batch" in render_html(result_document(result))


def test_a_run_without_a_description_of_its_traffic_has_no_such_section(tmp_path: Path) -> None:
    assert bursty_run(tmp_path / "run", 1.0).of(TrafficFound) == TrafficFound()
