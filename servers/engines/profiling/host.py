"""What a CPU executes: torch's profiler tells the self times of torch's operators, ONNX Runtime's own that of nodes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from servers.engines.profiling.records import ProfileError, Total
from servers.engines.profiling.timeline import Launch, add_busy_time


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
