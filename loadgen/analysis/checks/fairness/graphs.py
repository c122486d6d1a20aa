"""Checks on settings that choose how a batch is executed: CUDA graphs, the sizes that have one, preferred sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from loadgen.analysis.checks.fairness.model_config import (
    accelerators,
    backend_of,
    graphs_asked,
    groups,
    letter,
    listed,
    mapping,
    some,
    untold,
    whole,
)
from loadgen.analysis.checks.outcome import Check, CheckName, make_check
from loadgen.records.run import ArmRecord, Cell

DEFAULT_GRAPH_SIZES = (1, 2, 3, 4, 6, 8, 12, 16)
"""What Triton's tensorrt backend captures, with the largest batch, where nothing says otherwise and nothing is
batched dynamically."""


_MOST_SIZES = 4096
"""Beyond it nobody has a graph of each."""


def check_graphs(arm: ArmRecord, cells: Sequence[Cell]) -> list[Check]:
    """All of one arm."""
    return [_cuda_graphs(arm), _graph_sizes(arm, cells), _preferred_sizes(arm)]


def _cuda_graphs(arm: ArmRecord) -> Check:
    """Asked for where nothing reads them, or where they replay stale inputs."""
    threshold = "asked for only where they take effect"
    if arm.model_config is None:
        return untold(CheckName.CUDA_GRAPHS, arm, threshold)
    asked = graphs_asked(arm)
    backend = backend_of(arm)
    if asked and backend != "tensorrt":
        detail = f"{letter(arm)}: the {backend or 'unknown'} backend ignores optimization.cuda.graphs"
        return make_check(CheckName.CUDA_GRAPHS, False, value="ignored", threshold=threshold, detail=detail)
    if backend == "onnxruntime" and any(p.get("enable_cuda_graph") in ("1", "true") for _, p in accelerators(arm)):
        detail = f"{letter(arm)}: enable_cuda_graph replays a graph while Triton binds new buffers: stale inputs"
        return make_check(CheckName.CUDA_GRAPHS, False, value="stale", threshold=threshold, detail=detail)
    detail = (
        f"{letter(arm)}: CUDA graphs {'are asked for and taken' if asked else 'are not asked for in its configuration'}"
    )
    return make_check(CheckName.CUDA_GRAPHS, True, value="on" if asked else "off", threshold=threshold, detail=detail)


def _graph_sizes(arm: ArmRecord, cells: Sequence[Cell]) -> Check:
    """Whether the batch sizes that are asked for have a captured graph; merged batches may have any size."""
    threshold = "every batch size has a graph"
    if arm.model_config is None:
        return untold(CheckName.GRAPH_SIZES, arm, threshold)
    if not graphs_asked(arm) or backend_of(arm) != "tensorrt":
        detail = f"{letter(arm)} asks for no graphs by batch size"
        return make_check(CheckName.GRAPH_SIZES, True, threshold=threshold, detail=detail)
    captured = captured_sizes(arm.model_config)
    largest = _largest(arm.model_config)
    wanted = {cell.batch_size for cell in cells if cell.batch_size <= largest}
    if any(cell.concurrency > 1 for cell in cells):
        wanted |= set(range(1, largest + 1))
    missing = sorted(wanted - captured)
    detail = f"{letter(arm)}: the batch sizes {some([str(size) for size in missing])} run without a CUDA graph"
    if not missing:
        detail = f"{letter(arm)}: all {len(wanted)} batch sizes that can occur have a graph"
    return make_check(CheckName.GRAPH_SIZES, not missing, value=len(missing), threshold=threshold, detail=detail)


def captured_sizes(config: Mapping[str, Any]) -> set[int]:
    """Batch sizes that Triton's tensorrt backend runs by a graph. A `graph_lower_bound` lets smaller batches run a
    larger graph; without `graph_spec` it captures 1, the preferred sizes and the largest, and where nothing is batched
    dynamically a list of its own."""
    specs = listed(mapping(mapping(config.get("optimization")).get("cuda")).get("graph_spec"))
    largest = _largest(config)
    if not specs:
        batching = config.get("dynamic_batching")
        if isinstance(batching, Mapping):
            return {1, *filter(None, map(whole, listed(batching.get("preferred_batch_size")))), largest}
        return {size for size in DEFAULT_GRAPH_SIZES if size <= largest} | {largest}
    sizes: set[int] = set()
    for spec in map(mapping, specs):
        size = min(whole(spec.get("batch_size", 1)) or 1, _MOST_SIZES)
        lowest = whole(mapping(spec.get("graph_lower_bound")).get("batch_size", size))
        sizes |= set(range(size if lowest is None else lowest, size + 1))
    return sizes


def _largest(config: Mapping[str, Any]) -> int:
    return min(whole(config.get("max_batch_size")) or 1, _MOST_SIZES)


def _preferred_sizes(arm: ArmRecord) -> Check:
    threshold = "none, but for TensorRT with several profiles"
    if arm.model_config is None:
        return untold(CheckName.PREFERRED_SIZES, arm, threshold)
    sizes = listed(mapping(arm.model_config.get("dynamic_batching")).get("preferred_batch_size"))
    profiles = max((len(listed(group.get("profile"))) for group in groups(arm.model_config)), default=0)
    limit = arm.in_effect.get("max_batch_size")
    beyond = [size for size in sizes if isinstance(limit, int) and (whole(size) or 0) > limit]
    meant = backend_of(arm) == "tensorrt" and profiles > 1
    filled_in = sizes == [limit]  # what Triton itself writes into a configuration that prefers none
    ok = not sizes or filled_in or (meant and not beyond)
    text = some([str(size) for size in sizes])
    if ok:
        profiled = sizes and not filled_in
        detail = f"{letter(arm)} prefers {text}, each with a profile" if profiled else f"{letter(arm)} prefers none"
    elif beyond:
        detail = f"{letter(arm)} prefers batches of {text} and takes {limit} at most: they never form"
    else:
        detail = f"{letter(arm)} prefers batches of {text}: smaller ones wait for the whole queue delay"
    return make_check(CheckName.PREFERRED_SIZES, ok, value=text if sizes else None, threshold=threshold, detail=detail)
