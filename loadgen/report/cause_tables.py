"""Why the arms differ, as rows of text: causes with the cells that show them, and what the servers executed."""

from __future__ import annotations

from loadgen.analysis.causes.ranking import CellCauses, percent
from loadgen.analysis.result import Result
from loadgen.quantities import number, share, signed_ms

CAUSE_HEADINGS = (
    "cause",
    "B − A",
    "95 % interval",
    "share",
    "arm",
    "what was changed",
    "as it is",
    "without",
    "shown by",
)
BATCH_HEADINGS = ("scenario", "arm", "items a request", "mean", "executed at once", "verdict")
MAX_SIZES = 6
NOTE = (
    "Each cause was taken away from one arm at a time, in blocks interleaved with those of the arm as it is; means a "
    "request. What a cause makes of the difference is what it costs B minus what it costs A. It counts where its "
    "interval excludes 0."
)


def cause_rows(causes: CellCauses) -> list[tuple[str, ...]]:
    """One row an effect, the causes in their order, then what is left over and the whole difference."""
    rows: list[tuple[str, ...]] = []
    for cause in causes.causes:
        head = (
            cause.title + ("" if cause.found or not cause.effects else " (within the noise)"),
            _ms(cause.b_minus_a_ms),
            _interval(cause.ci95_ms if cause.effects else None),
            percent(cause.share if cause.found else None),
        )
        for effect in cause.effects:
            times = (f"{number(effect.as_is_ms)} ms", f"{number(effect.without_ms)} ms")
            rows.append((*head, effect.label.upper(), effect.changed, *times, effect.folder))
            head = ("", "", "", "")
        for untested in cause.untested:
            words = "nothing to take away" if untested.moot else "not tested"
            rows.append((*head, untested.label.upper(), f"{words}: {untested.reason}", "–", "–", "–"))
            head = ("", "", "", "")
    rest = ("unattributed", _ms(causes.unattributed_ms), _interval(causes.unattributed_ci95_ms))
    rows.append((*rest, percent(causes.unattributed_share), "", "", "", "", ""))
    whole = ("the difference", _ms(causes.b_minus_a_ms), _interval(causes.ci95_ms), "100 %")
    rows.append((*whole, "", "", f"A {number(causes.a_ms)} ms", f"B {number(causes.b_ms)} ms", "blocks"))
    return rows


def causes_note(result: Result) -> str | None:
    """What a reader must know of how the causes were found, or that none were looked for."""
    if result.causes:
        note = NOTE
        if result.state is None or result.state.state != "finished":
            note += " The run ended before all causes were taken away."
        if result.causes_left_out:
            note += f" No time was left for {', '.join(result.causes_left_out)}: raise --explain-minutes."
        return note
    if result.explained_cells == ():
        return "No mean request times differ by more than the noise and ±δ, so no cause was looked for."
    if not result.stages:
        return None
    ended = "The run ended before causes were taken away. " if result.experiment.explain else ""
    return ended + (
        "These are the servers' own accounts of where time went, an inference: no cause was taken away to see what it "
        "makes of the difference. --explain does that (in the preset full it is on)."
    )


def batch_rows(result: Result) -> list[tuple[str, ...]]:
    """Every arm and cell, with the most frequent sizes of its executions."""
    rows: list[tuple[str, ...]] = []
    for found in result.batching:
        total = sum(found.executions.values())
        frequent = sorted(found.executions, key=lambda size: -found.executions[size])[:MAX_SIZES]
        shown = ", ".join(f"{size}: {share(found.executions[size] / total)}" for size in sorted(frequent))
        more = f", {len(found.executions) - len(frequent)} more sizes" if len(found.executions) > len(frequent) else ""
        mean = "–" if found.mean is None else number(found.mean)
        rows.append(
            (found.cell, found.label.upper(), str(found.request_items), mean, shown + more or "–", found.sentence)
        )
    return rows


def _ms(value: float | None) -> str:
    return "–" if value is None else signed_ms(value) if value else "0 ms"


def _interval(bounds: tuple[float, float] | None) -> str:
    return "–" if bounds is None else f"{signed_ms(bounds[0]).removesuffix(' ms')} to {signed_ms(bounds[1])}"
