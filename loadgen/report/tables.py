"""What the reports show, as rows of text: every format renders the same words and the same digits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loadgen.analysis.claims import figure
from loadgen.analysis.comparisons import METRICS, Comparison
from loadgen.analysis.result import Result
from loadgen.evidence.devices import own_devices, used_gpu
from loadgen.quantities import measured, ratio, ratio_interval, share
from loadgen.records.experiment import setting_key
from loadgen.records.run import ArmRecord

VERDICT_WORDS = {
    "a_faster": "A faster",
    "b_faster": "B faster",
    "equivalent": "equivalent",
    "undecided": "undecided",
    "invalid": "invalid",
}


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """One comparison. `comparison` is kept for whoever needs the numbers."""

    scenario: str
    metric: str
    unit: str
    a: str
    b: str
    """In `unit`."""
    ratio: str
    interval: str
    verdict: str
    pairs: int
    detectable: str
    comparison: Comparison


def titles(result: Result) -> dict[str, str]:
    """The arms by label, for people."""
    names = {"a": result.experiment.a.target, "b": result.experiment.b.target}
    return names | {arm.label: arm.title for arm in result.arms}


def footing(result: Result) -> str:
    """What the intervals stand on: how the run ended, and the noise floor of the machine."""
    parts = [result.noise_floor_sentence]
    if result.stopping is not None:
        told_before = result.stopping.sentence in result.verdict.caveats
        parts = ["" if told_before else result.stopping.sentence, result.stopping.coverage, *parts]
    return " ".join(part for part in parts if part)


def comparison_rows(result: Result, *, measured_only: bool = False) -> list[ComparisonRow]:
    """In the order of the experiment; `measured_only` leaves out what could not be measured at all."""
    return [
        ComparisonRow(
            scenario=c.scenario,
            metric=METRICS[c.metric].title,
            unit=c.unit,
            a=figure(c, result.summaries, "a"),
            b=figure(c, result.summaries, "b"),
            ratio=ratio(c.ratio_b_over_a, c.ci95),
            interval=ratio_interval(c.ci95),
            verdict=VERDICT_WORDS[c.verdict],
            pairs=c.pairs,
            detectable=share(c.minimal_detectable_effect),
            comparison=c,
        )
        for c in result.comparisons
        if c.ratio_b_over_a is not None or not measured_only
    ]


def summary_rows(result: Result) -> list[tuple[str, ...]]:
    """(scenario, arm, requests, errors, images/s, mean, p50, p90, p99, executed batch, bytes of a request and of
    its answer on the wire, server cores, generator CPU)."""
    return [
        (
            s.cell,
            s.label.upper(),
            f"{s.requests:,}",
            f"{s.errors:,}",
            measured(s.throughput_per_s, s.throughput_ci95),
            *(
                measured(value, None)
                for value in (s.latency.mean_ms, s.latency.p50_ms, s.latency.p90_ms, s.latency.p99_ms)
            ),
            measured(s.executed_batch_mean, None),
            *("–" if size is None else f"{size:,.0f}" for size in (s.request_bytes, s.response_bytes)),
            measured(s.server_cpu_cores, None),
            share(s.generator_cpu_share_max),
        )
        for s in result.summaries
        if s.requests
    ]


SUMMARY_HEADINGS = (
    "scenario",
    "arm",
    "requests",
    "errors",
    "images/s",
    "mean ms",
    "p50 ms",
    "p90 ms",
    "p99 ms",
    "executed batch",
    "bytes sent",
    "bytes back",
    "server cores",
    "generator CPU",
)


def arm_rows(result: Result) -> list[tuple[str, str, str, str, str]]:
    """(setting, A as asked for, A in effect, B as asked for, B in effect)."""
    arms = {arm.label: arm for arm in result.arms}
    a, b = arms.get("a"), arms.get("b")
    wanted = [dict(result.experiment.a.settings), dict(result.experiment.b.settings)]
    for index, arm in enumerate((a, b)):
        wanted[index] |= arm.settings if arm else {}
    asked = [{setting_key(name): value for name, value in settings.items()} for settings in wanted]
    effect = [_in_effect(arm) | _sent(result, arm) for arm in (a, b)]
    names = list(dict.fromkeys([*effect[0], *effect[1], *asked[0], *asked[1]]))
    return [
        (
            name.replace("_", " "),
            asked[0].get(name, "–"),
            effect[0].get(name, "–"),
            asked[1].get(name, "–"),
            effect[1].get(name, "–"),
        )
        for name in names
    ]


def _in_effect(arm: ArmRecord | None) -> dict[str, str]:
    if arm is None:
        return {}
    server = " ".join(part for part in (arm.server_name, arm.server_version) if part)
    shown = {"target": arm.target, "url": arm.url, "server": server or "–"}
    shown |= {name: str(value) for name, value in arm.in_effect.items()}
    if arm.artefact and "sha256" in arm.artefact:
        shown["artefact_sha256"] = str(arm.artefact["sha256"])[:16] + "…"
    return shown


def _sent(result: Result, arm: ArmRecord | None) -> dict[str, str]:
    """What an arm was sent, with the bytes of the smallest request's tensors."""
    if arm is None:
        return {}
    experiment = result.experiment
    request = experiment.a if arm.label == "a" else experiment.b
    shown = {"payload": experiment.payload_of(request), "transport": experiment.transport}
    sizes = [s.payload_bytes for s in result.summaries if s.label == arm.label and s.payload_bytes is not None]
    if sizes:
        way = "through shared memory" if experiment.transport == "shm" else "over the wire"
        shown["payload_bytes"] = f"{min(sizes):,.0f} a request {way}"
    return shown


def environment_rows(result: Result) -> list[tuple[str, str]]:
    """Host, GPU and packages."""
    environment = result.environment
    if environment is None:
        return []
    rows = [("started", environment.started_at), ("commit", environment.git_commit or "–")]
    for name, value in environment.host.items():
        if value is None:
            continue
        if name.endswith("_bytes") and isinstance(value, int | float):
            rows.append((name.removesuffix("_bytes").replace("_", " "), f"{value / 2**30:.1f} GiB"))
        else:
            rows.append((name.replace("_", " "), str(value)))
    rows.append(("GPU", gpu_text(environment.gpu)))
    rows += sorted(environment.packages.items())
    return rows


def gpu_text(document: Mapping[str, Any]) -> str:
    """The GPU that the servers use, and of how many; the driver's status where none is told."""
    used = used_gpu(document)
    own = own_devices(document, () if used is None else (used,))
    if used is None or [device.get("uuid") for device in own] != [used]:
        return str(document.get("status", "unknown")).replace("_", " ")
    return f"{own[0].get('name') or 'GPU'} {used}, 1 of {len(own_devices(document, ()))}"


def experiment_rows(result: Result) -> list[tuple[str, str]]:
    """What was asked for, beside the arms."""
    e = result.experiment
    stack = [("deployment", f"the compose stack {e.compose_project}, with its own settings")]
    return [
        *(stack if e.deployment == "compose" else []),
        ("model", e.model),
        ("weights", e.weights),
        ("payload", ", ".join(dict.fromkeys(e.payload_of(arm) for arm in (e.a, e.b)))),
        ("transport", e.transport),
        ("preset", e.preset),
        ("equivalence margin δ", f"± {share(e.equivalence_margin)}"),
        ("order of the blocks", f"interleaved pairs, seed {e.seed}"),
        ("threads", (str(e.threads) if e.threads else "all cores") if e.deployment == "embedded" else e.weights),
        *([("load generator", f"{e.processes} processes")] if e.processes > 1 else []),
        *([("settings", f"experiment.yaml, sha256 {e.settings_sha256}")] if e.settings_sha256 else []),
    ]
