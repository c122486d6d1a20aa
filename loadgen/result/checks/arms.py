"""Checks that the arms differ in what is compared and in nothing else, and that nothing in an arm's settings misleads.

Settings are read from Triton's configuration of a model as JSON, which the native server gives in the same shape. What
a server does not tell is unknown. Sources: Triton's model configuration reference and the source of its onnxruntime and
tensorrt backends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from loadgen.comparison.claims import join
from loadgen.comparison.facts import Facts
from loadgen.experiment.schedule import load_cells
from loadgen.records.model_config import accelerators, backend_of, groups, kind_of, listed, mapping, whole
from loadgen.records.payloads import base_name, without_backend
from loadgen.records.run import ArmRecord, Cell, Experiment, asked_for, setting_key, shown
from loadgen.result.checks.registry import Outcome, Severity, fairness, per_arm

NATIVE = "abserve-native"
_MOST_NUMBER = 1e12
DEFAULT_GRAPH_SIZES = (1, 2, 3, 4, 6, 8, 12, 16)
"""What Triton's tensorrt backend captures, with the largest batch, where nothing says otherwise and nothing is
batched dynamically."""
_MOST_SIZES = 4096
"""Beyond it nobody has a graph of each."""


def _declare_same(name: str, setting: str, title: str, severity: Severity, remedy: str) -> None:
    """Declare the check that a setting is the same on every arm."""

    def find(facts: Facts) -> list[Outcome]:
        return _compare(facts, setting)

    find.__name__ = name
    unknown: Severity = "warns" if severity == "invalidates" else "informs"
    fairness(title=title, severity=severity, unknown=unknown, remedy=remedy)(find)


_declare_same("same_model", "model", "same model", "invalidates", "Serve the same model on every arm.")
_declare_same("same_weights", "weights", "same weights", "invalidates", "Serve the same weights on every arm.")
_declare_same(
    "same_precision",
    "precision",
    "same precision",
    "invalidates",
    "Give every arm the same precision, or compare precisions on purpose.",
)
_declare_same(
    "same_device",
    "device",
    "same device",
    "invalidates",
    "Run every arm on the same device; look for an arm that fell back to the CPU.",
)
_declare_same(
    "same_threads",
    "threads",
    "same number of threads",
    "invalidates",
    "Give every arm the same number of threads.",
)
_declare_same(
    "same_max_batch_size",
    "max_batch_size",
    "same largest batch",
    "invalidates",
    "Give every arm the same maximal batch size.",
)


def _compare(facts: Facts, key: str) -> list[Outcome]:
    """Every arm with the baseline, or with the first arm that tells. One outcome for the arms that differ unasked, one
    for those that differ as asked for and one for those that do not tell; one alone where all have the same.

    Different values are a fault, unless an arm was asked for them: then the arms differ on purpose, which the report
    says, and the comparison is one of settings and not of servers."""
    experiment, arms = facts.run.experiment, {arm.label: arm for arm in facts.run.arms}
    have = {label: _told(arms.get(label), key) for label in experiment.labels}
    if key == "threads" and all(str(_told(arms.get(label), "device") or "").startswith("cuda") for label in have):
        return [Outcome(True, "every arm executes on a GPU: no threads to compare", None, "equal")]
    known = {label: _comparable(str(value), key, experiment) for label, value in have.items() if value is not None}
    outcomes = []
    first, *rest = known or [experiment.baseline.label]
    for on_purpose in (False, True):
        wanted = asked_for(experiment.arm(first).settings, key)
        apart = [
            label
            for label in rest
            if not _equal(known[first], known[label])
            and (asked_for(experiment.arm(label).settings, key) != wanted) == on_purpose
        ]
        if apart:
            text = ", ".join(f"{shown(label)} {known[label]}" for label in (first, *apart))
            detail = f"{key} differs ({text}), and nobody asked for that"
            if on_purpose:
                detail = f"{key} differs ({text}), as asked for: this compares settings and not servers alone"
            outcomes.append(Outcome(False, detail, text, "equal", severity="warns" if on_purpose else None))
    if silent := [shown(label) for label in have if label not in known]:
        detail = f"{join(silent)} {'do' if len(silent) > 1 else 'does'} not tell"
        outcomes.append(Outcome(None, detail, None, "equal"))
    return outcomes or [Outcome(True, known[first], known[first], "equal")]


def _comparable(value: str, key: str, experiment: Experiment) -> str:
    """A model without what its name says of another payload, and in a stack of a backend."""
    if key == "model" and len(experiment.payloads) > 1:
        value = base_name(value)
    return without_backend(value) if key == "model" and experiment.deployment == "compose" else value


def _told(arm: ArmRecord | None, key: str) -> object:
    if arm is None:
        return None
    if key == "model" and "model" not in arm.in_effect:
        return (arm.model_config or {}).get("name")
    return arm.in_effect.get(key)


def _equal(wanted: str, have: object) -> bool:
    """Compared as numbers where both are, as text otherwise."""
    try:
        return float(wanted) == float(str(have))
    except ValueError:
        return wanted.strip().lower() == str(have).strip().lower()


@fairness(
    title="settings asked for took effect",
    severity="warns",
    remedy="Correct the setting, or read why the server overrode it.",
)
@per_arm
def settings_in_effect(arm: ArmRecord, _: Facts) -> Outcome:
    label, threshold = shown(arm.label), "as asked for"
    known = []
    for name, wanted in arm.settings.items():
        have = arm.in_effect.get(setting_key(name))
        if have is not None and wanted != "auto":
            known.append((name, wanted, have))
    if not known and arm.settings:
        return Outcome(None, f"{label} does not tell its settings", None, threshold)
    if not known:
        return Outcome(True, f"{label} was asked for nothing special", None, threshold)
    overridden = [f"{name} {wanted} became {have}" for name, wanted, have in known if not _equal(wanted, have)]
    detail = f"{label}: {'; '.join(overridden)}"
    if not overridden:
        detail = f"{label} as asked for: {', '.join(name for name, _, _ in known)}"
    return Outcome(not overridden, detail, len(overridden), threshold)


_declare_same(
    "same_queue_delay",
    "max_queue_delay_us",
    "same queue delay",
    "warns",
    "Give every arm the same queue delay, or compare delays on purpose.",
)
_declare_same(
    "same_instances",
    "instances",
    "same number of instances",
    "warns",
    "Give every arm as many instances, or compare them on purpose.",
)


@fairness(
    title="no batch is beyond an arm's limit",
    severity="warns",
    remedy="Ask for smaller batches, or raise the arm's max-batch-size.",
)
@per_arm
def batch_limit(arm: ArmRecord, facts: Facts) -> Outcome:
    limit = whole(arm.in_effect.get("max_batch_size"))
    asked = max((cell.batch_size for cell in _cells(facts)), default=1)
    if limit is None:
        return Outcome(None, f"{shown(arm.label)} does not tell its largest batch", asked)
    detail = f"{shown(arm.label)} takes batches up to {limit}; the largest that is asked for is {asked}"
    return Outcome(asked <= max(limit, 1), detail, asked, limit)


@fairness(
    title="serial load meets no queue delay",
    severity="informs",
    remedy="Set max-queue-delay-us to 0 for serial load, on all arms alike, or read these scenarios with it in mind.",
)
@per_arm
def serial_queue_delay(arm: ArmRecord, facts: Facts) -> Outcome:
    delay, limit = _number(arm.in_effect.get("max_queue_delay_us")), whole(arm.in_effect.get("max_batch_size"))
    serial = [
        cell.name
        for cell in _cells(facts)
        if cell.concurrency == 1 and not cell.is_open and not (limit is not None and cell.batch_size >= limit)
    ]
    if delay is None and arm.in_effect.get("dynamic_batching") is not False:
        return Outcome(None, f"{shown(arm.label)} does not tell its queue delay", None, 0)
    if delay is None:
        return Outcome(True, f"{shown(arm.label)} has no dynamic batcher", None, 0)
    detail = f"{shown(arm.label)}'s queue delay is {delay:,.0f} µs"
    waits = delay > 0 and bool(serial)
    if waits:
        detail += f", and in {_some(serial)} nobody else's request can come"
    return Outcome(not waits, detail, delay, 0)


@fairness(
    title="FP32 is FP32",
    severity="warns",
    remedy='Set use_tf32 to "0" in the cuda accelerator of the configuration, or ask every arm for tf32.',
)
@per_arm
def tf32(arm: ArmRecord, _: Facts) -> Outcome:
    precision, device = arm.in_effect.get("precision"), str(arm.in_effect.get("device") or "")
    threshold = "off under FP32"
    if device == "cpu" or (not device and kind_of(arm) == "KIND_CPU"):
        return Outcome(True, f"{shown(arm.label)} is on a CPU, which has none", None, threshold)
    if precision is not None and precision != "fp32":
        return Outcome(True, f"{shown(arm.label)} is {precision}", str(precision), threshold)
    if precision == "fp32":
        return Outcome(True, f"{shown(arm.label)} says fp32, and tf32 is another", "off", threshold)
    if backend_of(arm) == "onnxruntime":
        told = next((p.get("use_tf32") for name, p in accelerators(arm) if name == "cuda" and "use_tf32" in p), None)
        how = f"use_tf32 is {told if told is not None else 'left to ONNX Runtime, which has it on'}"
        return Outcome(told == "0", f"{shown(arm.label)}: {how}", how, threshold)
    return Outcome(None, f"{shown(arm.label)} does not tell its precision", None, threshold)


@fairness(
    title="the models warm themselves",
    severity="informs",
    remedy="Add model_warmup for every batch size. The load is warmed by us before it begins, a cold start is not.",
)
@per_arm
def model_warm_up(arm: ArmRecord, _: Facts) -> Outcome:
    threshold = "every model warms itself before it is ready"
    if arm.model_config is None:
        return _untold(arm, threshold)
    if arm.server_name == NATIVE or (arm.in_effect.get("engine") and backend_of(arm) == "python"):
        return Outcome(True, f"{shown(arm.label)} warms its engine before it is ready", None, threshold)
    steps = listed(arm.model_config.get("model_warmup"))
    sizes = sorted({whole(step.get("batch_size")) or 0 for step in steps if isinstance(step, Mapping)})
    detail = f"{shown(arm.label)}: model_warmup of the batch sizes {_some([str(size) for size in sizes])}"
    if not sizes:
        slow = "its first request of each batch size may be slow, in a cold start too"
        detail = f"{shown(arm.label)} has no model_warmup: {slow}"
    return Outcome(bool(sizes), detail, len(sizes), threshold)


@fairness(
    title="no metrics that cost time",
    severity="warns",
    remedy="Start Triton without summary_latencies (reported to cost a third of the throughput), tracing, verbose "
    "logs.",
)
@per_arm
def metrics(arm: ArmRecord, _: Facts) -> Outcome:
    threshold = "no summaries, traces or verbose logs"
    if arm.server_name == NATIVE and arm.model_config is not None:
        return Outcome(True, f"{shown(arm.label)} keeps counters only", None, threshold)
    if arm.argv is None:
        return Outcome(None, f"{shown(arm.label)} was not started by us: its flags are unknown", None, threshold)
    flags = " ".join(arm.argv).replace("=", " ")
    signs = {
        "summary_latencies": "summary_latencies true",
        "log-verbose": "--log-verbose 1",
        "tracing": "--trace-config",
    }
    found = [flag for flag, sign in signs.items() if sign in flags]
    detail = f"{shown(arm.label)} was started with {_some(found)}" if found else f"{shown(arm.label)} has none of them"
    return Outcome(not found, detail, len(found), threshold)


@fairness(
    title="no answer comes from a cache",
    severity="warns",
    remedy="Set response_cache { enable: false }: requests repeat, and a cached answer is no inference.",
)
@per_arm
def response_cache(arm: ArmRecord, _: Facts) -> Outcome:
    if arm.model_config is None:
        return _untold(arm, "off")
    cache = arm.model_config.get("response_cache")
    if cache is None and arm.server_name not in (NATIVE, "triton"):  # these two leave out what is off
        return Outcome(None, f"{shown(arm.label)} does not report whether it has a response cache", None, "off")
    on = isinstance(cache, Mapping) and cache.get("enable") is True
    detail = f"{shown(arm.label)}'s response cache is {'on: an answer from it is no inference' if on else 'off'}"
    return Outcome(not on, detail, "on" if on else "off", "off")


@fairness(
    title="CUDA graphs take effect where they are asked for",
    severity="warns",
    remedy="Take the setting out: only Triton's tensorrt backend reads it, and enable_cuda_graph is unsafe in Triton.",
)
@per_arm
def cuda_graphs(arm: ArmRecord, _: Facts) -> Outcome:
    """Asked for where nothing reads them, or where they replay stale inputs."""
    threshold = "asked for only where they take effect"
    if arm.model_config is None:
        return _untold(arm, threshold)
    asked, backend = _graphs_asked(arm), backend_of(arm)
    if asked and backend != "tensorrt":
        detail = f"{shown(arm.label)}: the {backend or 'unknown'} backend ignores optimization.cuda.graphs"
        return Outcome(False, detail, "ignored", threshold)
    if backend == "onnxruntime" and any(p.get("enable_cuda_graph") in ("1", "true") for _, p in accelerators(arm)):
        detail = f"{shown(arm.label)}: enable_cuda_graph replays a graph while Triton binds new buffers: stale inputs"
        return Outcome(False, detail, "stale", threshold)
    told = "are asked for and taken" if asked else "are not asked for in its configuration"
    return Outcome(True, f"{shown(arm.label)}: CUDA graphs {told}", "on" if asked else "off", threshold)


@fairness(
    title="every batch size has its CUDA graph",
    severity="warns",
    remedy="Add a graph_spec for each batch size, or a graph_lower_bound that covers it.",
)
@per_arm
def graph_sizes(arm: ArmRecord, facts: Facts) -> Outcome:
    """Whether the batch sizes that are asked for have a captured graph; merged batches may have any size."""
    threshold = "every batch size has a graph"
    if arm.model_config is None:
        return _untold(arm, threshold)
    if not _graphs_asked(arm) or backend_of(arm) != "tensorrt":
        return Outcome(True, f"{shown(arm.label)} asks for no graphs by batch size", None, threshold)
    cells, largest = _cells(facts), _largest(arm.model_config)
    wanted = {cell.batch_size for cell in cells if cell.batch_size <= largest}
    if any(cell.concurrency > 1 for cell in cells):
        wanted |= set(range(1, largest + 1))
    missing = sorted(wanted - captured_sizes(arm.model_config))
    detail = f"{shown(arm.label)}: the batch sizes {_some([str(size) for size in missing])} run without a CUDA graph"
    if not missing:
        detail = f"{shown(arm.label)}: all {len(wanted)} batch sizes that can occur have a graph"
    return Outcome(not missing, detail, len(missing), threshold)


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


def _graphs_asked(arm: ArmRecord) -> bool:
    return mapping(mapping((arm.model_config or {}).get("optimization")).get("cuda")).get("graphs") is True


def _largest(config: Mapping[str, Any]) -> int:
    return min(whole(config.get("max_batch_size")) or 1, _MOST_SIZES)


@fairness(
    title="no preferred batch sizes without a profile",
    severity="informs",
    remedy="Leave preferred_batch_size out, as Triton advises, unless each size has a TensorRT profile of its own.",
)
@per_arm
def preferred_sizes(arm: ArmRecord, _: Facts) -> Outcome:
    threshold = "none, but for TensorRT with several profiles"
    if arm.model_config is None:
        return _untold(arm, threshold)
    sizes = listed(mapping(arm.model_config.get("dynamic_batching")).get("preferred_batch_size"))
    profiles = max((len(listed(group.get("profile"))) for group in groups(arm.model_config)), default=0)
    limit = arm.in_effect.get("max_batch_size")
    beyond = [size for size in sizes if isinstance(limit, int) and (whole(size) or 0) > limit]
    meant = backend_of(arm) == "tensorrt" and profiles > 1
    filled_in = sizes == [limit]  # what Triton itself writes into a configuration that prefers none
    text = _some([str(size) for size in sizes])
    ok = not sizes or filled_in or (meant and not beyond)
    if not sizes or filled_in:
        detail = f"{shown(arm.label)} prefers none"
    elif ok:
        detail = f"{shown(arm.label)} prefers {text}, each with a profile"
    elif beyond:
        detail = f"{shown(arm.label)} prefers batches of {text} and takes {limit} at most: they never form"
    else:
        detail = f"{shown(arm.label)} prefers batches of {text}: smaller ones wait for the whole queue delay"
    return Outcome(ok, detail, text if sizes else None, threshold)


@fairness(
    title="the engines' threads fit the cores",
    severity="warns",
    remedy="Ask for fewer --threads or instances: threads that share a core wait for each other.",
)
@per_arm
def cores(arm: ArmRecord, facts: Facts) -> Outcome:
    """On the CPU: threads times instances against the cores."""
    if str(arm.in_effect.get("device") or "").startswith("cuda") or kind_of(arm) == "KIND_GPU":
        return Outcome(True, f"{shown(arm.label)} executes on a GPU", None, facts.cores)
    threads, instances = _number(arm.in_effect.get("threads")), _number(arm.in_effect.get("instances")) or 1
    if threads is None or facts.cores is None or not arm.launched:
        detail = f"{shown(arm.label)}'s threads, or the cores of its machine, are unknown"
        return Outcome(None, detail, None, facts.cores)
    asked = int(threads * instances)
    what = f"{asked} threads ({threads:g} × {instances:g} instances)"
    detail = f"{shown(arm.label)} computes with {what} on {facts.cores} cores"
    return Outcome(asked <= facts.cores, detail, asked, facts.cores)


def _cells(facts: Facts) -> Sequence[Cell]:
    return load_cells(facts.run.experiment.cells)


def _untold(arm: ArmRecord, threshold: str) -> Outcome:
    return Outcome(None, f"{shown(arm.label)} does not tell its configuration", None, threshold)


def _some(names: Sequence[str]) -> str:
    """The first few of a list."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _number(value: object) -> float | None:
    """Also from text, as parameters of a configuration are; None for what is none, or beyond all reason."""
    try:
        found = float(str(value))
    except ValueError:
        return None
    return found if abs(found) < _MOST_NUMBER else None
