"""Which execution provider took which node, and whether the rest on the CPU is small enough to be called a GPU engine.

A healthy CUDA session may leave nodes on the CPU without a word. Operators that compute shapes belong there (a few
integers whose consumers are on the host); anything else, or more than a hundredth of the node time, is refused.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from servers.engines.interface import EngineError

CPU_PROVIDER = "CPUExecutionProvider"
MAX_CPU_TIME_RATIO = 0.01
RECORD_PLACEMENT = "session.record_ep_graph_assignment_info"

SHAPE_OPERATORS = frozenset(
    {
        *("Shape", "Size", "Constant", "ConstantOfShape", "Gather", "Squeeze", "Unsqueeze", "Concat", "Slice", "Cast"),
        *("Range", "Equal", "Where"),
        # Integer arithmetic on dimensions. The same names on activations would show in the node time.
        *("Add", "Sub", "Mul", "Div"),
    }
)


@dataclass(frozen=True, slots=True)
class NodePlacement:
    """`cpu_time_ratio` is None where it was not measured because nothing is on the CPU, or all of it."""

    nodes_by_provider: Mapping[str, int]
    cpu_operators: Mapping[str, int]
    cpu_time_ratio: float | None = None

    @property
    def cpu_non_shape_ops(self) -> tuple[str, ...]:
        """Operators on the CPU that compute more than shapes."""
        return tuple(sorted(set(self.cpu_operators) - SHAPE_OPERATORS))


def read_placement(session: Any) -> NodePlacement:
    """Of a session created with `RECORD_PLACEMENT`."""
    providers: Counter[str] = Counter()
    operators: Counter[str] = Counter()
    for subgraph in session.get_provider_graph_assignment_info():
        nodes = subgraph.get_nodes()
        providers[subgraph.ep_name] += len(nodes)
        if subgraph.ep_name == CPU_PROVIDER:
            operators.update(node.op_type for node in nodes)
    return NodePlacement(dict(providers), dict(operators))


def assert_on_gpu(placement: NodePlacement) -> None:
    """Raise `EngineError` for a session that is not a GPU engine."""
    total = sum(placement.nodes_by_provider.values())
    on_cpu = placement.nodes_by_provider.get(CPU_PROVIDER, 0)
    if placement.cpu_non_shape_ops or on_cpu == total:
        raise EngineError(
            f"ONNX Runtime placed {on_cpu} of {total} nodes on the CPU, with {_list(placement.cpu_non_shape_ops)} "
            "among them: this is not a GPU engine; export the model again, or use device cpu"
        )
    if placement.cpu_time_ratio is not None and placement.cpu_time_ratio > MAX_CPU_TIME_RATIO:
        raise EngineError(
            f"ONNX Runtime spends {placement.cpu_time_ratio:.1%} of its node time in {on_cpu} nodes on the CPU, more "
            f"than {MAX_CPU_TIME_RATIO:.0%}: this is not a GPU engine; export the model again, or use device cpu"
        )


def measure_cpu_time_ratio(profiled: Callable[[Path], Path]) -> float:
    """Share of node time on the CPU in a profile.

    `profiled` executes some batches of a session that profiles into the folder given, and returns the profile's path.
    The CUDA provider's nodes count with their launches alone, so the share is an upper bound.
    """
    with TemporaryDirectory(prefix="abserve-profile-") as folder:
        events = json.loads(profiled(Path(folder)).read_text())
    times: Counter[str] = Counter()
    for event in events:
        if event.get("cat") == "Node" and str(event.get("name", "")).endswith("_kernel_time"):
            times[event["args"].get("provider") or CPU_PROVIDER] += int(event["dur"])
    total = sum(times.values())
    if total == 0:
        raise EngineError("ONNX Runtime's profile names no node: its placement cannot be verified")
    return times[CPU_PROVIDER] / total


def _list(operators: tuple[str, ...]) -> str:
    return ", ".join(operators[:4]) + (" …" if len(operators) > 4 else "") if operators else "all of the model"
