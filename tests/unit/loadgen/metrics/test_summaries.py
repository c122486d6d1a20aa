"""Throughput over the time of full load, latency from the intended start, failed requests apart."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from loadgen.metrics.registry import at_full_load, full_load_share, slow_start, throughput_per_s
from loadgen.metrics.summaries import summarise_blocks, summarise_workload
from loadgen.records.run import BlockRecord, WorkerRecord, Workload
from loadgen.records.samples import SAMPLE_DTYPE, Samples, good, latencies_ms
from loadgen.records.store import StoredBlock


def samples(rows: list[tuple[float, float, int]], batch: int = 1) -> Samples:
    """(send, end) in ms and the user."""
    result = np.zeros(len(rows), dtype=SAMPLE_DTYPE)
    for sample, (sent, end, user) in zip(result, rows, strict=True):
        sample["intended_ns"] = sample["send_ns"] = int(sent * 1e6)
        sample["end_ns"] = int(end * 1e6)
        sample["user"], sample["batch"], sample["error"], sample["status"] = user, batch, -1, 200
    return result


def test_one_user_is_items_over_time() -> None:
    block = samples([(10.0 * i, 10.0 * i + 10.0, 0) for i in range(50)], batch=4)
    assert throughput_per_s(block) == pytest.approx(50 * 4 / 0.5)


def test_constant_latency_is_exact_although_the_users_do_not_divide_the_requests() -> None:
    """16 users, 200 requests, 100 ms each: 8 users get a thirteenth; items up to the last answer would say 153.8."""
    block = samples([(100.0 * (i // 16), 100.0 * (i // 16) + 100.0, i % 16) for i in range(200)])
    assert throughput_per_s(block) == pytest.approx(160.0)


def test_what_begins_before_every_user_had_an_answer_does_not_count() -> None:
    """A queue that fills: the first answers come after 10 and 20 ms, all others after 20."""
    block = samples([(0, 10, 0), (0, 20, 1), (10, 30, 0), (20, 40, 1), (30, 50, 0), (40, 60, 1)])
    assert at_full_load(block)["intended_ns"].tolist() == [20_000_000, 30_000_000, 40_000_000]
    assert throughput_per_s(block) == pytest.approx(100.0)
    assert full_load_share(block) == pytest.approx(60 / 2 / 60)


def test_a_block_of_one_request_per_user_counts_whole() -> None:
    block = samples([(0, 10, 0), (0, 20, 1)])
    assert len(at_full_load(block)) == 2
    assert throughput_per_s(block) == pytest.approx(2 * 2 / 0.03)
    assert len(at_full_load(block[:0])) == 0


def test_failed_requests_add_no_throughput_and_no_latency() -> None:
    block = samples([(10.0 * i, 10.0 * i + 10.0, 0) for i in range(20)])
    block["error"][::2] = 0
    assert throughput_per_s(block) == pytest.approx(10 / 0.19)
    assert len(latencies_ms(good(block))) == 10
    block["error"] = 0
    assert throughput_per_s(block) is None
    assert throughput_per_s(block[:0]) is None


def test_latency_counts_from_the_intended_start() -> None:
    block = samples([(0, 10, 0)])
    block["send_ns"] = 8_000_000
    assert latencies_ms(block).tolist() == [10.0]


def test_slow_first_requests_are_weighed_by_the_time_they_cost() -> None:
    warm = samples([(10.0 * i, 10.0 * i + 10.0, 0) for i in range(101)])
    assert slow_start(warm) == pytest.approx(0.0)
    ends = np.cumsum([10.0] + [30.0] * 20 + [10.0] * 80)
    cold = samples([(float(start), float(end), 0) for start, end in zip(np.r_[0.0, ends[:-1]], ends, strict=True)])
    assert slow_start(cold) == pytest.approx(20 * 20 / 1400)
    assert slow_start(warm[:10]) is None


def test_waiting_for_the_moment_to_send_is_no_work_of_the_generator() -> None:
    """Near 10,000 requests per second the waits alone took the core, and the check `generator_cpu` failed."""
    workload = Workload(
        scenario="concurrent", batch_size=1, concurrency=4, requests=1, seconds=1.0, max_seconds=2.0, rounds=1
    )
    record = BlockRecord(
        index=0, workload=workload.name, round=0, label="a", position=0, started_at="", window_start_ns=0,
        window_end_ns=1_000_000, samples="", requests=0, items=0, errors=0, error_messages=(), stages=None,
        generator_cpu_ns=950_000, generator_spin_ns=500_000, server_cpu_ns=None, complete=True,
    )  # fmt: skip
    workers = tuple(
        WorkerRecord(
            index=index, host="", pid=1, requests=0, cpu_ns=cpu_ns, spin_ns=500_000, window_start_ns=0,
            window_end_ns=1_000_000,
        )
        for index, cpu_ns in enumerate((900_000, 700_000))
    )  # fmt: skip
    shared = msgspec.structs.replace(record, workers=workers)
    summaries = summarise_blocks([StoredBlock(each, workload, None) for each in (record, shared)])
    assert [block.generator_cpu_share for block in summaries] == [pytest.approx(0.45), pytest.approx(0.4)]


def blocks_at(speeds_by_start: list[list[float]]) -> list[StoredBlock]:
    """Blocks of one arm with this many items per second, one list per start of the servers."""
    workload = Workload(scenario="single", batch_size=1, concurrency=1, requests=40, seconds=0, max_seconds=1, rounds=9)
    numbered = [(restart, speed) for restart, speeds in enumerate(speeds_by_start) for speed in speeds]
    blocks = []
    for index, (restart, speed) in enumerate(numbered):
        record = BlockRecord(
            index=index, workload=workload.name, round=index, label="a", position=0, started_at="", window_start_ns=0,
            window_end_ns=10**9, samples="", requests=40, items=40, errors=0, error_messages=(), stages=None,
            generator_cpu_ns=0, server_cpu_ns=None, complete=True, restart=restart,
        )  # fmt: skip
        step = 1000.0 / speed
        blocks.append(StoredBlock(record, workload, samples([(n * step, (n + 1) * step, 0) for n in range(40)])))
    return blocks


def test_the_interval_of_an_arms_own_figure_includes_what_a_restart_changes() -> None:
    """Three starts of 23, 17 and 7 blocks that differ by a tenth: a t interval over all blocks is 4 % wide."""
    rng = np.random.default_rng(3)
    starts = [(speed * rng.normal(1.0, 0.01, blocks)).tolist() for speed, blocks in ((100, 23), (110, 17), (90, 7))]
    blocks = blocks_at(starts)
    summary = summarise_workload(blocks[0].workload.name, "a", blocks, summarise_blocks(blocks))
    throughput, median = summary.intervals["throughput"], summary.intervals["latency_p50"]
    assert throughput is not None
    assert median is not None
    low, high = throughput
    assert low < 90.0
    assert high > 110.0
    assert summary.throughput_per_s == pytest.approx((100 * 110 * 90) ** (1 / 3), rel=0.01)
    assert median[1] / median[0] == pytest.approx(high / low, rel=0.05)


def test_within_one_start_it_allows_for_blocks_that_resemble_each_other() -> None:
    apart, lasting = ([100.0, 102.0] * 8, [100.0] * 8 + [102.0] * 8)
    widths = []
    for speeds in (apart, lasting):
        blocks = blocks_at([speeds])
        summary = summarise_workload(blocks[0].workload.name, "a", blocks, summarise_blocks(blocks))
        interval = summary.intervals["throughput"]
        assert interval is not None
        widths.append(np.ptp(interval))
    assert widths[1] > 2.5 * widths[0]
