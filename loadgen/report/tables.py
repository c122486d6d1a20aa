"""What the reports show, as rows of text: every format renders the same words and the same digits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from loadgen.checks import Check
from loadgen.comparisons import METRICS, Comparison
from loadgen.quantities import measured, ratio, ratio_interval, share
from loadgen.records import ArmRecord
from loadgen.result import Result
from loadgen.stages import STAGES, TITLES
from loadgen.verdict import figure

VERDICT_WORDS = {
    "a_faster": "A faster",
    "b_faster": "B faster",
    "equivalent": "equivalent",
    "undecided": "undecided",
    "invalid": "invalid",
}
CheckState = Literal["failed", "warning", "unknown", "note", "ok"]
FOLDED = "folded"
FOLDED_NOTE = (
    "folded: only one arm reports this stage, so its time is counted where the other arm keeps it: decoding under "
    "preparing the batch, receiving and encoding under what is outside "
    "the server's account (network, protocol, client)."
)
STATE_ORDER: tuple[CheckState, ...] = ("failed", "warning", "unknown", "note", "ok")


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


@dataclass(frozen=True, slots=True)
class CheckRow:
    """All checks of one name that came out alike, or one of them."""

    title: str
    state: CheckState
    detail: str
    scope: str
    threshold: str
    remedy: str
    severity: str


def titles(result: Result) -> dict[str, str]:
    """The arms by label, for people."""
    names = {"a": result.experiment.a.target, "b": result.experiment.b.target}
    return names | {arm.label: arm.title for arm in result.arms}


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


def state_of(check: Check) -> CheckState:
    """How a check is shown: failed where it takes a verdict away, also by being unknown."""
    if check.ok:
        return "ok"
    if check.severity == "invalidates":
        return "failed"
    if check.ok is None:
        return "unknown"
    return "warning" if check.severity == "warns" else "note"


def check_rows(result: Result) -> list[CheckRow]:
    """Checks of one name and state become one row, so that eight cells do not fill a page; the worst come first."""
    groups: dict[tuple[str, CheckState], list[Check]] = {}
    for check in result.checks:
        groups.setdefault((check.name, state_of(check)), []).append(check)
    rows = [_check_row(state, checks) for (_, state), checks in groups.items()]
    return sorted(rows, key=lambda row: STATE_ORDER.index(row.state))


def _check_row(state: CheckState, checks: Sequence[Check]) -> CheckRow:
    first = max(checks, key=_badness) if state == "ok" else checks[0]
    scopes = [check.scope.removeprefix("cell ") for check in checks]
    several = "" if len(scopes) == 1 or state == "ok" else f"{scopes[0]}: "
    cells = {"run": "whole run", "plan": "whole run"}.get(scopes[0], scopes[0]) if len(set(scopes)) == 1 else None
    threshold = first.threshold
    return CheckRow(
        title=first.title,
        state=state,
        detail=several + first.detail,
        scope=cells or (", ".join(scopes) if len(scopes) <= 3 else f"{len(scopes)} scenarios"),
        threshold="" if threshold is None else f"{threshold:.4g}" if isinstance(threshold, float) else str(threshold),
        remedy=first.remedy,
        severity=first.severity,
    )


def _badness(check: Check) -> float:
    """For checks that are ok: the one closest to its threshold says most."""
    if not isinstance(check.value, int | float):
        return 0.0
    at_least = isinstance(check.threshold, int | float) and check.value > check.threshold
    return -float(check.value) if at_least else float(check.value)


def stage_rows(result: Result, cell: str) -> list[tuple[str, ...]]:
    """(stage, A, B, B − A, share of the difference) with the total last; empty where no arm reports stages."""
    account = next((account for account in result.stages if account.cell == cell), None)
    if account is None or (account.a is None and account.b is None):
        return []
    differences = {d.stage: d for d in account.differences}
    arms = [arm for arm in (account.a, account.b) if arm]
    decimals = max(0, 3 - math.floor(math.log10(max(arm.client_total_ms for arm in arms))))
    rows: list[tuple[str, ...]] = []
    for stage in STAGES:
        values = [arm.stages_ms[stage] if arm else None for arm in (account.a, account.b)]
        if values == [None, None]:
            continue
        difference = differences.get(stage)
        rows.append(
            (
                f"{TITLES[stage]} ({stage})",
                *("–" if value is None else f"{value:.{decimals}f} ms" for value in values),
                _signed(difference.b_minus_a_ms, decimals) if difference else FOLDED if differences else "–",
                _signed_share(difference.share) if difference else "–",
            )
        )
    totals = [f"{arm.client_total_ms:.{decimals}f} ms" if arm else "–" for arm in (account.a, account.b)]
    total = account.total_b_minus_a_ms
    shares = ("–", "–") if total is None else (_signed(total, decimals), "100 %")
    rows.append(("client total", *totals, *shares))
    return rows


def _signed(value: float, decimals: int) -> str:
    return f"{'+' if value >= 0 else '−'}{abs(value):.{decimals}f} ms"


def _signed_share(value: float | None) -> str:
    if value is None:
        return "–"
    return share(value) if value >= 0 else f"−{share(-value)}"


def summary_rows(result: Result) -> list[tuple[str, ...]]:
    """(scenario, arm, requests, errors, images/s, mean, p50, p90, p99, executed batch, server cores, generator CPU)."""
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
    asked = [{name.lstrip("-").replace("-", "_"): value for name, value in settings.items()} for settings in wanted]
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
    rows.append(("GPU", str(environment.gpu.get("status", "unknown")).replace("_", " ")))
    rows += sorted(environment.packages.items())
    return rows


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
        ("threads", str(e.threads) if e.deployment == "embedded" else e.weights),
    ]
