"""The profile of a loaded engine, batch by batch. It comes after every measurement: CUPTI slows later launches down.

On a GPU the engine executes without copies from and to the host where it can (`run_only`), else by `infer`; on a CPU
by `infer`, ONNX Runtime in a second session with its profiler on.

CUPTI watches the process, not torch: the kernels of ONNX Runtime and TensorRT are listed too, and those that a CUDA
graph replays. All executions go into one session: CUPTI loses some first records of each session that follows another
in the process. On a CPU torch's profiler gives the self times of torch's operators, ONNX Runtime's own that of nodes.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from servers.engines.batches import random_inputs
from servers.engines.interface import Engine, EngineError, first_line
from servers.engines.measurement import BatchMeasurement
from servers.engines.profiling.names import CATEGORIES, kernel_category, kernel_label, operator_category
from servers.models.specification import ModelSpecification

IDLE_ON_DEVICE = "idle between kernels"
IDLE_ON_HOST = "outside operators"
EXECUTIONS_ON_DEVICE, EXECUTIONS_ON_HOST = 20, 5
MARK_CYCLES = 2000
LEADING_MARKS = 32
"""Marks before the first execution, for CUPTI to lose: one more with every earlier session of the process."""


class ProfileError(Exception):
    """The engine cannot be profiled here; the message names the remedy where there is one."""


@dataclass(frozen=True, slots=True)
class CategoryTime:
    """`share` is of the span."""

    name: str
    us: float
    share: float


@dataclass(frozen=True, slots=True)
class KernelTime:
    """All launches of one kernel, or all calls of one operator on a CPU; `name` is the full one, `label` to be read."""

    name: str
    label: str
    category: str
    count: float
    us: float
    share: float


@dataclass(frozen=True, slots=True)
class BatchProfile:
    """One batch size.

    The span is from the start of an execution's first kernel to the end of its last, on a CPU the execution by the
    host's clock. `idle_us` is what no kernel or operator accounts for; it is the last of the categories too, whose
    shares add up to 1. Time in which several kernels run is divided equally among them, so that everything adds up.
    `measured_us` was measured before, without a profiler: the execution, or the call where the engine does not tell it.
    `with_copies`: the executions include the copies from and to the host.
    """

    batch: int
    executions: int
    with_copies: bool
    measured_us: float
    span_us: float
    idle_us: float
    launches: float
    categories: list[CategoryTime]
    kernels: list[KernelTime]


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """One record a batch size; or none, and in `missing` the sentence that says why."""

    batches: list[BatchProfile]
    missing: str | None = None

    def as_document(self) -> dict[str, object]:
        """The keys that a profile adds to the file of `abserve engine --json`."""
        document: dict[str, object] = {"profile": [asdict(batch) for batch in self.batches]}
        return document if self.missing is None else {**document, "profile_missing": self.missing}


@dataclass(slots=True)
class Total:
    """Of one name, over all executions."""

    count: int = 0
    ns: float = 0.0


def summarised(
    totals: Mapping[str, Total],
    span_ns: float,
    *,
    batch: int,
    executions: int,
    with_copies: bool,
    measured_us: float,
    idle_name: str,
    category_of: Callable[[str], str],
    label_of: Callable[[str], str] = str,
) -> BatchProfile:
    """The record of one batch from sums over all `executions`; raises `ProfileError` for executions of no length."""
    busy_ns = sum(total.ns for total in totals.values())
    span_ns = max(span_ns, busy_ns)  # a clock of whole µs may make the parts longer than the whole
    if not span_ns:
        raise ProfileError(f"the profile of batch {batch} holds no time at all")
    by_category: dict[str, float] = defaultdict(float)
    kernels = []
    for name, total in totals.items():
        category = category_of(name)
        by_category[category] += total.ns
        us = total.ns / executions / 1e3
        kernels.append(KernelTime(name, label_of(name), category, total.count / executions, us, total.ns / span_ns))
    by_category[idle_name] = span_ns - busy_ns
    return BatchProfile(
        batch=batch,
        executions=executions,
        with_copies=with_copies,
        measured_us=measured_us,
        span_us=span_ns / executions / 1e3,
        idle_us=(span_ns - busy_ns) / executions / 1e3,
        launches=sum(kernel.count for kernel in kernels),
        categories=[
            CategoryTime(name, by_category[name] / executions / 1e3, by_category[name] / span_ns)
            for name in (*CATEGORIES, idle_name)
        ],
        kernels=sorted(kernels, key=lambda kernel: -kernel.us),
    )


def profile_engine(
    engine: Engine, specification: ModelSpecification, measured: Sequence[BatchMeasurement]
) -> EngineProfile:
    """Profile a loaded engine at every measured batch size; nothing may be measured in this process afterwards.

    Never raises for what cannot be profiled, since the measurement before it stands.
    """
    measured_us = {
        result.batch: (result.call_ns if result.execution_ns is None else result.execution_ns) / 1e3
        for result in measured
    }
    try:
        return EngineProfile(_profiles(engine, specification, measured_us))
    except (ProfileError, EngineError) as exc:
        return EngineProfile([], str(exc))


def _profiles(
    engine: Engine, specification: ModelSpecification, measured_us: Mapping[int, float]
) -> list[BatchProfile]:
    seen = engine.describe()
    if seen.kind == "null":
        raise ProfileError("the null engine executes no model: there is nothing to profile")
    if seen.device != "cpu":
        parts = _on_device(engine, specification, seen.device, list(measured_us))
        summary = partial(
            summarised,
            executions=EXECUTIONS_ON_DEVICE,
            idle_name=IDLE_ON_DEVICE,
            category_of=kernel_category,
            label_of=kernel_label,
        )
    elif seen.kind in ("torch", "onnxruntime"):
        on_host = partial(_torch_on_host, engine, specification) if seen.kind == "torch" else partial(_nodes, engine)
        parts = [(*on_host(batch), False) for batch in measured_us]
        summary = partial(
            summarised, executions=EXECUTIONS_ON_HOST, idle_name=IDLE_ON_HOST, category_of=operator_category
        )
    else:
        raise ProfileError(f"there is no profiler for the {seen.kind} engine on a CPU")
    return [
        summary(totals, span, batch=batch, with_copies=with_copies, measured_us=us)
        for (batch, us), (totals, span, with_copies) in zip(measured_us.items(), parts, strict=True)
    ]


def _on_device(
    engine: Engine, specification: ModelSpecification, device: str, batches: Sequence[int]
) -> list[tuple[dict[str, Total], float, bool]]:
    """For each batch size: sums over all executions, their spans together, and whether copies are among them."""
    calls: list[Callable[[], object]] = []
    with_copies: list[bool] = []
    for batch in batches:
        engine.infer(inputs := random_inputs(specification, batch, seed=0))
        run_only: Callable[[int], bool] | None = getattr(engine, "run_only", None)
        bare = run_only is not None and run_only(batch)
        with_copies.append(not bare)
        once = partial(run_only, batch) if run_only is not None and bare else partial(engine.infer, inputs)
        calls += [once] * EXECUTIONS_ON_DEVICE
    groups = device_launches(calls, device)
    parts = []
    for number, copies in enumerate(with_copies):
        own = groups[number * EXECUTIONS_ON_DEVICE :][:EXECUTIONS_ON_DEVICE]
        totals: dict[str, Total] = {}
        for group in own:
            add_busy_time(group, totals)
        parts.append((totals, float(sum(map(span_ns, own))), copies))
    return parts


def _torch_on_host(engine: Engine, specification: ModelSpecification, batch: int) -> tuple[dict[str, Total], float]:
    inputs = random_inputs(specification, batch, seed=0)
    engine.infer(inputs)
    return torch_operators(partial(engine.infer, inputs), EXECUTIONS_ON_HOST)


def _nodes(engine: Engine, batch: int) -> tuple[dict[str, Total], float]:
    node_profile: Callable[[Path, int, int], Path] = engine.node_profile  # type: ignore[attr-defined]
    with TemporaryDirectory(prefix="abserve-profile-") as folder:
        try:
            path = node_profile(Path(folder), batch, EXECUTIONS_ON_HOST + 1)  # the first one allocates
        except Exception as exc:  # ORT's exceptions share no base but Exception
            reason = first_line(exc)
            raise ProfileError(f"ONNX Runtime cannot execute batch {batch} with its profiler on: {reason}") from exc
        return onnxruntime_nodes(path, EXECUTIONS_ON_HOST)


class Launch(NamedTuple):
    """One kernel, copy or fill, or one operator on a CPU; ns on any clock."""

    name: str
    start_ns: int
    end_ns: int


def between_marks(launches: Iterable[Launch], is_mark: Callable[[str], bool]) -> list[list[Launch]]:
    """What started between each mark and the next; what comes before the first and after the last is left out."""
    groups: list[list[Launch]] = []
    current: list[Launch] | None = None
    for launch in sorted(launches, key=lambda launch: launch.start_ns):
        if is_mark(launch.name):
            if current is not None:
                groups.append(current)
            current = []
        elif current is not None:
            current.append(launch)
    return groups


def span_ns(launches: Sequence[Launch]) -> int:
    """From the first start to the last end."""
    return max(launch.end_ns for launch in launches) - min(launch.start_ns for launch in launches)


def add_busy_time(launches: Sequence[Launch], totals: dict[str, Total]) -> None:
    """Add one execution to `totals`: the times added are the length of the union of all intervals.

    An instant in which n launches run counts 1/n for each.
    """
    edges = []
    for index, launch in enumerate(launches):
        totals.setdefault(launch.name, Total()).count += 1
        edges += [(launch.start_ns, 0, index), (launch.end_ns, 1, index)]
    running: set[int] = set()
    before_ns = 0
    for at_ns, is_end, index in sorted(edges):
        if running and at_ns > before_ns:
            part_ns = (at_ns - before_ns) / len(running)
            for other in running:
                totals[launches[other].name].ns += part_ns
        before_ns = at_ns
        if is_end:
            running.discard(index)
        else:
            running.add(index)


def device_launches(executions: Sequence[Callable[[], object]], device: str) -> list[list[Launch]]:
    """What each of `executions` made the device do; a short kernel of torch's that spins marks where one ends.

    `device` is cuda:N. Raises `ProfileError` where CUPTI reports nothing, or not every execution.
    """
    try:
        import torch
        from torch.profiler import ProfilerActivity, profile
    except ImportError as exc:
        raise ProfileError("kernels are read through torch's profiler, and torch is not installed") from exc

    def mark() -> None:
        torch.cuda.synchronize()
        torch.cuda._sleep(MARK_CYCLES)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()

    index = torch.device(device).index or 0
    try:
        with torch.cuda.device(index), profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(LEADING_MARKS):
                mark()
            for execute in executions:
                execute()
                mark()
        events = list(profiler.events() or ())
    except RuntimeError as exc:
        raise ProfileError(f"torch's profiler failed: {first_line(exc)}") from exc
    launches = [
        Launch(event.name, round(event.time_range.start * 1e3), round(event.time_range.end * 1e3))
        for event in events
        if event.device_type.name == "CUDA" and event.device_index == index
    ]
    return split(launches, len(executions))


def split(launches: Sequence[Launch], executions: int) -> list[list[Launch]]:
    """The launches of each execution; raises `ProfileError` if they are not all there."""
    if not launches:
        raise ProfileError(
            "torch's profiler reports no kernel, so there is no profile: the driver may let only administrators "
            "profile (run as root, or load nvidia with NVreg_RestrictProfilingToAdminUsers=0), or another profiler is "
            "attached"
        )
    groups = [group for group in between_marks(launches, is_mark) if group]
    if len(groups) != executions:
        raise ProfileError(
            f"torch's profiler reports {len(groups)} executions where {executions} were made; profile fewer batch "
            "sizes at a time (--batches)"
        )
    return groups


def is_mark(name: str) -> bool:
    """Whether that is the kernel that `torch.cuda._sleep` launches."""
    return "spin_kernel" in name


def torch_operators(execute: Callable[[], object], executions: int) -> tuple[dict[str, Total], float]:
    """Self time of every operator of torch, without those that it calls, and the host's time; sums over all."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        started_ns = time.perf_counter_ns()
        for _ in range(executions):
            execute()
        span_ns = time.perf_counter_ns() - started_ns
    totals = {
        event.key: Total(event.count, event.self_cpu_time_total * 1e3)
        for event in profiler.key_averages()
        if event.count
    }
    if not totals:
        raise ProfileError("torch's profiler reports no operator, so there is no profile")
    return totals, span_ns


def onnxruntime_nodes(path: Path, executions: int) -> tuple[dict[str, Total], float]:
    """Node time by operator in the last `executions` runs of ONNX Runtime's profile, and the time of those runs."""
    nodes: list[Launch] = []
    runs: list[Launch] = []
    for event in json.loads(path.read_text()):
        start_ns = int(event["ts"]) * 1000
        end_ns = start_ns + int(event.get("dur", 0)) * 1000
        if event["name"] == "model_run":
            runs.append(Launch("model_run", start_ns, end_ns))
        elif event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            nodes.append(Launch(event["args"]["op_name"], start_ns, end_ns))
    runs = sorted(runs, key=lambda run: run.start_ns)[-executions:]
    if len(runs) < executions or not nodes:
        raise ProfileError("ONNX Runtime's profile names no node, so there is no profile")
    totals: dict[str, Total] = {}
    add_busy_time([node for node in nodes if node.start_ns >= runs[0].start_ns], totals)
    return totals, sum(run.end_ns - run.start_ns for run in runs)
