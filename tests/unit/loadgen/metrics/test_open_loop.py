"""Open loops: whether the rate was sustained, who caused the lag, and what is compared."""

from __future__ import annotations

import heapq
import io
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from rich.console import Console

from loadgen.experiment.schedule import due_offsets_ns
from loadgen.metrics.registry import (
    OpenLoopSummary,
    count_backlogs,
    has_grown,
    pool_open_loops,
    split_lag_ms,
    summarise_open_loop,
)
from loadgen.records.checks import Check
from loadgen.records.run import BlockRecord, Workload
from loadgen.records.samples import SAMPLE_DTYPE, Samples
from loadgen.report.contents import result_document
from loadgen.report.renderers.html import render_html
from loadgen.report.renderers.markdown import render_markdown
from loadgen.report.renderers.terminal import print_document
from loadgen.verdict.result import Result, analyse
from tests.golden.synthetic_run import ORIGIN_NS, Plan, SimulatedArm, write_calibration, write_run

MS = 1_000_000


def play(
    rate: float,
    count: int,
    service_ms: Callable[[float], float],
    *,
    users: int = 8,
    servers: int = 8,
    late_ms: float = 0.0,
    arrivals: str = "constant",
    seed: int = 0,
) -> tuple[Samples, int]:
    """Requests of a schedule, sent by the first free user, answered by the first free server; and the schedule's span.
    `service_ms` is a function of the second in which a request is sent; the generator is `late_ms` late by itself."""
    offsets = due_offsets_ns(arrivals, rate, count, seed)  # type: ignore[arg-type]
    free_users = [(0, user) for user in range(users)]
    free_servers = [0] * servers
    samples = np.zeros(count, dtype=SAMPLE_DTYPE)
    for row, due in zip(samples, offsets.tolist(), strict=True):
        free, user = heapq.heappop(free_users)
        sent = max(due, free) + int(late_ms * MS)
        begin = max(sent, heapq.heappop(free_servers))
        end = begin + int(service_ms(sent / 1e9) * MS)
        heapq.heappush(free_servers, end)
        heapq.heappush(free_users, (end, user))
        row["intended_ns"], row["send_ns"], row["end_ns"] = ORIGIN_NS + due, ORIGIN_NS + sent, ORIGIN_NS + end
        row["first_byte_ns"], row["user"], row["batch"] = row["end_ns"], user, 1
        row["status"], row["error"], row["request_bytes"] = 200, -1, 600_000
    return samples, int(offsets[-1])


def summary(samples: Samples, span_ns: int, offered: int | None = None) -> OpenLoopSummary:
    return summarise_open_loop(samples, offered or len(samples), span_ns, 8)


def backlog_grew(samples: Samples, offered: int, span_ns: int) -> bool:
    return has_grown(count_backlogs(samples, offered, span_ns), offered)


def test_a_rate_below_capacity_is_sustained_and_measured_exactly() -> None:
    samples, span_ns = play(50.0, 500, lambda _: 20.0)
    loop = summary(samples, span_ns)
    assert loop.saturation is None
    assert loop.achieved_per_s == pytest.approx(50.0)
    assert loop.offered_per_s == pytest.approx(50.0)
    assert loop.answered_share == pytest.approx(1.0, abs=2 / 500)
    assert (loop.unsent, loop.generator_lag_max_ms, loop.connection_wait_max_ms) == (0, 0.0, 0.0)


def test_beyond_capacity_the_answers_come_at_the_capacity_and_it_says_so() -> None:
    """Eight servers of 100 ms give 80 a second."""
    samples, span_ns = play(100.0, 500, lambda _: 100.0)
    loop = summary(samples, span_ns)
    assert loop.achieved_per_s == pytest.approx(80.0, rel=0.03)
    assert loop.saturation is not None
    assert loop.saturation.startswith("saturated at this rate: answered ")
    assert f"of {500} in time" in loop.saturation
    assert loop.answered_share == pytest.approx(0.8, abs=0.03)
    assert loop.connection_wait_max_ms is not None
    assert loop.connection_wait_max_ms > 500
    assert loop.generator_lag_max_ms == 0.0, "waiting for a busy connection is not the generator's doing"


def test_what_was_never_sent_is_saturation_too() -> None:
    samples, span_ns = play(50.0, 500, lambda _: 20.0)
    loop = summary(samples[:400], span_ns, offered=500)
    assert (loop.unsent, loop.offered) == (100, 500)
    assert loop.saturation is not None


@pytest.mark.parametrize("seed", range(20))
def test_neither_a_stall_nor_the_queue_of_a_busy_arm_is_saturation(seed: int) -> None:
    stalled, span_ns = play(50.0, 250, lambda s: 200.0 if s > 4.75 else 5.0, seed=seed, arrivals="poisson")
    assert not backlog_grew(stalled, 250, span_ns)
    busy, span_ns = play(70.0, 700, lambda _: 10.0, users=64, servers=1, seed=seed, arrivals="poisson")
    assert not backlog_grew(busy, 700, span_ns)


def test_saturation_is_seen_at_a_fifth_too_much() -> None:
    grew = [
        backlog_grew(samples, 1100, span)
        for seed in range(20)
        for samples, span in [play(120.0, 1100, lambda _: 10.0, users=64, servers=1, seed=seed, arrivals="poisson")]
    ]
    assert sum(grew) == 20


def test_lag_is_split_between_the_generator_and_the_wait_for_a_connection() -> None:
    samples, _ = play(50.0, 100, lambda _: 60.0, users=2, late_ms=1.5)
    own_ms, wait_ms = split_lag_ms(samples, 2)
    assert own_ms == pytest.approx(1.5)
    assert wait_ms.max() > 500
    own_ms, wait_ms = split_lag_ms(samples, 100)
    assert wait_ms.max() == 0.0, "with a hundred connections one was always free"
    total_ms = np.sort((samples["send_ns"] - samples["intended_ns"]) / 1e6)
    assert np.sort(own_ms + wait_ms) == pytest.approx(total_ms)


def test_a_generator_that_is_held_up_does_not_blame_the_connections() -> None:
    """For 70 ms it does nothing: answers are seen late, and overdue requests leave on connections just given back."""
    samples, _ = play(50.0, 100, lambda _: 60.0, users=8)
    held = (samples["intended_ns"] - ORIGIN_NS > 900 * MS) & (samples["intended_ns"] - ORIGIN_NS <= 970 * MS)
    samples["send_ns"][held] = ORIGIN_NS + 970 * MS
    samples["end_ns"] = np.maximum(samples["end_ns"], samples["send_ns"] + 60 * MS)
    under_way = (samples["send_ns"] < ORIGIN_NS + 900 * MS) & (samples["end_ns"] > ORIGIN_NS + 900 * MS)
    samples["end_ns"][under_way] = ORIGIN_NS + 970 * MS
    samples["user"][np.flatnonzero(held)[: under_way.sum()]] = samples["user"][under_way]
    own_ms, wait_ms = split_lag_ms(samples, 8)
    assert held.sum() == 3
    assert wait_ms.max() == 0.0
    assert own_ms.max() == pytest.approx(50.0)


def open_run(
    directory: Path, play_arm: dict[str, Callable[[int], tuple[Samples, int]]], rate: float, **more: object
) -> Result:
    """A stored run of one open workload, its samples replaced by those of `play_arm`, by the number of the pair."""
    workload = Workload(
        scenario="open", batch_size=1, concurrency=8, requests=1, seconds=14.0, max_seconds=20.0, rounds=8,
        arrivals="constant", rate_per_s=rate,
    )  # fmt: skip
    workload = msgspec.structs.replace(workload, **more)
    write_run(directory, Plan(workloads=(workload,), others=(SimulatedArm(),) * (len(play_arm) - 2)))
    for path in (directory / "blocks").glob("*.json"):
        record = msgspec.json.decode(path.read_bytes(), type=BlockRecord)
        samples, span_ns = play_arm[record.label](record.round)
        samples["request_bytes"] = 602_412
        np.save(directory / record.samples, samples)
        changed = msgspec.structs.replace(
            record, requests=len(samples), offered=len(samples), due_span_ns=span_ns,
            window_start_ns=ORIGIN_NS, window_end_ns=int(samples["end_ns"].max(initial=ORIGIN_NS)), stages=None,
            errors=int((samples["error"] >= 0).sum()), error_messages=("connection closed",),
            generator_cpu_ns=10**8,
        )  # fmt: skip
        path.write_bytes(msgspec.json.encode(changed))
    return analyse(directory)


def find(result: Result, name: str) -> Check:
    (made,) = [check for check in result.checks if check.name == name]
    return made


def noisy(base_ms: float, stall_ms: float = 0.0) -> Callable[[int], tuple[Samples, int]]:
    def block(pair: int) -> tuple[Samples, int]:
        noise = np.random.default_rng(pair)
        return play(50.0, 700, lambda s: base_ms + noise.exponential(1.0) + (stall_ms if s % 5 < 0.2 else 0.0))

    return block


def test_the_tail_leads_and_throughput_is_not_compared(tmp_path: Path) -> None:
    result = open_run(tmp_path, {"a": noisy(20.0), "b": noisy(20.0, stall_ms=200.0)}, 50.0)
    assert [c.metric for c in result.comparisons] == ["achieved_rate", "latency_p50", "latency_p90", "latency_p99"]
    rate, median, _, tail = result.comparisons
    assert tail.leading
    assert (median.verdict, tail.verdict) == ("no_difference", "baseline_better")
    assert rate.verdict == "no_difference"
    assert "at 50 requests/s" in result.verdict.sentence
    assert find(result, "rate_sustained").ok
    assert find(result, "send_lag").ok


def test_a_saturated_arm_is_a_result_with_its_capacity_and_no_latencies(tmp_path: Path) -> None:
    result = open_run(tmp_path, {"a": noisy(20.0), "b": noisy(200.0)}, 50.0)
    rate, *latencies = result.comparisons
    assert rate.verdict == "baseline_better"
    assert rate.leading
    assert "the load of Triton at" in result.verdict.sentence
    assert "at 50 requests/s" in result.verdict.sentence
    assert rate.ratio == pytest.approx(8 / 0.201 / 50, rel=0.05)
    for latency in latencies:
        assert latency.ratio is None
        assert not latency.leading
        assert latency.reason is not None
        assert latency.reason.startswith("Triton was saturated at this rate: answered")
    sustained = find(result, "rate_sustained")
    assert (sustained.ok, sustained.severity) == (False, "informs")
    assert any("Triton was saturated at this rate" in reason for reason in result.verdict.scenarios[0].reasons)
    assert find(result, "connections_free").ok is False
    for document in (render_markdown(result_document(result)), render_html(result_document(result))):
        assert "Open loops" in document
        assert "39.8" in document, "the achieved rate"
    narrow = io.StringIO()
    print_document(result_document(result), Console(file=narrow, width=80, color_system=None))
    assert "…" not in narrow.getvalue(), "eighty columns hold all of it"
    assert find(result, "send_lag").ok, "the lag is the server's doing"


def test_a_saturated_arm_with_a_block_without_an_answer_still_has_a_leading_comparison(tmp_path: Path) -> None:
    """Without one the workload is in no count of the verdict, and decided at once where a run ends when all are."""

    def saturated(pair: int) -> tuple[Samples, int]:
        samples, span_ns = noisy(200.0)(pair)
        samples["error"] = -1 if pair else 0
        return samples, span_ns

    result = open_run(tmp_path, {"a": noisy(20.0), "b": saturated}, 50.0)
    assert [comparison.metric for comparison in result.comparisons if comparison.leading] == ["achieved_rate"]
    assert result.verdict.sentence.startswith("No verdict")


def some(share: int, base_ms: float, other_ms: float) -> Callable[[int], tuple[Samples, int]]:
    """The first `share` of the eight rounds with one service time, the rest with another."""
    return lambda pair: noisy(base_ms if pair < share else other_ms)(pair)


@pytest.mark.parametrize(("rounds", "saturated"), [(1, False), (3, False), (5, True)])
def test_an_arm_is_saturated_in_its_median_block_or_not_at_all(tmp_path: Path, rounds: int, saturated: bool) -> None:
    """One block whose backlog grew took every latency of the workload and changed its leading metric."""
    result = open_run(tmp_path, {"a": noisy(20.0), "b": some(rounds, 200.0, 20.0)}, 50.0)
    rate, *latencies = result.comparisons
    assert rate.leading is saturated
    assert all((latency.ratio is None) == saturated for latency in latencies)
    sustained = find(result, "rate_sustained")
    assert sustained.ok is not saturated
    expected = "Triton was saturated at this rate" if saturated else f"the backlog grew in {rounds} of 16 blocks"
    assert expected in sustained.detail


def queue(rate: float, seed: int) -> OpenLoopSummary:
    """A block of one server that can answer 100 a second, with exponential service times."""
    random = np.random.default_rng(1000 + seed)
    samples, span_ns = play(
        rate, 250, lambda _: random.exponential(10.0), users=256, servers=1, seed=seed, arrivals="poisson"
    )
    return summary(samples, span_ns)


@pytest.mark.parametrize(("rate", "saturated"), [(90.0, False), (125.0, True)])
def test_more_rounds_make_it_more_certain_whether_an_arm_is_saturated(rate: float, saturated: bool) -> None:
    """At 90 % of its capacity some block of half the arms looks saturated, and beyond it a third of the blocks do
    not."""
    blocks = [queue(rate, seed) for seed in range(120)]
    arms = [blocks[start::10] for start in range(10)]
    looks = sum(loop.saturation is not None for loop in blocks)
    assert 0.02 < looks / 120 < 0.7
    assert sum(any(loop.saturation for loop in arm) for arm in arms) >= 4
    judged = [pooled.saturation is not None for arm in arms if (pooled := pool_open_loops(arm)) is not None]
    assert sum(is_saturated is saturated for is_saturated in judged) >= 9


def test_a_late_generator_takes_the_verdict(tmp_path: Path) -> None:
    late = {label: lambda pair: play(50.0, 700, lambda _: 20.0 + pair * 0.01, late_ms=1.0) for label in "ab"}
    result = open_run(tmp_path, late, 50.0)
    lag = find(result, "send_lag")
    assert (lag.ok, lag.severity) == (False, "invalidates")
    assert lag.value == pytest.approx(1 / 21.0, rel=0.02)
    assert "load generator" in lag.remedy
    assert not result.valid


@pytest.mark.parametrize(("held_up", "ok"), [(1, True), (3, False)])
@pytest.mark.parametrize("check", ["send_lag", "replay_on_time"])
def test_one_stall_of_the_machine_costs_no_verdict(tmp_path: Path, check: str, held_up: int, ok: bool) -> None:
    """In some of the eight rounds the generator stands still for half a second, in which 25 of 700 requests fall due:
    of one, they are 0.4 % of an arm's requests, of three 1.3 %. One took the verdict of the whole run before."""

    def stalled(pair: int) -> tuple[Samples, int]:
        samples, span_ns = noisy(20.0)(pair)
        due_ms = (samples["intended_ns"] - ORIGIN_NS) / MS
        late = (due_ms > 5000) & (due_ms < 5500) & (pair < held_up)
        delays_ns = np.where(late, ORIGIN_NS + 5500 * MS - samples["send_ns"], 0)
        samples["send_ns"] += delays_ns
        samples["end_ns"] += delays_ns
        samples["first_byte_ns"] += delays_ns
        return samples, span_ns

    replay = {"scenario": "traffic", "traffic": "folder", "arrivals": "trace"} if check == "replay_on_time" else {}
    result = open_run(tmp_path, {"a": noisy(20.0), "b": stalled}, 50.0, concurrency=64, **replay)
    assert find(result, check).ok is ok
    assert result.valid is ok


@pytest.mark.parametrize(("requests_per_s", "ok"), [(60.0, False), (101.0, True)])
def test_beyond_half_of_the_calibrated_ceiling_a_workload_is_flagged(
    tmp_path: Path, requests_per_s: float, ok: bool
) -> None:
    open_run(tmp_path, {"a": noisy(20.0), "b": noisy(20.0)}, 50.0)
    write_calibration(tmp_path, requests_per_s)
    result = analyse(tmp_path)
    ceiling = find(result, "generator_ceiling")
    assert (ceiling.ok, ceiling.severity) == (ok, "warns")
    assert ceiling.value == pytest.approx(50.0 / requests_per_s, rel=0.01)
    assert " images/s, " in ceiling.detail
    assert result.valid


@pytest.mark.parametrize("sent", [0, 700])
def test_blocks_without_a_single_answer_are_no_measurement(tmp_path: Path, sent: int) -> None:
    def unanswered(pair: int) -> tuple[Samples, int]:
        samples, span_ns = noisy(20.0)(pair)
        samples["error"], samples["status"] = 0, 0
        return samples[:sent], span_ns

    result = open_run(tmp_path, {"a": noisy(20.0), "b": unanswered}, 50.0)
    assert not result.valid
    assert {comparison.verdict for comparison in result.comparisons} == {"invalid"}
    assert {comparison.ratio for comparison in result.comparisons} == {None}
    assert find(result, "request_errors").ok is (False if sent else None)
    assert result.verdict.sentence.startswith("No verdict")


def test_an_arm_without_requests_does_not_hide_the_other_arms_errors(tmp_path: Path) -> None:
    def failing(pair: int) -> tuple[Samples, int]:
        samples, span_ns = noisy(20.0)(pair)
        samples["error"], samples["status"] = 0, 0
        return samples, span_ns

    def silent(pair: int) -> tuple[Samples, int]:
        samples, span_ns = noisy(20.0)(pair)
        return samples[:0], span_ns

    errors = find(open_run(tmp_path, {"a": failing, "b": silent}, 50.0), "request_errors")
    assert errors.ok is False
    assert errors.detail.startswith("no request was sent to Triton; ")
    assert errors.detail.endswith("requests failed; first message: connection closed")


@pytest.mark.parametrize(("late_ms", "kept"), [(0.9, True), (1.1, False)])
def test_a_replay_must_keep_the_recorded_times(tmp_path: Path, late_ms: float, kept: bool) -> None:
    """Within 1 ms, also where the latencies are so long that the delay is a small part of them."""
    late = {label: lambda pair: play(50.0, 700, lambda _: 100.0 + pair * 0.01, late_ms=late_ms) for label in "ab"}
    result = open_run(tmp_path, late, 50.0, scenario="traffic", traffic="folder", arrivals="trace")
    times = find(result, "replay_on_time")
    assert (times.ok, times.severity) == (kept, "invalidates")
    assert find(result, "send_lag").ok
    assert result.valid is kept
    assert ("with recorded traffic" in result.verdict.sentence) is kept
