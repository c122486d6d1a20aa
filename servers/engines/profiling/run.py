"""The profile of a loaded engine, batch by batch. It comes after every measurement: CUPTI slows later launches down.

On a GPU the engine executes without copies from and to the host where it can (`run_only`), else by `infer`; on a CPU
by `infer`, ONNX Runtime in a second session with its profiler on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from servers.engines.interface import Engine, EngineError
from servers.engines.measurement import BatchMeasurement
from servers.engines.profiling.names import kernel_category, kernel_label, operator_category
from servers.engines.profiling.records import (
    IDLE_ON_DEVICE,
    IDLE_ON_HOST,
    BatchProfile,
    EngineProfile,
    ProfileError,
    Total,
    summarised,
)
from servers.engines.profiling.timeline import add_busy_time, span_ns
from servers.engines.random_inputs import random_inputs
from servers.models.specification import ModelSpecification

EXECUTIONS_ON_DEVICE, EXECUTIONS_ON_HOST = 20, 5


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
        return _on_device(engine, specification, seen.device, measured_us)
    totals_of: Callable[[int], tuple[dict[str, Total], float]]
    if seen.kind == "torch":
        totals_of = partial(_torch_on_host, engine, specification)
    elif seen.kind == "onnxruntime":
        totals_of = partial(_onnxruntime_on_host, engine)
    else:
        raise ProfileError(f"there is no profiler for the {seen.kind} engine on a CPU")
    profiles = []
    for batch, us in measured_us.items():
        totals, span_ns = totals_of(batch)
        profiles.append(
            summarised(
                totals,
                span_ns,
                batch=batch,
                executions=EXECUTIONS_ON_HOST,
                with_copies=False,
                measured_us=us,
                idle_name=IDLE_ON_HOST,
                category_of=operator_category,
            )
        )
    return profiles


def _on_device(
    engine: Engine, specification: ModelSpecification, device: str, measured_us: Mapping[int, float]
) -> list[BatchProfile]:
    try:
        from servers.engines.profiling.device import device_launches
    except ImportError as exc:
        raise ProfileError("kernels are read through torch's profiler, and torch is not installed") from exc

    calls: list[Callable[[], object]] = []
    with_copies: list[bool] = []
    for batch in measured_us:
        engine.infer(inputs := random_inputs(specification, batch, seed=0))
        run_only: Callable[[int], bool] | None = getattr(engine, "run_only", None)
        bare = run_only is not None and run_only(batch)
        with_copies.append(not bare)
        once = partial(run_only, batch) if run_only is not None and bare else partial(engine.infer, inputs)
        calls += [once] * EXECUTIONS_ON_DEVICE
    groups = device_launches(calls, device)
    profiles = []
    for number, (batch, us) in enumerate(measured_us.items()):
        own = groups[number * EXECUTIONS_ON_DEVICE :][:EXECUTIONS_ON_DEVICE]
        totals: dict[str, Total] = {}
        for group in own:
            add_busy_time(group, totals)
        profiles.append(
            summarised(
                totals,
                sum(map(span_ns, own)),
                batch=batch,
                executions=EXECUTIONS_ON_DEVICE,
                with_copies=with_copies[number],
                measured_us=us,
                idle_name=IDLE_ON_DEVICE,
                category_of=kernel_category,
                label_of=kernel_label,
            )
        )
    return profiles


def _torch_on_host(engine: Engine, specification: ModelSpecification, batch: int) -> tuple[dict[str, Total], float]:
    from servers.engines.profiling.host import torch_operators

    inputs = random_inputs(specification, batch, seed=0)
    engine.infer(inputs)
    return torch_operators(partial(engine.infer, inputs), EXECUTIONS_ON_HOST)


def _onnxruntime_on_host(engine: Engine, batch: int) -> tuple[dict[str, Total], float]:
    from servers.engines.profiling.host import onnxruntime_nodes

    node_profile: Callable[[Path, int, int], Path] = engine.node_profile  # type: ignore[attr-defined]
    with TemporaryDirectory(prefix="abserve-profile-") as folder:
        try:
            path = node_profile(Path(folder), batch, EXECUTIONS_ON_HOST + 1)  # the first one allocates
        except Exception as exc:  # ORT's exceptions share no base but Exception
            reason = str(exc).partition(chr(10))[0]
            raise ProfileError(f"ONNX Runtime cannot execute batch {batch} with its profiler on: {reason}") from exc
        return onnxruntime_nodes(path, EXECUTIONS_ON_HOST)
