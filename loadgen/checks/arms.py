"""Checks that the arms differ only in what is compared, and that no setting makes an arm slow or misleads.

Settings are read from Triton's model configuration as JSON, which the native server returns in the same shape. What a
server does not report is unknown. Sources: Triton's model configuration reference and the source of its onnxruntime and
tensorrt backends.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any, cast

from loadgen.base.quantities import do_not, join, ratio, ratio_interval
from loadgen.checks.registry import Find, Judgement, check, fairness, of_tokens, per_arm, tensor_fairness
from loadgen.experiment.plan import held_back, padding_in_words
from loadgen.experiment.schedule import load_workloads
from loadgen.findings.handicap import LARGEST_HIDDEN, ArmTuning, HandicapRecord, HandicapsFound, LoadHandicap
from loadgen.metrics.facts import RUN, Facts, workload_scope
from loadgen.records.checks import Severity
from loadgen.records.model_config import (
    POLICY_EFFECT,
    accelerators,
    backend_of,
    executed_config,
    executed_models,
    groups,
    kind_of,
    listed,
    mapping,
    padding_in_effect,
    queue_policy_of,
    whole,
)
from loadgen.records.payloads import BACKEND_ENDINGS, base_name, served_as, without_backend
from loadgen.records.run import (
    TOKENS_PLACE,
    ArmRecord,
    ArmRequest,
    Experiment,
    Workload,
    asked_for,
    body_in_words,
    setting_key,
)
from loadgen.records.targets import Kind

NATIVE = "abserve-native"
_MOST_NUMBER = 1e12
DEFAULT_GRAPH_SIZES = (1, 2, 3, 4, 6, 8, 12, 16)
"""Batch sizes that Triton's tensorrt backend captures, with the largest batch, without a graph_spec and without dynamic
batching."""
_MOST_SIZES = 4096
"""The most batch sizes for which any server captures a graph each."""
UNREPORTED = Judgement(None, "does not report its configuration")


def _compare(facts: Facts, key: str, noun: str) -> list[Judgement]:
    """Compare every arm with the baseline, or with the first arm that reports the setting.

    One outcome for unrequested differences, one for accepted ones, one for arms that do not report the setting; a
    single one if all values are equal. A difference invalidates, with two exceptions that warn: it was requested, so
    the run compares settings; or abserve does not configure the servers, and only their owner can remove it.
    """
    names = facts.names
    experiment, arms = facts.run.experiment, {arm.label: arm for arm in facts.run.arms}
    have = {label: _reported(arms.get(label), key) for label in experiment.labels}
    if key == "threads" and all(str(_reported(arms.get(label), "device") or "").startswith("cuda") for label in have):
        return [Judgement(True, "every arm runs on a GPU: no threads to compare")]
    reported = {
        label: _model_name(str(value), arms[label], experiment) if key == "model" else str(value)
        for label, value in have.items()
        if value is not None
    }
    outcomes = []
    first, *rest = reported or [experiment.baseline.label]
    reasons = {
        label: _reason_to_accept(experiment, experiment.arm(first), experiment.arm(label), key)
        for label in rest
        if not _equal(reported[first], reported[label])
        and not (key == "model" and served_as(reported[first]) == served_as(reported[label]))
    }
    for reason in sorted(set(reasons.values())):
        apart = [label for label in reasons if reasons[label] == reason]
        text = ", ".join(f"{names[label]} {reported[label]}" for label in (first, *apart))
        detail = f"the arms differ in {noun} ({text}), {reason or 'which was not requested'}"
        outcomes.append(Judgement(False, detail, text, severity="warns" if reason else None))
    if silent := [names[label] for label in have if label not in reported]:
        outcomes.append(Judgement(None, f"{do_not(silent, 'report')} it"))
    return outcomes or [Judgement(True, reported[first], reported[first])]


def _reason_to_accept(experiment: Experiment, baseline: ArmRequest, arm: ArmRequest, key: str) -> str:
    """Why the verdict stands although the arms differ in a setting; empty where it does not."""
    if _asked_for(arm, key) != _asked_for(baseline, key):
        if key in ("model", "weights"):
            return "as requested: only the parity check shows whether they compute the same"
        if experiment.is_at_best:
            return "as chosen: every server has the settings that were best for it"
        return "as requested: this compares settings, not only servers"
    if key == "pad_to" and not all(_is_configured(experiment, request) for request in (baseline, arm)):
        return "as the servers that abserve does not configure are set: this compares settings, not only servers"
    return ""


def _is_configured(experiment: Experiment, arm: ArmRequest) -> bool:
    """Whether abserve decides the arm's settings: not those of a URL, a stack or a model repository of the user."""
    return arm.embedded and experiment.deployment == "embedded" and not arm.own_repository


def _asked_for(arm: ArmRequest, key: str) -> str | None:
    """The arm's own value of a setting; who asks for another model asks for other weights."""
    return asked_for(arm.settings, key) or (arm.model if key in ("model", "weights") else None)


def _model_name(value: str, arm: ArmRecord, experiment: Experiment) -> str:
    """A model's name without its payload variant, and in a compose stack also without its backend; a name on another
    server, which reports no reference, without the backend that executes it and the payload that is sent."""
    backend = arm.in_effect.get("backend")
    if experiment.deployment == "compose" or ("model" not in arm.in_effect and backend is None):
        value = without_backend(value)
    if "model" not in arm.in_effect:
        value = value.removesuffix(BACKEND_ENDINGS.get(str(backend), ""))
        value = value.removesuffix(f"_{experiment.payload_of(experiment.arm(arm.label))}")
    return base_name(value) if len(experiment.payloads) > 1 else value


def _reported(arm: ArmRecord | None, key: str) -> object:
    if arm is None:
        return None
    if key == "model" and "model" not in arm.in_effect:
        return (arm.model_config or {}).get("name")
    if key == "max_batch_size" and arm.steps:  # an ensemble itself merges no requests
        return (executed_config(arm) or {}).get(key)
    if key == "instances" and (flights := _number(arm.in_effect.get("batches_in_flight"))):
        instances = _number(arm.in_effect.get(key))
        return None if instances is None else int(instances * flights)
    return padding_in_effect(arm) if key == "pad_to" else arm.in_effect.get(key)


def _equal(requested: str, have: object) -> bool:
    """Compare as numbers if both are, as text otherwise. "cuda" is a GPU without its number: it equals any."""
    if requested == "cuda" or have == "cuda":
        return requested.startswith("cuda") and str(have).startswith("cuda")
    try:
        return float(requested) == float(str(have))
    except ValueError:
        return requested.strip().lower() == str(have).strip().lower()


def per_model(judge: Callable[[ArmRecord, Facts], Judgement]) -> Find:
    """Declare a check that judges each model that executes an arm's requests: for an ensemble the worst of them, by
    name if there are several."""

    @per_arm
    @wraps(judge)
    def find(arm: ArmRecord, facts: Facts) -> Judgement:
        models = executed_models(arm)
        outcomes = [(model, judge(model, facts)) for model in models]
        worst = min((outcome.ok for _, outcome in outcomes), key=(False, None, True).index)
        first, *more = [(model, outcome) for model, outcome in outcomes if outcome.ok is worst]
        if len(models) == 1:
            return first[1]
        named = [f"{outcome.detail} (step {_step_name(model)})" for model, outcome in (first, *more)]
        return replace(first[1], detail="; ".join(named))

    return find


def _step_name(model: ArmRecord) -> str:
    return str((model.model_config or {}).get("name") or "of unknown name")


def _declare_same(
    name: str, setting: str, noun: str, severity: Severity, remedy: str = "", *, where_reported: bool = False
) -> None:
    """Declare the check that every arm has the same value of a setting; with `where_reported` only of a setting that at
    least one arm reports."""

    def find(facts: Facts) -> list[Judgement]:
        lacking = [arm.in_effect.get(setting) is None for arm in facts.run.arms]
        if facts.run.experiment.kind is Kind.TOKENS and setting in OF_TENSORS and any(lacking):
            return []
        if where_reported and all(lacking):
            return []
        return _compare(facts, setting, noun)

    find.__name__ = name
    unknown: Severity = "warns" if severity == "invalidates" else "informs"
    remedy = remedy or f"Give every arm the same {noun}."
    declare = fairness(
        f"same {noun}", f"Not the same {noun}", severity, remedy, unknown=unknown, threshold="equal",
        fault="unfair configuration" if severity == "invalidates" else None,
    )  # fmt: skip
    declare(find)


REPORTING = ("cache_salt", "return_token_ids", "stream_options")
"""Fields of a request that change nothing but the report: prompts differ also without a salt."""
OF_TENSORS = ("max_batch_size", "max_queue_delay_us", "instances")
"""Settings that servers of language models need not have: they have slots."""
for _name, _setting, _noun, _severity in (
    ("same_model", "model", "model", "invalidates"),
    ("same_weights", "weights", "weights", "invalidates"),
    ("same_precision", "precision", "precision", "invalidates"),
    ("same_device", "device", "device", "invalidates"),
    ("same_threads", "threads", "number of threads", "invalidates"),
    ("same_max_batch_size", "max_batch_size", "maximum batch size", "invalidates"),
    ("same_queue_delay", "max_queue_delay_us", "queue delay", "warns"),
):
    _declare_same(_name, _setting, _noun, cast("Severity", _severity))
_declare_same(
    "same_instances",
    "instances",
    "number of batches at once",
    "warns",
    "Change --instances, unless every arm has the number with which it is fastest. On a GPU an instance of the native "
    "server with the engine torch has two batches in flight; an instance of Triton's python backend has one.",
)
_declare_same(
    "same_pad_to",
    "pad_to",
    "padding of batches",
    "invalidates",
    "Give every arm the same pad-to, and none where one of them cannot pad: padding decides which requests share a "
    "batch, and how much each computes.",
    where_reported=True,
)
_declare_same("same_slots", "slots", "number of slots", "warns", where_reported=True)
_declare_same("same_max_length", "max_length", "context length", "warns", where_reported=True)


@of_tokens(
    "every arm gets requests with the same fields",
    "The arms get requests with different fields",
    "warns",
    "Give every arm the same fields with --a-body and --b-body, or read the figures as those of different work.",
    threshold="equal",
)
def same_request_fields(facts: Facts) -> Iterator[Judgement]:
    """Fields that only say what a server reports, or under which name it takes the length, change no work."""
    names = facts.names
    bodies = {arm.label: arm.body for arm in facts.run.experiment.arms}
    texts = [f"{names[label]} was asked {body_in_words(body)}" for label, body in bodies.items() if body]
    works = [_work(body) for body in bodies.values()]
    changes_work = any(work != works[0] for work in works)
    alike = all(body == bodies[facts.run.experiment.baseline.label] for body in bodies.values())
    detail = "; ".join(texts) or "every arm was asked with the usual fields"
    yield Judgement(alike, detail, len(texts), severity=None if alike or changes_work else "informs")


def _work(body: Mapping[str, object]) -> dict[str, object]:
    """The fields of a request that change what a server has to do."""
    work = {name: value for name, value in body.items() if name not in REPORTING}
    if work.get("max_tokens", 0) is None and work.get("max_completion_tokens") == TOKENS_PLACE:
        work = {name: value for name, value in work.items() if name not in ("max_tokens", "max_completion_tokens")}
    return work


@check(
    "every arm can pad batches",
    "Not every arm can pad batches",
    "informs",
    "Turn padding on for each arm that can pad (--a-option pad-to=…), or leave out the arm that cannot.",
    caveat=("failed",),
)
def padding_held_back(facts: Facts) -> Iterator[Judgement]:
    """Skipped where no load merges requests of different lengths, and where no arm could pad more than it does."""
    environment, experiment = facts.run.environment, facts.run.experiment
    merging = [workload for workload in experiment.workloads if workload.concurrency > 1]
    if environment is None or not any(map(environment.is_mixed, merging)) or not held_back(experiment):
        return
    longest = environment.inputs.get("length_max")
    yield Judgement(False, padding_in_words(experiment, longest if isinstance(longest, int) else 0))


# Threads that spin while they wait for work answer sooner on idle cores, and take time from everything else on busy
# ones. On a GPU no arm reports it.
_declare_same(
    "same_spinning",
    "spinning",
    "thread spinning",
    "warns",
    "Give every arm the same spinning, on or off (Triton's onnxruntime backend always spins), and compare the CPU time "
    "per request as well.",
    where_reported=True,
)


_DECIDE_CHOICES = (
    "engine", "engine_version", "mode", "precision", "device", "threads", "model", "payload", "max_batch_size",
    "pad_to", "slots", "max_length", "prefill_chunk",
)  # fmt: skip
"""Settings in effect on which depends what an engine measures at its start, and then executes."""


@fairness(
    "arms with the same settings execute the same",
    "Arms with the same settings execute differently",
    "invalidates",
    "Compare again: a server stores what it chose at its first start, and later starts read it. If that does not help, "
    "read the servers' logs: they say why a choice could not be stored.",
    threshold="equal",
    fault="unfair configuration",
)
def same_choices(facts: Facts) -> Iterator[Judgement]:
    """Skipped where no two arms that report their choices have the same settings."""
    names = facts.names
    alike: dict[tuple[object, ...], dict[str, tuple[object, object]]] = {}
    experiment = facts.run.experiment
    for arm in facts.run.arms:
        request, settings = experiment.arm(arm.label), dict(arm.in_effect)
        engine, asked = None, [_asked_for(request, name) for name in ("engine", "mode", "choices")]
        automatic = all(value in (None, "auto") for value in asked[:2])
        if arm.target == "native" and _is_configured(experiment, request) and automatic:
            engine = settings.get("engine")  # which the server chose, too
            settings |= dict.fromkeys(("engine", "engine_version", "mode"))
        digest = settings.get("choices")
        if engine is not None or digest is not None:
            key = (*(settings.get(name) for name in _DECIDE_CHOICES), asked[2])
            alike.setdefault(key, {})[arm.label] = engine, digest
    for arms in alike.values():
        one_engine = len({engine for engine, _ in arms.values()}) == 1
        choices = {
            label: str(digest) if one_engine else f"{engine} {digest or ''}".rstrip()
            for label, (engine, digest) in arms.items()
            if digest is not None or not one_engine
        }
        if len(choices) < 2:
            continue
        whose = join([names[label] for label in choices])
        text = ", ".join(f"{names[label]} {choice}" for label, choice in choices.items())
        ok = len(set(choices.values())) == 1
        detail = f"{whose} have the same settings and execute what their servers chose at the start ({text})"
        if not ok:
            detail = f"{whose} have the same settings, but their servers chose differently at the start ({text})"
        managed = all(_is_configured(experiment, experiment.arm(label)) for label in choices)
        yield Judgement(ok, detail, text, severity=None if managed else "warns")


@fairness(
    "no two arms share a server",
    "Arms share a server",
    "informs",
    "Compare each in a separate run, on a server with its model only, if memory or cold starts matter.",
)
def shared_server(facts: Facts) -> Iterator[Judgement]:
    """Skipped where every arm has its own server."""
    names = facts.names
    for url in dict.fromkeys(arm.url for arm in facts.run.arms):
        sharing = [names[arm.label] for arm in facts.run.arms if arm.url == url]
        if len(sharing) > 1:
            detail = (
                f"{join(sharing)} are on one server, so they share its process, its memory and its cold start; while "
                "one gets requests the others stay loaded"
            )
            yield Judgement(False, detail, ", ".join(sharing))


@fairness(
    "requested settings took effect",
    "Requested settings did not take effect",
    "warns",
    "Correct the setting, or find out why the server overrode it.",
)
@per_arm
def settings_in_effect(arm: ArmRecord, _: Facts) -> Judgement:
    asked = [(name, requested) for name, requested in arm.settings.items() if requested != "auto"]
    in_effect = [(name, requested, arm.in_effect.get(setting_key(name))) for name, requested in asked]
    reported = [(name, requested, have) for name, requested, have in in_effect if have is not None]
    if asked and not reported:
        return Judgement(None, "does not report its settings")
    overridden = [
        f"{name} {have} instead of {requested}" for name, requested, have in reported if not _equal(requested, have)
    ]
    detail = f"has the requested {', '.join(name for name, _, _ in reported)}"
    if overridden:
        detail = f"runs with {', '.join(overridden)}"
    elif not reported:
        detail = "has no requested settings"
    return Judgement(not overridden, detail, len(overridden))


@tensor_fairness(
    "every batch size fits the server's maximum",
    "A batch size exceeds the server's maximum",
    "warns",
    "Ask for smaller batches, or raise the arm's --max-batch-size.",
)
@per_arm
def batch_limit(arm: ArmRecord, facts: Facts) -> Judgement:
    limit = whole(arm.in_effect.get("max_batch_size"))
    asked = max((workload.batch_size for workload in _workloads(facts)), default=1)
    if limit is None:
        return Judgement(None, "does not report its maximum batch size", asked)
    detail = f"accepts batches up to {limit}; the largest requested batch is {asked}"
    return Judgement(asked <= max(limit, 1), detail, asked, limit)


@tensor_fairness(
    "no queue delay for serial load",
    "A queue delay holds serial requests back",
    "informs",
    "Set max-queue-delay-us to 0 on every arm for serial load, or keep it in mind when you read these workloads.",
    threshold=0,
)
@per_arm
def serial_queue_delay(arm: ArmRecord, facts: Facts) -> Judgement:
    delay, limit = _number(arm.in_effect.get("max_queue_delay_us")), whole(arm.in_effect.get("max_batch_size"))
    serial = [
        workload.name
        for workload in _workloads(facts)
        if workload.concurrency == 1
        and not workload.is_open
        and not (limit is not None and workload.batch_size >= limit)
    ]
    if delay is None and arm.in_effect.get("dynamic_batching") is not False:
        return Judgement(None, "does not report its queue delay")
    if delay is None:
        return Judgement(True, "has no dynamic batcher")
    detail = f"has a queue delay of {delay:,.0f} µs"
    waits = delay > 0 and bool(serial) and arm.in_effect.get("lone_requests_wait") != "false"
    if delay > 0 and serial and not waits:
        detail += ", which lone requests skip"
    if waits:
        detail += f", and in {_some(serial)} no other request can join a batch"
    return Judgement(not waits, detail, delay)


@tensor_fairness(
    "no queue policy slows Triton's batcher",
    "A queue policy slows Triton's batcher",
    "warns",
    "Remove the queue policy from dynamic_batching in the config.pbtxt.",
    threshold="none",
)
@per_arm
def queue_policy(arm: ArmRecord, facts: Facts) -> Judgement:
    if policy := queue_policy_of(arm):
        remedy = f"Remove {policy} from dynamic_batching in the config.pbtxt of {facts.names[arm.label]}."
        return Judgement(False, f"has {policy}, which {POLICY_EFFECT}", policy, remedy=remedy)
    if arm.model_config is None or any(step.config is None for step in arm.steps):
        return UNREPORTED
    return Judgement(True, "has none" if arm.server_name == "triton" else "has another batcher than Triton's", "none")


@fairness(
    "FP32 runs without TF32",
    "FP32 runs as TF32",
    "warns",
    'Set use_tf32 to "0" in the cuda accelerator of the configuration, or run every arm with precision tf32.',
    threshold="off under FP32",
)
@per_model
def tf32(arm: ArmRecord, _: Facts) -> Judgement:
    precision = arm.in_effect.get("precision")
    device = str(arm.in_effect.get("device") or "")
    if device.startswith("cpu") or (not device and kind_of(arm) == "KIND_CPU"):
        return Judgement(True, "runs on a CPU, which has no TF32")
    if precision not in (None, "fp32"):
        return Judgement(True, f"runs {precision}", str(precision))
    if backend_of(arm) == "onnxruntime":
        use = next((p.get("use_tf32") for name, p in accelerators(arm) if name == "cuda" and "use_tf32" in p), None)
        how = f"use_tf32 = {use}" if use is not None else "use_tf32 unset, and ONNX Runtime turns TF32 on by default"
        return Judgement(use == "0", f"has {how}", how)
    if precision is not None:
        return Judgement(True, "runs FP32 and would report TF32 as tf32", "off")
    return Judgement(None, "does not report its precision")


@tensor_fairness(
    "models warm up before they are ready",
    "A model does not warm up before it is ready",
    "informs",
    "Add model_warmup for every batch size. abserve warms up before the load, but not before a cold start.",
    threshold="every model warms up",
)
@per_model
def model_warm_up(arm: ArmRecord, _: Facts) -> Judgement:
    if arm.model_config is None:
        return UNREPORTED
    if arm.server_name == NATIVE or (arm.in_effect.get("engine") and backend_of(arm) == "python"):
        return Judgement(True, "warms up its engine before it is ready")
    steps = listed(arm.model_config.get("model_warmup"))
    sizes = sorted({whole(step.get("batch_size")) or 0 for step in steps if isinstance(step, Mapping)})
    detail = "has no model_warmup, so its first request of each batch size may be slow"
    if sizes:
        detail = f"has model_warmup for batch sizes {_some([str(size) for size in sizes])}"
    return Judgement(bool(sizes), detail, len(sizes))


@fairness(
    "no slow metrics, traces or verbose logs",
    "Metrics, traces or logs slow a server",
    "warns",
    "Start Triton without summary_latencies (reported to cost a third of the throughput), tracing and verbose logs.",
    threshold="none",
)
@per_arm
def metrics(arm: ArmRecord, _: Facts) -> Judgement:
    if arm.server_name == NATIVE and arm.model_config is not None:
        return Judgement(True, "keeps counters only")
    if arm.argv is None:
        return Judgement(None, "has unknown flags, because abserve did not start it")
    flags = " ".join(arm.argv).replace("=", " ")
    signs = {
        "summary_latencies": "summary_latencies true",
        "log-verbose": "--log-verbose [1-9]",
        "tracing": "--trace-config",
    }
    flags_found = [flag for flag, sign in signs.items() if re.search(sign, flags)]
    detail = f"was started with {_some(flags_found)}" if flags_found else "has none of them"
    return Judgement(not flags_found, detail, len(flags_found))


@tensor_fairness(
    "the response cache is off",
    "The response cache is on",
    "warns",
    "Set response_cache { enable: false }: a cached response is not an inference.",
    threshold="off",
)
@per_arm
def response_cache(arm: ArmRecord, _: Facts) -> Judgement:
    configs = [arm.model_config, *(step.config for step in arm.steps)]
    on = any(mapping((config or {}).get("response_cache")).get("enable") is True for config in configs)
    if not on and None in configs:
        return UNREPORTED
    cache = (arm.model_config or {}).get("response_cache")
    if cache is None and arm.server_name not in (NATIVE, "triton"):  # both leave out disabled options
        return Judgement(None, "does not report whether it has a response cache")
    state = "on, so responses may come without an inference" if on else "off"
    return Judgement(not on, f"has its response cache {state}", "on" if on else "off")


@tensor_fairness(
    "requested CUDA graphs take effect",
    "Requested CUDA graphs are ignored or unsafe",
    "warns",
    "Remove the setting: only Triton's tensorrt backend reads it, and enable_cuda_graph is unsafe in Triton.",
    threshold="requested only where they take effect",
)
@per_model
def cuda_graphs(arm: ArmRecord, _: Facts) -> Judgement:
    """Fails if the setting is ignored, or if graphs replay stale inputs."""
    if arm.model_config is None:
        return UNREPORTED
    asked, backend = _graphs_asked(arm), backend_of(arm)
    if asked and backend != "tensorrt":
        return Judgement(
            False, f"has a backend ({backend or 'unknown'}) that ignores optimization.cuda.graphs", "ignored"
        )
    if backend == "onnxruntime" and any(p.get("enable_cuda_graph") in ("1", "true") for _, p in accelerators(arm)):
        detail = "has enable_cuda_graph, which replays stale inputs, because Triton binds new buffers"
        return Judgement(False, detail, "stale")
    state = "requested and in effect" if asked else "not requested"
    return Judgement(True, f"has CUDA graphs {state}", "on" if asked else "off")


@tensor_fairness(
    "every batch size has a CUDA graph",
    "Batch sizes run without a CUDA graph",
    "warns",
    "Add a graph_spec for each batch size, or a graph_lower_bound that covers it.",
)
@per_model
def graph_sizes(arm: ArmRecord, facts: Facts) -> Judgement:
    """Requested batch sizes, and with concurrency any size that merging can give."""
    if arm.model_config is None:
        return UNREPORTED
    if not _graphs_asked(arm) or backend_of(arm) != "tensorrt":
        return Judgement(True, "requests no CUDA graphs by batch size")
    workloads, largest = _workloads(facts), _largest(arm.model_config)
    possible = {workload.batch_size for workload in workloads if workload.batch_size <= largest}
    if any(workload.concurrency > 1 for workload in workloads):
        possible |= set(range(1, largest + 1))
    missing = sorted(possible - captured_sizes(arm.model_config))
    detail = f"has a graph for all {len(possible)} possible batch sizes"
    if missing:
        detail = f"runs batch sizes {_some([str(size) for size in missing])} without a CUDA graph"
    return Judgement(not missing, detail, len(missing))


def captured_sizes(config: Mapping[str, Any]) -> set[int]:
    """Batch sizes that Triton's tensorrt backend runs by a graph. A `graph_lower_bound` lets smaller batches run a
    larger graph. Without `graph_spec` the backend captures 1, the preferred sizes and the largest; without dynamic
    batching `DEFAULT_GRAPH_SIZES`."""
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


@tensor_fairness(
    "no preferred batch sizes without a TensorRT profile",
    "Preferred batch sizes have no TensorRT profile",
    "informs",
    "Remove preferred_batch_size, as Triton advises, unless each size has its own TensorRT profile.",
)
@per_model
def preferred_sizes(arm: ArmRecord, _: Facts) -> Judgement:
    if arm.model_config is None:
        return UNREPORTED
    sizes = listed(mapping(arm.model_config.get("dynamic_batching")).get("preferred_batch_size"))
    limit = arm.in_effect.get("max_batch_size")
    if not sizes or sizes == [limit]:  # Triton itself writes the largest batch into a configuration that has none
        return Judgement(True, "has no preferred batch sizes")
    profiles = max((len(listed(group.get("profile"))) for group in groups(arm.model_config)), default=0)
    beyond = [size for size in sizes if isinstance(limit, int) and (whole(size) or 0) > limit]
    text = _some([str(size) for size in sizes])
    ok = backend_of(arm) == "tensorrt" and profiles > 1 and not beyond
    detail = f"prefers batches of {text}, each with its own profile"
    if beyond:
        detail = f"prefers batches of {text}, which never form, because its maximum is {limit}"
    elif not ok:
        detail = f"prefers batches of {text}, so smaller ones wait for the whole queue delay"
    return Judgement(ok, detail, text)


@fairness(
    "threads fit the CPU cores",
    "Threads share CPU cores",
    "warns",
    "Use fewer --threads or instances: threads that share a core slow each other.",
)
@per_arm
def cores(arm: ArmRecord, facts: Facts) -> Judgement:
    """Compare threads times instances with the cores, on the CPU."""
    if str(arm.in_effect.get("device") or "").startswith("cuda") or kind_of(arm) == "KIND_GPU":
        return Judgement(True, "runs on a GPU", None, facts.cores)
    threads, instances = _number(arm.in_effect.get("threads")), _number(arm.in_effect.get("instances")) or 1
    if threads is None or facts.cores is None or not arm.launched:
        detail = "has an unknown number of threads or CPU cores"
        return Judgement(None, detail, None, facts.cores)
    asked = int(threads * instances)
    detail = f"uses {asked} threads ({threads:g} × {instances:g} instances) on {facts.cores} cores"
    return Judgement(asked <= facts.cores, detail, asked, facts.cores)


def _workloads(facts: Facts) -> Sequence[Workload]:
    return load_workloads(facts.run.experiment.workloads)


def _some(names: Sequence[str]) -> str:
    """The first few of a list."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _number(value: object) -> float | None:
    """Read a number, also from text, as in a configuration's parameters; None if it is not a number, or too large."""
    try:
        number = float(str(value))
    except ValueError:
        return None
    return number if abs(number) < _MOST_NUMBER else None


@check(
    "no arm is slower than its own server with that server's defaults",
    "An arm's own settings make it slow",
    "invalidates",
    "Remove these settings from the arm, or give --no-handicap-check to compare the arms as they are configured.",
    threshold="within the margin",
    fault="unfair configuration",
)
def handicap(facts: Facts) -> Iterator[Judgement]:
    """One outcome per workload in which an arm is slow, and one for each arm that is not slow or was not compared."""
    names = facts.names
    stored = facts.run.record_of(HandicapRecord)
    if stored is None:
        return
    slow = [load for load in facts.of(HandicapsFound).loads if load.slower]
    for workload in facts.run.experiment.workloads:
        like_it = [load for load in slow if _stands_for(load, workload)]
        if like_it:
            detail = "; ".join(f"{names[load.label]} {slow_words(load)}" for load in like_it)
            worst = max(load.ratio.ratio for load in like_it)
            yield Judgement(False, detail, round(worst, 4), scope=workload_scope(workload.name))
    for arm in stored.arms:
        if arm.label not in {load.label for load in slow}:
            yield _not_slow(
                names[arm.label], arm, [load for load in facts.of(HandicapsFound).loads if load.label == arm.label]
            )


def _stands_for(load: LoadHandicap, workload: Workload) -> bool:
    """Whether a load of the probe is like this workload: a start, one user, or several."""
    if not load.users or not workload.has_blocks:
        return not load.users and workload.scenario == "cold-start"
    return (load.users == 1) == (workload.concurrency == 1 and not workload.is_open)


def slow_words(load: LoadHandicap) -> str:
    """The end of a sentence about a slow arm: "is slowed by its own settings: …"."""
    at = "" if not load.users else " for one user" if load.users == 1 else f" for {load.users} users"
    plain = f"the same server without them {_plain_words(load, at)}"
    causes = ", ".join(
        f"{name} {ratio(part.ratio, (part.low, part.high))}" if len(load.explained_by) > 1 else name
        for name, part in load.explained_by
    )
    return f"is slowed by its own settings{f' ({causes})' if causes else ''}: {plain}"


def _plain_words(load: LoadHandicap, at: str = "") -> str:
    """How the plain server compares, after its name."""
    factor, bounds = ratio(load.ratio.ratio, _bounds(load)), f"({ratio_interval(_bounds(load))})"
    return f"has {factor} its throughput{at} {bounds}" if load.users else f"starts {factor} as fast {bounds}"


def _bounds(load: LoadHandicap) -> tuple[float, float]:
    return load.ratio.low, load.ratio.high


def _not_slow(name: str, arm: ArmTuning, loads: list[LoadHandicap]) -> Judgement:
    if arm.reason is not None:
        return Judgement(None, f"{name} {arm.reason}", scope=RUN, severity="informs")
    if not arm.settings:
        return Judgement(True, f"{name} has its server's own defaults", 1.0)
    loads = [load for load in loads if load.users]  # a few starts say little where they do not say that it is slow
    if not loads:
        return Judgement(None, f"{name} was not compared with its plain server")
    worst = max(loads, key=lambda load: load.ratio.ratio)
    detail = f"without {join(list(arm.settings))} {name} {_plain_words(worst)}"
    hidden = max(load.ratio.high for load in loads)
    return Judgement(True if hidden <= LARGEST_HIDDEN else None, detail, round(worst.ratio.ratio, 4))
