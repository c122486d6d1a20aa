"""The basis of the figures: the checks, the worst first, those before the load, and the comparison of the answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from msgspec.structs import replace

import loadgen.report.document as doc
from loadgen.base.quantities import counted, share
from loadgen.checks.registry import CHECKS, reached
from loadgen.checks.run import parity as answers_agree
from loadgen.records.checks import Check
from loadgen.records.run import shown
from loadgen.report.charts import several
from loadgen.verdict.result import Result

WORDS: dict[doc.Style, str] = {
    "failed": "failed", "warning": "warning", "unknown": "not available", "note": "noted", "ok": "ok",
}  # fmt: skip
"""The states of checks, the worst first."""

_KINDS = {"labels": "equal values", "tensor": "numbers"}
"""How an output was compared, for readers, where the name of its kind does not say it."""


def style_of_check(check: Check) -> doc.Style:
    """The state of a check: failed where it takes a verdict away, also by not being available."""
    if check.ok:
        return "ok"
    if check.severity == "invalidates":
        return "failed"
    if check.ok is None:
        return "unknown"
    return "warning" if check.severity in ("warns", "roughens") else "note"


def standing_style(result: Result) -> doc.Style:
    """VALID, ROUGH or INVALID as a style."""
    return "ok" if result.valid else "warning" if result.rough else "failed"


def check_rows(result: Result) -> list[Check]:
    """One row per name and state, so that eight workloads do not fill a page; the worst come first. A row's scope and
    detail are those of all its checks."""
    groups: dict[tuple[str, doc.Style], list[Check]] = {}
    for check in reached(result.checks):
        groups.setdefault((check.name, style_of_check(check)), []).append(check)
    order = list(WORDS)
    rows = sorted(groups.items(), key=lambda row: order.index(row[0][1]))
    return [_merged(style, checks, len(result.experiment.arms)) for (_, style), checks in rows]


def counts(rows: Sequence[Check]) -> str:
    """ "1 failed, 2 warnings, 3 not available, 45 ok" """
    states = Counter(map(style_of_check, rows))
    numbers = {words: states[style] for style, words in WORDS.items()}
    return ", ".join(
        counted(number, words) if words == "warning" else f"{number} {words}"
        for words, number in numbers.items()
        if number
    )


def _merged(style: doc.Style, checks: Sequence[Check], arms: int) -> Check:
    first = max(checks, key=_badness) if style == "ok" else checks[0]
    scopes = [check.scope.removeprefix("workload ") for check in checks]
    one_scope, details = len(set(scopes)) == 1, dict.fromkeys(check.detail for check in checks)
    if one_scope and len(checks) <= arms:  # one check per arm
        detail = "; ".join(details)
    elif one_scope or (style == "ok" and len(details) == 1):
        detail = first.detail
    else:
        detail = f"{first.scope.removeprefix('workload ')}: {first.detail}"
    if one_scope:
        scope = "whole run" if scopes[0] in ("run", "plan") else scopes[0]
    else:
        scope = ", ".join(scopes) if len(scopes) <= 3 else f"{len(scopes)} scenarios"
    return replace(first, detail=detail, scope=scope)


def _badness(check: Check) -> float:
    """How bad a check is. Among checks that are ok, the one closest to its threshold comes first."""
    if not isinstance(check.value, int | float):
        return 0.0
    at_least = isinstance(check.threshold, int | float) and check.value > check.threshold
    return -float(check.value) if at_least else float(check.value)


def checks(result: Result) -> doc.Section | None:
    """A terminal shows the checks that need attention, a page all of them."""
    rows, shown_checks = check_rows(result), reached(result.checks)
    before = fairness_summary(shown_checks)
    left_out = len({check.name for check in result.checks} - {check.name for check in shown_checks})
    return doc.section(
        "Checks",
        doc.Text(f"{counts(rows)}." + (f" Before the load: {before}." if before else "")),
        doc.Text(f"The run did not get to {counted(left_out, 'more check')}." if left_out else ""),
        doc.Items(
            [
                doc.Item(row.detail, style_of_check(row), f"{row.title}, {row.scope}", (f"→ {row.remedy}",))
                for row in rows
                if not row.ok and row.severity != "informs"
            ],
            on=doc.TERMINAL,
        ),
        _table([row for row in rows if not row.ok]),
        doc.Fold(f"{sum(bool(row.ok) for row in rows)} checks are ok", (_table([row for row in rows if row.ok]),)),
        doc.Table(
            doc.names("name", "text"),
            [_case(check) for check in shown_checks],
            name="checks",
            outcomes=[_outcome(check) for check in shown_checks],
            on=doc.JUNIT,
        ),
    )


def _table(rows: Sequence[Check]) -> doc.Table:
    columns = (
        *doc.texts("check"),
        *doc.names("state"),
        *doc.texts("value"),
        *doc.names("covers", "threshold"),
        doc.Column("remedy", "text", below=True),
    )
    cells = []
    for row in rows:
        style, limit = style_of_check(row), row.threshold
        threshold = "" if limit is None else f"{limit:.4g}" if isinstance(limit, float) else str(limit)
        state = doc.Cell(WORDS[style], style)
        cells.append((row.title, state, row.detail, row.scope, threshold, "" if row.ok else row.remedy))
    return doc.Table(columns, cells, on=doc.PAGES)


def _case(check: Check) -> tuple[str, str]:
    name = check.name if check.scope == "run" else f"{check.name} [{check.scope}]"
    text = f"{check.title}: {check.detail}"
    if not check.ok:
        text = ("" if check.severity == "invalidates" else f"{check.severity}: ") + f"{text} → {check.remedy}"
    return name, text


def _outcome(check: Check) -> doc.RowOutcome:
    """A failure where it takes the verdict away; skipped where it is not available and only warns; else passed."""
    if not check.ok and check.severity == "invalidates":
        return ("failure", "unknown" if check.ok is None else "failed")
    return ("skipped" if check.ok is None else "passed"), "" if check.ok or check.severity != "roughens" else "rough"


def _before_load(checks: Sequence[Check]) -> list[Check]:
    """The checks made before the load; a stored result may name a check that no longer exists."""
    return [check for check in checks if check.name in CHECKS and CHECKS[check.name].before_load]


def fairness_summary(checks: Sequence[Check]) -> str | None:
    """ "14 checks passed, 2 warnings, 4 not available": counted by name, the worst arm decides; None without checks."""
    states: dict[str, list[bool | None]] = {}
    for check in _before_load(checks):
        states.setdefault(check.name, []).append(check.ok)
    if not states:
        return None
    warned = sum(False in oks for oks in states.values())
    unknown = sum(False not in oks and None in oks for oks in states.values())
    words = [f"{counted(len(states) - warned - unknown, 'check')} passed", counted(warned, "warning")]
    return ", ".join([*words, *([f"{unknown} not available"] if unknown else [])])


def fairness_lines(checks: Sequence[Check]) -> list[str]:
    """Each check before the load that did not pass, with its remedy."""
    return [f"{check.title}: {check.detail} → {check.remedy}" for check in _before_load(checks) if check.ok is False]


_AGAINST = {
    "reference": "{arm} against {base}",
    "alone": "mixed batch against single",
    "recorded": "{arm} against recorded",
}


def same_answers(result: Result) -> doc.Section | None:
    """How far the arms' answers to the same inputs agree."""
    parity = result.parity
    if not any(check.name == answers_agree.name for check in reached(result.checks)):
        return None
    if parity is None or not parity.cases:
        error = f": {parity.error}" if parity is not None and parity.error else ""
        return doc.section("Same answers", doc.Text(f"The answers were not compared{error}."), on=doc.PAGES)
    if parity.tolerance_relative is None:
        limit = f"Least cosine: {parity.threshold_cosine}."
    else:
        limit = (
            f"Tolerance of the relative error ({parity.precision}): {parity.tolerance_relative:.1e}, of one element "
            f"{parity.tolerance_element:.1e}."
        )
    if parity.kinds:
        limit += f" Outputs: {', '.join(f'{name} ({_KINDS.get(kind, kind)})' for name, kind in parity.kinds.items())}."
    base = shown(result.experiment.baseline.label)
    rows: list[tuple[doc.Value, ...]] = [
        (
            case.name,
            _AGAINST[case.kind].format(arm=shown(case.label), base=base),
            str(case.images),
            "–" if case.relative_max is None else f"{case.relative_max:.1e}",
            f"{case.max_abs:.2g}",
            f"{case.cosine_min:.6f}",
            *("" if value is None else share(value, 3) for value in (case.top1, case.top5)),
            doc.Cell("ok", "ok") if case.ok else doc.Cell("failed", "failed"),
            "" if case.fault is None else f"output {case.output} {case.fault}",
        )
        for case in parity.cases
    ]
    figures = doc.numbers("items", "largest relative error", "largest difference", "lowest cosine", "top-1", "top-5")
    return doc.section(
        "Same answers",
        doc.Table((*doc.names("case", "kind"), *figures, *doc.names(""), doc.Column("why", "text", below=True)), rows),
        doc.Text(f"Answers of {'all' if several(result) else 'both'} arms to the same inputs. {limit}", "note"),
        on=doc.PAGES,
    )
