"""What stands behind the figures: the checks, the worst first, those before the load, and the same answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import loadgen.report.document as doc
from loadgen.records.run import shown
from loadgen.report.charts import several
from loadgen.result.checks.registry import CHECKS, Check
from loadgen.result.result_file import Result

WORDS: dict[doc.Style, str] = {
    "ok": "ok", "failed": "failed", "warning": "warn", "unknown": "unknown", "note": "only noted",
}  # fmt: skip
ORDER: tuple[doc.Style, ...] = ("failed", "warning", "unknown", "note", "ok")


@dataclass(frozen=True, slots=True)
class CheckRow:
    """All checks of one name that came out alike, or one of them."""

    title: str
    style: doc.Style
    detail: str
    scope: str
    threshold: str
    remedy: str
    severity: str


def style_of_check(check: Check) -> doc.Style:
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
    groups: dict[tuple[str, doc.Style], list[Check]] = {}
    for check in result.checks:
        groups.setdefault((check.name, style_of_check(check)), []).append(check)
    arms = len(result.experiment.arms)
    rows = [_check_row(style, checks, arms) for (_, style), checks in groups.items()]
    return sorted(rows, key=lambda row: ORDER.index(row.style))


def counts(rows: Sequence[CheckRow]) -> str:
    """ "45 ok, 3 unknown, 6 only noted" """
    found = {style: sum(1 for row in rows if row.style == style) for style in WORDS}
    return ", ".join(f"{number} {WORDS[style]}" for style, number in found.items() if number)


def _check_row(style: doc.Style, checks: Sequence[Check], arms: int) -> CheckRow:
    first = max(checks, key=_badness) if style == "ok" else checks[0]
    scopes = [check.scope.removeprefix("cell ") for check in checks]
    alike = len(set(scopes)) == 1 or (style == "ok" and len({check.detail for check in checks}) == 1)
    several = "" if alike else f"{first.scope.removeprefix('cell ')}: "
    by_arm = len(set(scopes)) == 1 and len(checks) <= arms
    detail = "; ".join(dict.fromkeys(check.detail for check in checks)) if by_arm else first.detail
    cells = {"run": "whole run", "plan": "whole run"}.get(scopes[0], scopes[0]) if len(set(scopes)) == 1 else None
    threshold = first.threshold
    return CheckRow(
        title=first.title,
        style=style,
        detail=several + detail,
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


def checks(result: Result) -> doc.Section | None:
    """A terminal shows those that someone must look at, a page all of them."""
    rows = check_rows(result)
    good = [row for row in rows if row.style == "ok"]
    urgent = [
        row
        for row in rows
        if row.style in ("failed", "warning") or (row.style == "unknown" and row.severity != "informs")
    ]
    fairness = fairness_summary(result.checks)
    return doc.section(
        "Checks",
        doc.Text(f"{counts(rows)}." + (f" Before the load: {fairness}." if fairness else "")),
        doc.Items(
            [doc.Item(row.detail, row.style, f"{row.title}, {row.scope}", (f"→ {row.remedy}",)) for row in urgent],
            on=doc.TERMINAL,
        ),
        _table([row for row in rows if row.style != "ok"]),
        doc.Fold(f"{len(good)} checks are ok", (_table(good),)),
        doc.Table(
            doc.names("name", "text"),
            [_case(check) for check in result.checks],
            name="checks",
            outcomes=[_outcome(check) for check in result.checks],
            on=doc.JUNIT,
        ),
    )


def _table(rows: Sequence[CheckRow]) -> doc.Table:
    return doc.Table(
        (
            *doc.texts("check"),
            *doc.names("state"),
            *doc.texts("value"),
            *doc.names("covers", "threshold"),
            doc.Column("remedy", "text", below=True),
        ),
        [
            (
                row.title,
                doc.Cell(row.style, row.style),
                row.detail,
                row.scope,
                row.threshold,
                "" if row.style == "ok" else row.remedy,
            )
            for row in rows
        ],
        on=doc.PAGES,
    )


def _case(check: Check) -> tuple[str, str]:
    name = check.name if check.scope == "run" else f"{check.name} [{check.scope}]"
    text = f"{check.title}: {check.detail}"
    if not check.ok:
        text = ("" if check.severity == "invalidates" else f"{check.severity}: ") + f"{text} → {check.remedy}"
    return name, text


def _outcome(check: Check) -> doc.Outcome:
    """A failure where it takes the verdict away; skipped where it is unknown and only warns; else passed."""
    if not check.ok and check.severity == "invalidates":
        return doc.Outcome("failure", "unknown" if check.ok is None else "failed")
    return doc.Outcome("skipped" if check.ok is None else "passed")


def _before_load(check: Check) -> bool:
    """Whether it was made before the load; a stored result may name a check that is declared no more."""
    definition = CHECKS.get(check.name)
    return definition is not None and definition.before_load


def fairness_summary(found: Sequence[Check]) -> str | None:
    """ "14 fairness checks passed, 2 need a look": counted by name, an arm that needs a look outweighing one that does
    not; None where nothing was checked before the load."""
    states: dict[str, list[bool | None]] = {}
    for check in found:
        if _before_load(check):
            states.setdefault(check.name, []).append(check.ok)
    if not states:
        return None
    look = sum(1 for oks in states.values() if False in oks)
    unknown = sum(1 for oks in states.values() if False not in oks and None in oks)
    passed = len(states) - look - unknown
    words = f"{passed} fairness check{'' if passed == 1 else 's'} passed, {look} need{'s' if look == 1 else ''} a look"
    return words + (f", {unknown} could not be made" if unknown else "")


def fairness_lines(found: Sequence[Check]) -> list[str]:
    """Each check before the load that needs a look, with its remedy."""
    return [
        f"{check.title}? {check.detail} → {check.remedy}"
        for check in found
        if _before_load(check) and check.ok is False
    ]


def same_answers(result: Result) -> doc.Section | None:
    """What the arms answered to the same images."""
    parity = result.parity
    if parity is None or not parity.cases:
        error = f": {parity.error}" if parity is not None and parity.error else ""
        return doc.section("Same answers", doc.Text(f"Parity was not measured{error}."), on=doc.PAGES)
    if parity.tolerance_relative is None:
        limit = f"Least cosine: {parity.threshold_cosine}."
    else:
        limit = (
            f"Tolerance of the relative error ({parity.precision}): {parity.tolerance_relative:.1e}, of one element "
            f"{parity.tolerance_element:.1e}."
        )
    base = shown(result.experiment.baseline.label)
    return doc.section(
        "Same answers",
        doc.Table(
            (
                *doc.names("case", "kind"),
                *doc.numbers("images", "largest relative error", "largest difference", "lowest cosine"),
                *doc.names(""),
            ),
            [
                (
                    case.name,
                    f"{shown(case.label)} against {base}" if case.kind == "reference" else "mixed batch against single",
                    str(case.images),
                    "–" if case.relative_max is None else f"{case.relative_max:.1e}",
                    f"{case.max_abs:.2g}",
                    f"{case.cosine_min:.6f}",
                    doc.Cell("ok", "ok") if case.ok else doc.Cell("failed", "failed"),
                )
                for case in parity.cases
            ],
        ),
        doc.Text(f"Answers of {'all' if several(result) else 'both'} arms to the same images. {limit}", "note"),
        on=doc.PAGES,
    )
