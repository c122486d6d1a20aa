"""The first screen: whether the run is valid, who wins, why, and what stands behind it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import loadgen.report.document as doc
from loadgen.comparison.comparisons import Comparison, leading_comparisons
from loadgen.quantities import ratio, ratio_interval, sentence, share
from loadgen.records.run import shown
from loadgen.report.charts import arm_style, base_and_arm, several, titles
from loadgen.report.sections.checks import CheckRow, check_rows, counts
from loadgen.report.sections.comparisons import (
    advantage,
    against_baseline,
    comparison_cells,
    comparison_columns,
    reach,
    threshold_sentence,
    verdict_style,
)
from loadgen.result.checks.gpu import gpu_present
from loadgen.result.checks.run import parity_figures
from loadgen.result.result_file import Result
from loadgen.studies.gpu_proof.sections import ALL_SCENARIOS, findings

LEAST_SPAN = math.log(1.1)
MOST_FAILED = 4
"""Failed checks beside the verdict on a terminal; all of them are in their own section."""
MOST_TITLES = 3


def caveats(result: Result) -> doc.Section | None:
    """What a reader must know before the verdict; a page has all but the missing GPU below it."""
    about_gpu = _about_gpu(result)
    elsewhere = doc.TERMINAL | doc.MARKDOWN
    return doc.section(
        "", *(doc.Text(one, "warning", doc.READ if one in about_gpu else elsewhere) for one in result.verdict.caveats)
    )


def verdict(result: Result) -> doc.Section | None:
    """Valid or not, what was found, the arms, and every check that takes the verdict away."""
    found = result.verdict
    about_gpu = _about_gpu(result)
    failed = [doc.Item(text, "failed") for text in found.failed]
    few = failed[:MOST_FAILED]
    if more := len(failed) - len(few):
        few.append(doc.Item(f"and {more} more failed checks, below", "failed"))
    broken = None if all(one.state == "kept" for one in result.thresholds) else threshold_sentence(result)
    return doc.section(
        "",
        doc.Panel(
            "VALID" if found.valid else "INVALID",
            "ok" if found.valid else "failed",
            found.sentence,
            (
                doc.Items(
                    [doc.Item(name, arm_style(result, label), shown(label)) for label, name in titles(result).items()]
                ),
                doc.Text("Why there is no verdict:" if failed else "", on=doc.MARKDOWN),
                doc.Items(few, on=doc.TERMINAL),
                doc.Items(failed, on=doc.PAGES),
                doc.Text(broken or "", "failed", on=doc.HTML),
                doc.Items([doc.Item(one, "note") for one in found.caveats if one not in about_gpu], on=doc.HTML),
            ),
        ),
    )


def _about_gpu(result: Result) -> list[str]:
    """The caveats that the check of the GPU makes."""
    return [sentence(check.detail) for check in result.checks if check.name == gpu_present.name]


def overview(result: Result) -> doc.Section | None:
    """The leading comparison of each scenario and arm with the baseline, its interval drawn."""
    leading = [one for one in leading_comparisons(against_baseline(result)) if one.ratio is not None]
    span = max((reach(one, LEAST_SPAN) for one in leading), default=LEAST_SPAN)
    margin = result.experiment.equivalence_margin
    rows = []
    for one in leading:
        *figures, words = comparison_cells(result, one)
        rows.append((*figures, _strip(result, one, span, math.log1p(margin)), words))
    edge = f"{math.exp(span):.2f}×"
    *columns, verdict_column = comparison_columns(result, roomy=True)
    base, arm = base_and_arm(result)
    return doc.section(
        "Overview",
        doc.Table(
            (*columns, *doc.names(f"{base} {edge} ← 1 → {arm.removeprefix('the ')} {edge}"), verdict_column),
            rows,
            grouped=True,
        ),
        doc.Text(
            f"The leading metric of each scenario; right of the line {arm} is better, left of it {base}, by the "
            f"factors above; inside the shaded band (±{share(margin)}) they are equivalent.",
            "note",
        )
        if rows
        else None,
        doc.Link("Every comparison", "#comparisons") if rows else None,
        on=doc.HTML,
    )


def _strip(result: Result, one: Comparison, span: float, margin: float) -> doc.Strip:
    value, interval = advantage(one)
    low, high = (None, None) if interval is None else (_place(math.log(bound), span) for bound in interval)
    return doc.Strip(
        _place(math.log(value), span),
        low,
        high,
        (_place(-margin, span), _place(margin, span)),
        verdict_style(result, one.verdict, one.pairing),
        f"{shown(one.arm)}/{shown(one.baseline)} {ratio(one.ratio, one.ci95)}, "
        f"95 % interval {ratio_interval(one.ci95)}",
    )


def _place(log_ratio: float, span: float) -> float:
    return min(max(log_ratio / span, -1.0), 1.0)


def brief_why(result: Result) -> doc.Section | None:
    """The reasons in the most loaded scenario."""
    main = result.verdict.main_scenario
    found = [one for one in result.verdict.scenarios if one.scenario == main and one.reasons]
    if not found:
        blocks: list[doc.Block] = [doc.Text("Nothing was measured that explains a difference.")]
    else:
        blocks = [doc.Text(f"In {main}:", "note")]
        for one in found:
            if several(result):
                which = f"{shown(one.arm)} against {shown(one.baseline)}"
                blocks.append(doc.Items([doc.Item("", arm_style(result, one.arm), which, one.reasons)]))
            else:
                blocks += map(doc.Text, one.reasons)
        blocks.append(doc.Link("The causes, and the other scenarios", "#why"))
    return doc.section("Why", *blocks, on=doc.HTML, half=True)


def brief_proof(result: Result) -> doc.Section | None:
    """What stands behind the figures, or does not, in a line each."""
    return doc.section(
        "Proof", doc.Items(proof(result)), doc.Link("Every check and finding", "#proof"), on=doc.HTML, half=True
    )


def proof(result: Result) -> list[doc.Item]:
    """Same answers, where the arms ran, the requests, the checks, the thresholds."""
    items = [_parity(result), *_devices(result)]
    requests = sum(summary.requests for summary in result.summaries)
    errors = sum(summary.errors for summary in result.summaries)
    if requests:
        items.append(_item("failed" if errors else "ok", f"{errors:,} of {requests:,} requests failed"))
    items += _checks(result)
    if text := threshold_sentence(result):
        kept = all(one.state == "kept" for one in result.thresholds)
        items.append(_item("ok" if kept else "failed", text))
    return items


def _item(style: doc.Style, text: str) -> doc.Item:
    return doc.Item(sentence(text), style)


def _parity(result: Result) -> doc.Item:
    parity = result.parity
    if parity is None or not parity.cases:
        return _item("unknown", f"whether {_all(result)} arms give the same answers was not measured")
    text = f"{parity_figures(parity)} in {len(parity.cases)} cases"
    if parity.ok:
        return _item("ok", f"{_all(result)} arms give the same answers: {text}")
    return _item("failed", f"different answers: {text}")


def _all(result: Result) -> str:
    return "all" if several(result) else "both"


def _devices(result: Result) -> list[doc.Item]:
    whole = [one for one in findings(result) if one.scenario == ALL_SCENARIOS]
    if whole:
        return [_item(one.style, f"where {one.arm} ran, all scenarios together: {one.words}") for one in whole]
    present = next((check for check in result.checks if check.name == gpu_present.name), None)
    if present is None or present.ok:
        return []
    return [_item("note" if present.ok is False else "unknown", present.detail)]


def _checks(result: Result) -> list[doc.Item]:
    rows = check_rows(result)
    failed = [row for row in rows if row.style == "failed"]
    warned = [row for row in rows if row.style == "warning"]
    items = []
    if failed:
        items.append(_item("failed", f"no verdict, or not on all, because of: {_titles(failed)}"))
    if warned:
        items.append(_item("warning", f"to be read with care because of: {_titles(warned)}"))
    return [*items, _item("note" if failed else "ok", f"{len(rows)} checks: {counts(rows)}")]


def _titles(rows: Sequence[CheckRow]) -> str:
    named = "; ".join(f"“{row.title}”" for row in rows[:MOST_TITLES])
    return named + (f" and {len(rows) - MOST_TITLES} more" if len(rows) > MOST_TITLES else "")
