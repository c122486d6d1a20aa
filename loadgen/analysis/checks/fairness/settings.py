"""Checks on the settings of each arm, from its own configuration: what is unlike an inference, and what does nothing.

Works on Triton's configuration of a model as JSON, which the native server gives in the same shape. What a server does
not tell is unknown. Sources: Triton's model configuration reference and the source of its onnxruntime and tensorrt
backends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from loadgen.analysis.checks.fairness.graphs import check_graphs
from loadgen.analysis.checks.fairness.model_config import (
    accelerators,
    backend_of,
    kind_of,
    letter,
    listed,
    some,
    untold,
    whole,
)
from loadgen.analysis.checks.outcome import Check, CheckName, make_check
from loadgen.experiment.schedule import load_cells
from loadgen.records.run import ArmRecord, Cell, Experiment

NATIVE = "abserve-native"


def check_settings(experiment: Experiment, arms: Sequence[ArmRecord], cores: int | None) -> list[Check]:
    """All of both arms; `cores` are those of this machine, where their servers run if we started them."""
    cells = load_cells(experiment.cells)
    return [
        check
        for arm in arms
        for check in (
            _batch_limit(arm, cells),
            _serial_queue_delay(arm, cells),
            _tf32(arm),
            _model_warm_up(arm),
            _metrics(arm),
            _response_cache(arm),
            _cores(arm, cores),
            *check_graphs(arm, cells),
        )
    ]


def _batch_limit(arm: ArmRecord, cells: Sequence[Cell]) -> Check:
    limit = whole(arm.in_effect.get("max_batch_size"))
    asked = max((cell.batch_size for cell in cells), default=1)
    return make_check(
        CheckName.BATCH_LIMIT,
        None if limit is None else asked <= max(limit, 1),
        value=asked,
        threshold=limit,
        detail=f"{letter(arm)} takes batches up to {limit}; the largest that is asked for is {asked}"
        if limit is not None
        else f"{letter(arm)} does not tell its largest batch",
    )


def _serial_queue_delay(arm: ArmRecord, cells: Sequence[Cell]) -> Check:
    delay = _number(arm.in_effect.get("max_queue_delay_us"))
    limit = whole(arm.in_effect.get("max_batch_size"))
    serial = [
        cell.name
        for cell in cells
        if cell.concurrency == 1 and not cell.is_open and not (limit is not None and cell.batch_size >= limit)
    ]
    batched = arm.in_effect.get("dynamic_batching")
    if delay is None and batched is not False:
        return make_check(
            CheckName.SERIAL_QUEUE_DELAY, None, threshold=0, detail=f"{letter(arm)} does not tell its queue delay"
        )
    waits = delay is not None and delay > 0 and bool(serial)
    told = (
        f"{letter(arm)}'s queue delay is {delay:,.0f} µs"
        if delay is not None
        else f"{letter(arm)} has no dynamic batcher"
    )
    detail = f"{told}, and in {some(serial)} nobody else's request can come" if waits else told
    return make_check(CheckName.SERIAL_QUEUE_DELAY, not waits, value=delay, threshold=0, detail=detail)


def _tf32(arm: ArmRecord) -> Check:
    precision, device = arm.in_effect.get("precision"), str(arm.in_effect.get("device") or "")
    threshold = "off under FP32"
    if device == "cpu" or (not device and kind_of(arm) == "KIND_CPU"):
        return make_check(
            CheckName.TF32, True, threshold=threshold, detail=f"{letter(arm)} is on a CPU, which has none"
        )
    if precision is not None and precision != "fp32":
        return make_check(
            CheckName.TF32, True, value=str(precision), threshold=threshold, detail=f"{letter(arm)} is {precision}"
        )
    if precision == "fp32":
        return make_check(
            CheckName.TF32,
            True,
            value="off",
            threshold=threshold,
            detail=f"{letter(arm)} says fp32, and tf32 is another",
        )
    if backend_of(arm) == "onnxruntime":
        told = next((p.get("use_tf32") for name, p in accelerators(arm) if name == "cuda" and "use_tf32" in p), None)
        off = told == "0"
        how = (
            "use_tf32 is 0"
            if off
            else f"use_tf32 is {told if told is not None else 'left to ONNX Runtime, which has it on'}"
        )
        return make_check(CheckName.TF32, off, value=how, threshold=threshold, detail=f"{letter(arm)}: {how}")
    return make_check(CheckName.TF32, None, threshold=threshold, detail=f"{letter(arm)} does not tell its precision")


def _model_warm_up(arm: ArmRecord) -> Check:
    threshold = "every model warms itself before it is ready"
    config = arm.model_config
    if config is None:
        return untold(CheckName.MODEL_WARM_UP, arm, threshold)
    if arm.server_name == NATIVE or (arm.in_effect.get("engine") and backend_of(arm) == "python"):
        detail = f"{letter(arm)} warms its engine before it is ready"
        return make_check(CheckName.MODEL_WARM_UP, True, threshold=threshold, detail=detail)
    steps = listed(config.get("model_warmup"))
    sizes = sorted({whole(step.get("batch_size")) or 0 for step in steps if isinstance(step, Mapping)})
    detail = f"{letter(arm)}: model_warmup of the batch sizes {some([str(size) for size in sizes])}"
    if not sizes:
        detail = f"{letter(arm)} has no model_warmup: its first request of each batch size is slow, in a cold start too"
    return make_check(CheckName.MODEL_WARM_UP, bool(sizes), value=len(sizes), threshold=threshold, detail=detail)


def _metrics(arm: ArmRecord) -> Check:
    threshold = "no summaries, traces or verbose logs"
    if arm.server_name == NATIVE and arm.model_config is not None:
        return make_check(CheckName.METRICS, True, threshold=threshold, detail=f"{letter(arm)} keeps counters only")
    if arm.argv is None:
        return make_check(
            CheckName.METRICS,
            None,
            threshold=threshold,
            detail=f"{letter(arm)} was not started by us: its flags are unknown",
        )
    flags = " ".join(arm.argv).replace("=", " ")
    found = [
        flag
        for flag, sign in (
            ("summary_latencies", "summary_latencies true"),
            ("log-verbose", "--log-verbose 1"),
            ("tracing", "--trace-config"),
        )
        if sign in flags
    ]
    detail = f"{letter(arm)} was started with {some(found)}" if found else f"{letter(arm)} has none of them"
    return make_check(CheckName.METRICS, not found, value=len(found), threshold=threshold, detail=detail)


def _cores(arm: ArmRecord, cores: int | None) -> Check:
    """On the CPU: threads times instances against the cores."""
    device = str(arm.in_effect.get("device") or "")
    if device.startswith("cuda") or kind_of(arm) == "KIND_GPU":
        return make_check(CheckName.CORES, True, threshold=cores, detail=f"{letter(arm)} executes on a GPU")
    threads, instances = _number(arm.in_effect.get("threads")), _number(arm.in_effect.get("instances")) or 1
    if threads is None or cores is None or not arm.launched:
        detail = f"{letter(arm)}'s threads, or the cores of its machine, are unknown"
        return make_check(CheckName.CORES, None, threshold=cores, detail=detail)
    asked = int(threads * instances)
    detail = f"{letter(arm)} computes with {asked} threads ({threads:g} × {instances:g} instances) on {cores} cores"
    return make_check(CheckName.CORES, asked <= cores, value=asked, threshold=cores, detail=detail)


def _response_cache(arm: ArmRecord) -> Check:
    if arm.model_config is None:
        return untold(CheckName.RESPONSE_CACHE, arm, "off")
    cache = arm.model_config.get("response_cache")
    on = isinstance(cache, Mapping) and cache.get("enable") is True
    detail = f"{letter(arm)}'s response cache is {'on: an answer from it is no inference' if on else 'off'}"
    return make_check(CheckName.RESPONSE_CACHE, not on, value="on" if on else "off", threshold="off", detail=detail)


def _number(value: object) -> float | None:
    """Also from text, as parameters of a configuration are."""
    try:
        return float(str(value)) if value is not None else None
    except ValueError:
        return None
