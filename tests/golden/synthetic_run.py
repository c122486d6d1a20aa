"""Writes the stored records of a run that never happened: seeded closed loops against a simulated batching server.

The simulation is an event loop of one server with a dynamic batcher: its answers come in batches, its queue is real,
and its latency breakdown adds up, so that everything downstream has something true to find.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import msgspec
import numpy as np

from loadgen.records.machine import Calibration, CalibrationWorkload
from loadgen.records.probes import AnswersCompared, ServerStart
from loadgen.records.run import (
    ArmRequest,
    BlockRecord,
    Experiment,
    MachineLoad,
    ParityCase,
    ParityRecord,
    RunState,
    StageTotals,
    Workload,
)
from loadgen.records.samples import SAMPLE_DTYPE, store_samples
from loadgen.stats.agreement import tolerance_of
from tests.golden.synthetic_arms import arms, environment

ORIGIN_NS = 1_000_000_000_000


@dataclass(frozen=True)
class SimulatedArm:
    """Milliseconds: a batch of n costs overhead + n · item; a request costs `transport` outside the server."""

    overhead_ms: float = 6.0
    item_ms: float = 9.0
    transport_ms: float = 1.0
    max_batch: int = 32
    noise: float = 0.03
    reports_http: bool = True
    slow_requests: int = 0
    slow_request_extra_ms: float = 0.0
    queue_delay_ms: float = 0.0
    """A batch waits so long for more requests, also if none can come."""
    stall_share: float = 0.0
    """Share of the batches before which the server sleeps for 0.5 s."""
    ready_s: float = 3.0


@dataclass(frozen=True)
class Plan:
    """What is to be found in the records."""

    a: SimulatedArm = field(default_factory=SimulatedArm)
    b: SimulatedArm = field(default_factory=lambda: SimulatedArm(5.0, 6.0, 2.5, reports_http=False, ready_s=5.5))
    others: tuple[SimulatedArm, ...] = ()
    """Native arms c, d, …"""
    pairs: int = 6
    requests: int = 200
    batches: tuple[int, ...] = (1, 4, 8, 16, 32)
    seed: int = 7
    block_noise: float = 0.012
    drift: float = 0.0
    failing_block: int | None = None
    cut_after: int | None = None
    state: Literal["running", "finished", "interrupted", "failed"] = "finished"
    parity_cosine: float = 0.999_998
    gpu_status: str = "no_library"
    b_settings: dict[str, str] = field(default_factory=dict)
    b_in_effect: dict[str, object] = field(default_factory=dict)
    weights: str = "random:0"
    margin: float = 0.03
    workloads: tuple[Workload, ...] | None = None
    preset: str = "quick"

    @property
    def arms(self) -> dict[str, SimulatedArm]:
        """By their labels."""
        return dict(zip("abcdefgh", (self.a, self.b, *self.others), strict=False))


def workloads(pairs: int, requests: int, batches: tuple[int, ...] = Plan.batches) -> tuple[Workload, ...]:
    """All four scenarios."""
    common: dict[str, Any] = {"seconds": 1.0, "max_seconds": 30.0}
    return (
        Workload(scenario="cold-start", batch_size=1, concurrency=1, requests=1, rounds=min(pairs, 4), **common),
        Workload(
            scenario="single", batch_size=1, concurrency=1, requests=max(requests // 3, 20), rounds=pairs, **common
        ),
        *(
            Workload(
                scenario="batched",
                batch_size=n,
                concurrency=1,
                requests=max(requests // (2 * n), 12),
                rounds=pairs,
                **common,
            )
            for n in batches
        ),
        Workload(scenario="concurrent", batch_size=1, concurrency=16, requests=requests, rounds=pairs, **common),
    )


def simulated_once(write: Callable[[Path, Any], Path]) -> Callable[..., Path]:
    """`write` for the first of equal plans, and a copy of its files for the others, which costs a fraction."""
    kept: dict[str, dict[str, bytes | None]] = {}

    @wraps(write)
    def written(directory: Path, plan: Any = None) -> Path:
        if (files := kept.get(repr(plan))) is None:
            with TemporaryDirectory() as folder:
                root = write(Path(folder), plan)
                paths = sorted(root.rglob("*"))
                files = {str(path.relative_to(root)): path.read_bytes() if path.is_file() else None for path in paths}
            kept[repr(plan)] = files
            if len(kept) > 20:
                del kept[next(iter(kept))]
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            if content is None:
                (directory / name).mkdir(exist_ok=True)
            else:
                (directory / name).write_bytes(content)
        return directory

    return written


@simulated_once
def write_run(directory: Path, plan: Plan | None = None) -> Path:
    """Write the records of `plan` into `directory`, as far as the run is to have got, and return it."""
    plan = plan or Plan()
    rng = np.random.default_rng(plan.seed)
    experiment = Experiment(
        arms=(
            ArmRequest(label="a", target="native"),
            ArmRequest(label="b", target="triton", settings=plan.b_settings),
            *(ArmRequest(label=label, target="native") for label in list(plan.arms)[2:]),
        ),
        model="openclip_vit_b32",
        weights=plan.weights,
        payload="fp32",
        transport="http",
        workloads=plan.workloads if plan.workloads is not None else workloads(plan.pairs, plan.requests, plan.batches),
        preset=plan.preset,
        seed=plan.seed,
        equivalence_margin=plan.margin,
        threads=2,
    )
    for folder in ("blocks", "samples"):
        (directory / folder).mkdir(parents=True, exist_ok=True)
    _write(directory / "experiment.json", experiment)
    _write(directory / "environment.json", environment(plan.gpu_status))
    _write(directory / "arms.json", arms(plan.b_settings, plan.b_in_effect, list(plan.arms)[2:]))
    asked: tuple[tuple[str, str, Literal["reference", "alone"], int], ...] = (
        ("single images", "b", "reference", 8),
        ("batch of 7", "b", "reference", 7),
        ("A mixed batch", "a", "alone", 7),
        ("B mixed batch", "b", "alone", 7),
        *((f"{label.upper()} single images", label, "reference", 8) for label in list(plan.arms)[2:]),
    )
    cases = tuple(
        ParityCase(
            name=name,
            label=label,
            kind=kind,
            images=n,
            cosine_min=plan.parity_cosine,
            max_abs=2.4e-4,
            ok=plan.parity_cosine >= 0.999,
            relative_max=10 * (1 - plan.parity_cosine),
            element_max=20 * (1 - plan.parity_cosine),
        )
        for name, label, kind, n in asked
    )
    ok = plan.parity_cosine >= 0.999
    tolerance = tolerance_of(["fp32", "fp32"])
    parity = ParityRecord(
        cases=cases, ok=ok, precision=tolerance.precision, tolerance_relative=tolerance.relative,
        tolerance_element=tolerance.element,
    )  # fmt: skip
    _write(directory / "parity.json", parity)
    compared = [
        AnswersCompared(
            workload=workload.name, label=label, restart=0, answers=64, items=64, wrong=0, relative_max=2e-5,
            tolerance_relative=tolerance.relative,
        )
        for workload in experiment.workloads
        for label in workload.loaded(tuple(plan.arms))
        if workload.has_blocks
    ]  # fmt: skip
    _write(directory / "answers.json", compared)
    _write_loads(directory, plan, experiment, rng)
    phases = {"finished": "done", "running": "concurrent(16)", "interrupted": "concurrent(16)", "failed": "batched(8)"}
    error = "the server of B died (exit status 137)" if plan.state == "failed" else None
    _write(directory / "run.json", RunState(state=plan.state, phase=phases[plan.state], error=error))
    return directory


def _write_loads(directory: Path, plan: Plan, experiment: Experiment, rng: np.random.Generator) -> None:
    clock_ns = ORIGIN_NS
    index = 0
    for workload in experiment.workloads:
        if workload.scenario == "cold-start":
            _write(directory / "cold_starts.json", _cold_starts(plan, workload, rng))
            continue
        for pair in range(workload.rounds):
            for position, label in enumerate(order_of(list(workload.loaded(tuple(plan.arms))), pair)):
                if plan.cut_after is not None and index >= plan.cut_after:
                    if plan.state == "running":
                        _leave_partial(directory, index, workload, rng)
                    return
                arm = plan.arms[label]
                speed = float(np.exp(rng.normal(0, plan.block_noise) + plan.drift * index / 80))
                samples, stages, errors, cool_down_ms = simulate(
                    arm, workload, rng, clock_ns, speed, index == plan.failing_block
                )
                name = f"samples/{index:04d}.npy"
                store_samples(directory / name, [samples])
                end_ns = int(samples["end_ns"].max())
                record = BlockRecord(
                    index=index, workload=workload.name, round=pair, label=label, position=position,
                    started_at=wall_clock(clock_ns),
                    window_start_ns=clock_ns, window_end_ns=end_ns, samples=name, requests=len(samples),
                    items=int(samples["batch"].sum()), errors=errors,
                    error_messages=("HTTP 503: queue is full",) if errors else (),
                    generator_cpu_ns=int(0.11 * (end_ns - clock_ns)), server_cpu_ns=int(1.7 * (end_ns - clock_ns)),
                    stages=stages, complete=True, reconnects=0,
                    cool_down=len(cool_down_ms), cool_down_ns=int(sum(cool_down_ms) * 1e6),
                    machine=machine(end_ns - clock_ns),
                )  # fmt: skip
                _write(directory / "blocks" / f"{index:04d}.json", record)
                clock_ns = end_ns + 500_000_000
                index += 1


def write_calibration(directory: Path, requests_per_s: float) -> None:
    """Add a calibration by which the load generator sends at most this many single FP32 inputs per second."""
    workload = CalibrationWorkload(
        transport="http", payload="fp32", batch_size=1, payload_bytes=602_112, concurrency=16,
        requests_per_s=requests_per_s, images_per_s=requests_per_s, generator_cpu_share=1.0, sink_cpu_cores=0.5,
        cpu_us_per_request=100.0, limited_by="generator",
    )  # fmt: skip
    calibration = Calibration(
        fingerprint="", made_at="", command="", host={}, packages={}, sink_processes=1, seconds=1.0,
        workloads=(workload,),
    )  # fmt: skip
    _write(directory / Calibration.FILE, calibration)


def order_of(labels: list[str], pair: int) -> list[str]:
    """ABBA for two; for more, each comes first in turn."""
    shift = int(pair % 4 not in (0, 3)) if len(labels) == 2 else pair % len(labels)
    return labels[shift:] + labels[:shift]


def machine(window_ns: int) -> MachineLoad:
    """Two cores of which others took half a per cent."""
    known_ns = int(1.81 * window_ns)
    return MachineLoad(
        total_ns=2 * window_ns, steal_ns=0, busy_ns=known_ns + window_ns // 100, known_ns=known_ns, others=(),
        runnable=0, waited_ns=window_ns // 10,
    )  # fmt: skip


def wall_clock(at_ns: int) -> str:
    """The label of a moment of the monotonic clock."""
    at = datetime(2026, 3, 2, 10, tzinfo=UTC) + timedelta(microseconds=(at_ns - ORIGIN_NS) / 1000)
    return at.isoformat(timespec="seconds").replace("+00:00", "Z")


def simulate(
    arm: SimulatedArm, workload: Workload, rng: np.random.Generator, start_ns: int, speed: float, failing: bool = False
) -> tuple[np.ndarray, StageTotals, int, list[float]]:
    """One block: `workload.concurrency` users, one server that executes whatever waits, up to its largest batch."""
    arrivals = [(0.0, user, True) for user in range(workload.concurrency)]
    heapq.heapify(arrivals)
    rows: list[tuple[float, float, int]] = []
    claimed, free, cool_down_ms = workload.concurrency, 0.0, list[float]()
    queue_ms = infer_ms = 0.0
    batches: dict[int, int] = {}
    half = arm.transport_ms / 2
    while arrivals:
        start = max(free, arrivals[0][0] + half) + arm.queue_delay_ms
        if arm.stall_share and rng.random() < arm.stall_share:
            start += 500.0
        waiting: list[tuple[float, int, bool]] = []
        while (
            arrivals
            and arrivals[0][0] + half <= start
            and (len(waiting) + 1) * workload.batch_size <= max(arm.max_batch, workload.batch_size)
        ):
            waiting.append(heapq.heappop(arrivals))
        size = len(waiting) * workload.batch_size
        work = (arm.overhead_ms + arm.item_ms * size) * speed * float(np.exp(rng.normal(0, arm.noise)))
        if len(rows) < arm.slow_requests:
            work += arm.slow_request_extra_ms
        free = start + work
        batches[size] = batches.get(size, 0) + 1
        for sent, user, counted in waiting:
            queue_ms += start - sent - half
            infer_ms += work
            end = free + half + float(rng.exponential(0.05 * arm.transport_ms))
            if counted:
                rows.append((sent, end, user))
            else:
                cool_down_ms.append(end - sent)
            if claimed < workload.requests:
                claimed += 1
                heapq.heappush(arrivals, (end, user, True))
            elif len(rows) < workload.requests:
                heapq.heappush(arrivals, (end, user, False))
    samples = np.zeros(len(rows), dtype=SAMPLE_DTYPE)
    batch = workload.batch_size
    sent_ms, end_ms, samples["user"] = np.array(rows).T
    samples["intended_ns"] = samples["send_ns"] = start_ns + (sent_ms * 1e6).astype(np.int64)
    samples["first_byte_ns"] = samples["end_ns"] = start_ns + (end_ms * 1e6).astype(np.int64)
    samples["batch"], samples["status"], samples["error"] = batch, 200, -1
    samples["request_bytes"], samples["response_bytes"] = 602_412 * batch, 2_048 * batch + 300
    errors = 0
    if failing:
        samples["error"][::10], samples["status"][::10] = 0, 503
        errors = int((samples["error"] >= 0).sum())
    count = len(rows) + len(cool_down_ms)
    stages = StageTotals(
        requests=count, items=count * workload.batch_size, executions=sum(batches.values()),
        queue_ns=int(queue_ms * 1e6), compute_input_ns=int(0.04 * infer_ms * 1e6),
        compute_infer_ns=int(0.94 * infer_ms * 1e6), compute_output_ns=int(0.02 * infer_ms * 1e6),
        receive_ns=int(0.3e6 * count) if arm.reports_http else None,
        decode_ns=int(0.1e6 * count) if arm.reports_http else None,
        encode_ns=int(0.05e6 * count) if arm.reports_http else None, batches=batches,
    )  # fmt: skip
    return samples, stages, errors, cool_down_ms


def _leave_partial(directory: Path, index: int, workload: Workload, rng: np.random.Generator) -> None:
    """What SIGKILL leaves: a header that counts nothing and a last record that is cut."""
    samples, _, _, _ = simulate(SimulatedArm(), workload, rng, ORIGIN_NS, 1.0)
    path = directory / "samples" / f"{index:04d}.npy"
    store_samples(path, ())
    with path.open("ab") as file:
        file.write(samples[:37].tobytes() + b"\0" * 11)
    path.rename(path.with_name(path.name + ".part"))


def _cold_starts(plan: Plan, workload: Workload, rng: np.random.Generator) -> list[ServerStart]:
    starts = []
    for repetition in range(workload.rounds):
        for label, arm in plan.arms.items():
            factor = float(np.exp(rng.normal(0, 0.02)))
            ready_ns = int(arm.ready_s * factor * 1e9)
            starts.append(
                ServerStart(
                    label=label,
                    repetition=repetition,
                    live_ns=int(0.6 * ready_ns),
                    ready_ns=ready_ns,
                    first_answer_ns=ready_ns + int(0.03e9 * factor),
                )
            )
    return starts


def _write(path: Path, record: object) -> None:
    path.write_bytes(msgspec.json.encode(record))
