"""What only real traffic shows: replays find a server that is slow in bursts, and wrong answers to one rare shape.

Every fault is planted and goes through real sockets, the real generator and the whole analysis.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from loadgen.findings.rate_search import RatesFound
from loadgen.findings.traffic import TrafficFound
from loadgen.metrics.comparisons import Comparison, judge
from loadgen.records.probes import AnswersCompared
from loadgen.records.run import ParityRecord, Workload
from loadgen.verdict.result import Result
from tests.again import again
from tests.recording import write_traffic
from tests.truth.conftest import Compare
from tests.truth.planted_server import FEATURES, MATRIX

SERVER = "--delay-ms 60 --no-spin"
"""So long that what else the machine does is a small part of it."""
SLOW_IN_BURSTS = f"{SERVER} --crowded-factor 1.3 --crowded-from 8"
MARGIN = 0.1


def bursts(seconds: float) -> Iterator[tuple[float, np.ndarray]]:
    """10 requests a second, and every half second 16 at once."""
    random = np.random.default_rng(0)
    quiet = [(at, 1) for at in np.arange(0.0, seconds, 0.1)]
    for at, count in sorted([*quiet, *((at, 16) for at in np.arange(0.25, seconds, 0.5))]):
        for place in range(count):
            yield at + place * 1e-4, random.standard_normal((1 + place % 2, FEATURES))


def replay(folder: Path, *, pairs: int = 6, seconds: float = 2.0, **more: object) -> Workload:
    return Workload(
        scenario="traffic", batch_size=1, concurrency=64, requests=1, seconds=seconds, max_seconds=seconds,
        rounds=pairs, arrivals="trace", rate_per_s=42.0, traffic=str(folder), **more,  # type: ignore[arg-type]
    )  # fmt: skip


CLOSED = Workload(
    scenario="concurrent", batch_size=1, concurrency=4, requests=40, seconds=0.0, max_seconds=30.0, rounds=6
)


def latency(result: Result, workload: Workload) -> tuple[Comparison, str]:
    """The median latency, that of a burst's requests, and what its interval says whatever else the machine did."""
    found = next(c for c in result.comparisons if (c.metric, c.workload) == ("latency_p50", workload.name))
    return found, judge(found.ci95, p_adjusted=0.0, margin=MARGIN, higher_is_better=False)


@pytest.mark.slow
@pytest.mark.timeout(900)
@again
def test_a_server_that_is_slow_in_bursts_is_found_by_the_replay_alone(compare: Compare, tmp_path: Path) -> None:
    workload = replay(write_traffic(tmp_path / "traffic", bursts(12.0)))
    result = compare(SERVER, SLOW_IN_BURSTS, workload, CLOSED)
    replayed, verdict = latency(result, workload)
    assert verdict == "baseline_better", replayed
    assert 1.15 < (replayed.ratio or 0.0) < 1.6
    of_base, of_arm = (
        (part.bursts.ratio or 0.0, part.quiet.ratio or 0.0) for part in result.of(TrafficFound).latencies
    )
    assert of_base == (0.0, 0.0)
    assert of_arm[0] > 1.15 > 1.1 > of_arm[1]
    closed, verdict = latency(result, CLOSED)
    assert verdict in ("no_difference", "inconclusive"), closed


@pytest.mark.slow
@pytest.mark.timeout(900)
@again
def test_equal_servers_have_no_winner(compare: Compare, tmp_path: Path) -> None:
    workload = replay(write_traffic(tmp_path / "traffic", bursts(12.0), grpc=True), speed=2.0)
    result = compare(SERVER, SERVER, workload, transport="grpc")
    found, verdict = latency(result, workload)
    assert verdict in ("no_difference", "inconclusive"), found
    assert {block.errors for block in result.blocks} == {0}


@pytest.mark.slow
@pytest.mark.timeout(900)
@again
def test_the_highest_speed_within_a_limit_is_twice_that_of_half_a_server(compare: Compare, tmp_path: Path) -> None:
    folder = write_traffic(tmp_path / "traffic", bursts(20.0))
    search = msgspec.structs.replace(
        replay(folder, pairs=1, seconds=1.0), scenario="slo", requests=459, max_seconds=30.0, latency_bound_ms=100.0
    )
    result = compare("--rate 600 --no-spin", "--rate 300 --no-spin", search)
    rates = {rate.label: rate for rate in result.of(RatesFound).rates}
    assert [rate.ended for rate in rates.values()] == ["found", "found"]
    assert (rates["a"].rate_per_s or 0.0) <= 750.0
    assert 0.25 < (rates["b"].rate_per_s or 0.0) / (rates["a"].rate_per_s or 1.0) < 0.9
    assert rates["b"].speed == pytest.approx((rates["b"].rate_per_s or 0.0) / 42.0)
    assert all(trial.planned >= 459 for trial in result.of(RatesFound).trials)


def test_wrong_answers_to_one_rare_shape_are_found_before_the_load(compare: Compare, tmp_path: Path) -> None:
    """The inputs of the model have other lengths than the one request of 300, of which B's answer is wrong."""
    random = np.random.default_rng(0)
    lengths = [16] * 50 + [300]
    traffic = write_traffic(
        tmp_path / "traffic", ((at / 10, random.standard_normal((1, length))) for at, length in enumerate(lengths))
    )
    server = "--delay-ms 1 --no-spin --sequences"
    planted = f"{server} --fault wrong --fault-from-length 200"
    result = compare(server, planted, replay(traffic, pairs=1), samples="sequence_samples.py")
    assert not result.valid
    parity = json.loads((tmp_path / "run2" / ParityRecord.FILE).read_bytes())
    wrong = [case["name"] for case in parity["cases"] if not case["ok"]]
    assert wrong == ["recorded requests, x FP32 [1, 300]"]


def test_an_answer_that_all_arms_give_and_the_recording_does_not_is_found(compare: Compare, tmp_path: Path) -> None:
    """Both servers answer the one long request wrongly, so that they agree; the recorded server answered it right."""
    random = np.random.default_rng(0)
    lengths = [16] * 50 + [300]
    traffic = write_traffic(
        tmp_path / "traffic",
        ((at / 10, random.standard_normal((1, length))) for at, length in enumerate(lengths)),
        answer=lambda _, rows: rows[:, :, None] * MATRIX[0],
    )
    planted = "--delay-ms 1 --no-spin --sequences --fault wrong --fault-from-length 200"
    result = compare(planted, planted, replay(traffic, pairs=1, check_answers=True), samples="sequence_samples.py")
    parity = json.loads((tmp_path / "run2" / ParityRecord.FILE).read_bytes())
    wrong = [(case["label"], case["kind"]) for case in parity["cases"] if not case["ok"]]
    assert wrong == [("a", "recorded"), ("b", "recorded")]
    assert [(check.state, check.arms) for check in result.checks if check.name == "parity"] == [("failed", ("a", "b"))]
    assert not result.valid


@pytest.mark.parametrize("transport", ["http", "grpc"])
def test_answers_under_load_are_compared_with_the_recorded_ones(
    compare: Compare, tmp_path: Path, transport: str
) -> None:
    """Of many requests of one shape one has another recorded answer, which is too late to be asked for before the
    load."""
    traffic = write_traffic(
        tmp_path / "traffic",
        ((at / 10, np.full((1, FEATURES), at)) for at in range(12)),
        grpc=transport == "grpc",
        answer=lambda number, rows: rows @ MATRIX * (-1.0 if number == 8 else 1.0),
    )
    server = "--delay-ms 1 --no-spin"
    result = compare(server, server, replay(traffic, pairs=1, check_answers=True), transport=transport)
    states = {check.name: check.state for check in result.checks}
    assert (states["parity"], states["answers_under_load"]) == ("passed", "failed")
    records = json.loads((tmp_path / "run2" / AnswersCompared.FILE).read_bytes())
    assert [(each["answers"], each["recorded"], each["wrong"]) for each in records] == [(12, 12, 1)] * 2
    assert not result.valid
