"""The tables of an engine matrix."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import loadgen.report.document as doc
from loadgen.engine_matrix.break_even import path_of
from loadgen.engine_matrix.cells import engine_mode, has_copies
from loadgen.engine_matrix.charts import Scope, View, latency_ms, scope_of, scope_title, shown_length, title_of, views
from loadgen.engine_matrix.questions import times
from loadgen.engine_matrix.records import (
    BreakEven,
    CellResult,
    Configuration,
    ConfigurationResult,
    Estimate,
    Matrix,
    Winner,
)
from loadgen.quantities import counted, measured, measured_interval, number, ratio, share

MANY = 5
"""Kernels shown per configuration."""
GPU_TIMES = ("whole call, ms", "sustained, ms")
FULL_CELLS = 40
"""Cells up to which Markdown has all of them; beyond that cells.csv has them."""


def speedup(found: Estimate | None) -> str:
    """A ratio with its interval, or "" """
    return "" if found is None else times(found)


def value(found: Estimate | None, scale: float = 1.0) -> str:
    """A value with the digits that its interval supports, or "" """
    if found is None:
        return ""
    limits = found.interval
    return measured(found.value * scale, None if limits is None else (limits[0] * scale, limits[1] * scale))


def shape_text(batch: int, length: int | None) -> str:
    """batch 8, length 128"""
    return f"batch {batch}" + ("" if length is None else f", length {length}")


def _doubt(matrix: Matrix, winner: Winner) -> str:
    if winner.unbeaten in (None, winner.runner_up):
        return "not certain"
    return f"not certain over {title_of(matrix.plan.configurations[winner.unbeaten])}"


def winners_table(matrix: Matrix) -> doc.Section | None:
    """The winner of every batch size and length."""
    configurations = matrix.plan.configurations
    cells = {(one.configuration, one.batch, one.length): one for one in matrix.cells}
    own = [cells[one.configuration, one.batch, one.length] for one in matrix.winners]
    rows = [
        (
            scope_title(matrix, Scope(one.model, one.device, one.threads)),
            one.batch,
            "" if one.length is None else one.length,
            title_of(configurations[one.configuration]),
            value(cell.items_per_second),
            latency_text(one.device, cell),
            doc.Cell(speedup(one.ratio), short="" if one.ratio is None else ratio(one.ratio.value, one.ratio.interval)),
            "" if one.runner_up is None else title_of(configurations[one.runner_up]),
            doc.Cell("certain", "ok") if one.certain else doc.Cell(_doubt(matrix, one), "unknown", short="?"),
        )
        for one, cell in zip(matrix.winners, own, strict=True)
    ]
    columns = (
        doc.Column("model"),
        doc.Column("batch", "number"),
        doc.Column("length", "number"),
        doc.Column("fastest"),
        *doc.numbers("items/s", "latency, ms"),
        doc.Column("over the runner-up", "number"),
        doc.Column("runner-up", on=doc.PAGES),
        doc.Column("", on=doc.PAGES),
    )
    caption = (
        "Ratio of throughputs, paired by round, with its 95 % interval. Certain: faster than every other ranked "
        "configuration, with a chance of at most 5 % of one false winner in the whole table (Holm). Not certain: it "
        "may not beat the runner-up, or the one that is named, whose time may vary from round to round."
    )
    return doc.section(
        "The fastest configurations",
        doc.Fold(f"All {len(rows)} winners", (doc.Table(columns, rows, caption=caption, grouped=True),))
        if len(rows) > FULL_CELLS
        else doc.Table(columns, rows, caption=caption, grouped=True, on=doc.PAGES),
        on=doc.PAGES,
    )


def break_even_table(matrix: Matrix) -> doc.Section | None:
    """After how many items each conversion has paid: at one shape per model in a table, at all of them folded."""
    configurations = matrix.plan.configurations
    shown, folds = [], []
    for view in views(matrix):
        own = [one for one in matrix.break_even if scope_of(configurations[one.configuration]) == view.scope]
        if not own:
            continue
        length, batch = shown_length(view.cells), max(one.batch for one in view.cells)
        main = [_break_even_row(matrix, one) for one in own if (one.batch, one.length) == (batch, length)]
        title = f"{view.label}, {shape_text(batch, length)}"
        shown.append(doc.Table(PAYS, main, title=title, grouped=True, on=doc.PAGES))
        shapes = [(*_break_even_row(matrix, one), one.batch, one.length or "") for one in own]
        table = doc.Table((*PAYS, *doc.numbers("batch", "length")), shapes, grouped=True)
        folds.append(doc.Fold(f"{view.label}: every batch and length", (table,), on=doc.HTML))
    kept = ", in which the start, measured once, has no share" if matrix.plan.processes == "kept" else ""
    text = (
        f"Over {matrix.plan.baseline} with the same threads, in the same precision where it was measured, or else in "
        "fp32. One-time: conversions, load, and what the first calls of all shapes took beyond ordinary ones, less "
        "those of the baseline. Items = one-time seconds ÷ seconds gained per item, with Fieller's 95 % interval over "
        f"rounds{kept}. Cells that are not ranked are left out."
    )
    if not matrix.break_even:
        return None
    return doc.section(
        "Break-even of conversions", *_break_even_items(matrix), doc.Text(text, "note", on=doc.PAGES), *shown, *folds
    )


PAYS = (
    doc.Column("configuration"),
    doc.Column("path"),
    doc.Column("over"),
    *doc.numbers("one-time, s", "gain per item, ms", "pays after, items"),
)


def _break_even_row(matrix: Matrix, one: BreakEven) -> tuple[doc.Value, ...]:
    """The proof of parity is a tooltip of the result."""
    return (
        title_of(matrix.plan.configurations[one.configuration]),
        one.path,
        title_of(matrix.plan.configurations[one.baseline]),
        number(one.one_time_seconds) if one.one_time_seconds > 0 else "0",
        value(one.gain_seconds_per_item, 1e3) if one.gain_seconds_per_item.value > 0 else "none",
        doc.Cell(pays_after(one), "note", hint=one.parity),
    )


def _break_even_items(matrix: Matrix) -> list[doc.Block]:
    """One line per path, for a terminal: at its quickest and its slowest cell."""
    by_path: dict[str, list[BreakEven]] = {}
    for one in matrix.break_even:
        by_path.setdefault(one.path, []).append(one)
    lines = []
    for path, own in by_path.items():
        paying = sorted(
            (one for one in own if one.items is not None), key=lambda one: one.items.value if one.items else 0
        )
        if not paying:
            text = f"no gain in {counted(len(own), 'cell')}"
        else:
            ends = dict.fromkeys(number(one.items.value) for one in (paying[0], paying[-1]) if one.items)
            after = "at once" if list(ends) == ["0"] else f"after {' to '.join(ends)} items"
            text = f"pays {after} in {len(paying)} of {counted(len(own), 'cell')}"
        lines.append(doc.Item(text, lead=path))
    return [doc.Items(lines, on=doc.TERMINAL)]


def pays_after(one: BreakEven) -> str:
    """ "3,400 (2,900–4,100)", "never", "no gain measured", or "3,400 (from 1,200; may never pay)" """
    if one.items is None:
        high = one.gain_seconds_per_item.high
        return "never" if high is not None and high <= 0.0 else "no gain measured"
    found, low, high = one.items.value, one.items.low, one.items.high
    if found == 0.0 and (high in (0.0, None)):
        return "at once" if high == 0.0 or low is None else "at once, if it gains anything"
    if low is None:
        return number(found)
    if high is None:
        return f"{number(found)} (from {number(low)}; may never pay)"
    return f"{number(found)} ({number(low)}–{number(high)})"


def accuracy(matrix: Matrix) -> doc.Section | None:
    """The lowest agreement of each configuration with FP32, beside its largest speed-up."""
    rows = []
    for place, one in enumerate(matrix.plan.configurations):
        own = [cell for cell in matrix.cells if cell.configuration == place]
        reason = next((cell.excluded for cell in own if cell.excluded), None)
        if own:
            speedups = [cell.speedup for cell in own if cell.speedup is not None]
            best = max(speedups, key=lambda found: found.value, default=None)
            rows.append(
                (
                    scope_title(matrix, scope_of(one)),
                    title_of(one),
                    _lowest(own, "cosine_min", "{:.6f}"),
                    _lowest(own, "top1", "{:.4f}"),
                    _highest_error(own),
                    speedup(best),
                    doc.Cell("not ranked" if all(cell.excluded for cell in own) else "partly", "failed", hint=reason)
                    if reason
                    else doc.Cell("ranked", "ok"),
                    reason or "",
                )
            )
    columns = (
        *doc.names("model", "configuration"),
        *doc.numbers("cosine", "top-1", "relative error", "largest speed-up at any shape"),
        *doc.names(""),
        doc.Column("why", "text", below=True),
    )
    caption = (
        "The worst of all cells and rounds, compared with the model in FP32. A cell with wrong answers, a cosine below "
        f"{matrix.plan.min_cosine:g} or a top-1 agreement below {matrix.plan.min_top1:g} is not ranked. Top-1 is empty "
        "where the model has no classes, or no row has a clear highest one, as is usual with random weights."
    )
    return doc.section("Accuracy", doc.Table(columns, rows, caption=caption, grouped=True), on=doc.PAGES)


def _lowest(cells: Sequence[CellResult], name: str, form: str) -> str:
    known = [getattr(one, name) for one in cells if getattr(one, name) is not None]
    return form.format(min(known)) if known else ""


def _highest_error(cells: Sequence[CellResult]) -> str:
    known = [one.relative_error for one in cells if one.relative_error is not None]
    return f"{max(known):.2g}" if known else ""


def cells_table(matrix: Matrix) -> doc.Section | None:
    """Every cell, folded by model and threads."""
    folds = [
        doc.Fold(f"{view.label}: {counted(len(view.cells), 'cell')}", (_cells(matrix, view),), on=doc.HTML)
        for view in views(matrix)
    ]
    if len(matrix.cells) <= FULL_CELLS:
        tables = [_cells(matrix, view, doc.MARKDOWN) for view in views(matrix)]
        return doc.section("Cells", *tables, *folds)
    note = f"{len(matrix.cells)} cells: see cells.csv or report.html."
    return doc.section("Cells", doc.Text(note, on=doc.MARKDOWN), *folds)


def _cells(matrix: Matrix, view: View, on: doc.Format = doc.HTML) -> doc.Table:
    on_gpu = view.scope.device != "cpu"
    tails = any(one.p99_ns is not None for one in view.cells)
    rows = [
        (
            title_of(matrix.plan.configurations[one.configuration]),
            one.batch,
            "" if one.length is None else one.length,
            latency_text(view.scope.device, one, interval=True),
            *(["" if one.p99_ns is None else number(one.p99_ns / 1e6)] if tails else []),
            *([value(one.call_ns, 1e-6), value(one.sustained_ns, 1e-6)] if on_gpu else []),
            value(one.items_per_second),
            speedup(one.speedup),
            "" if one.tflops is None else number(one.tflops),
            number(one.first_call_seconds),
            value(one.joules_per_item),
            "" if one.cosine_min is None else f"{one.cosine_min:.6f}",
            "" if one.top1 is None else f"{one.top1:.4g}",
            doc.Cell("not ranked", "failed", hint=one.excluded) if one.excluded else "",
        )
        for one in view.cells
    ]
    columns = (
        doc.Column("configuration"),
        *doc.numbers("batch", "length", "latency, ms", *(["p99, ms"] if tails else []), *(GPU_TIMES if on_gpu else [])),
        *doc.numbers("items/s", "speed-up"),
        *doc.numbers("TFLOP/s", "first call, s", "J per item", "cosine", "top-1"),
        *doc.names(""),
    )
    of_gpu = (
        "Latency: one batch on the device. Whole call: with copies from pageable memory. Sustained: per batch while "
        "the energy was measured."
    )
    title = "" if on is doc.HTML else view.label
    return doc.Table(columns, rows, caption=of_gpu if on_gpu else "", title=title, grouped=True, on=on)


def latency_text(device: str, one: CellResult, *, interval: bool = False) -> str:
    """The latency in ms, with a mark where an engine on a GPU can only be timed with copies."""
    found = latency_ms(one)
    limits = found.interval if interval else None
    low_high = "" if limits is None else f" ({measured_interval(limits)})"
    copies = " with copies" if has_copies(one, device) else ""
    return f"{measured(found.value, found.interval)}{low_high}{copies}"


def configurations_table(matrix: Matrix) -> doc.Section | None:
    """What each configuration costs before its first answer."""
    rows = [
        (
            scope_title(matrix, scope_of(one.configuration)),
            title_of(one.configuration),
            path_of(one.configuration),
            str(one.description.get("version", "")),
            value(one.load_seconds),
            ", ".join(f"{step.step} {number(step.seconds)} s" for step in one.conversions),
            ", ".join(f"{step.file_bytes / 2**20:,.1f}" for step in one.conversions if step.file_bytes is not None),
        )
        for one in matrix.configurations
        if one.description
    ]
    columns = (
        *doc.names("model", "configuration", "path", "version"),
        *doc.numbers("load, s"),
        doc.Column("conversions", "text"),
        *doc.numbers("files, MiB"),
    )
    caption = "Conversions are shown with the seconds that they took when they were made, here or in an earlier run."
    return doc.section("Configurations", doc.Table(columns, rows, caption=caption, grouped=True), on=doc.PAGES)


def kernels(matrix: Matrix) -> doc.Section | None:
    """Where the time goes, of the largest profiled cell of each configuration."""
    folds = []
    for place, one in enumerate(matrix.plan.configurations):
        profiled = [cell for cell in matrix.cells if cell.configuration == place and cell.kernels]
        if profiled:
            cell = max(profiled, key=lambda found: (found.batch, found.length or 0))
            rows = [
                (
                    str(kernel.get("name", "")),
                    str(kernel.get("count", "")),
                    _number(kernel.get("seconds"), 1e3),
                    share(part) if isinstance(part := kernel.get("share"), int | float) else "",
                )
                for kernel in cell.kernels[:MANY]
            ]
            columns = (doc.Column("kernel", "text"), *doc.numbers("calls", "ms", "share"))
            label = f"{scope_title(matrix, scope_of(one))}, {title_of(one)}, {shape_text(cell.batch, cell.length)}"
            folds.append(doc.Fold(label, (doc.Table(columns, rows),), on=doc.HTML))
    return doc.section("Where the time goes", *folds, on=doc.HTML)


def _number(given: object, scale: float) -> str:
    return number(float(given) * scale) if isinstance(given, int | float) else ""


def refusals(matrix: Matrix) -> doc.Section | None:
    """Combinations that were asked for and not run, by reason."""
    reasons: dict[str, list[Configuration]] = {}
    for one in matrix.plan.refused:
        reasons.setdefault(one.reason, []).append(one.configuration)
    rows = [
        (
            reason,
            len(asked),
            _listed(engine_mode(one) for one in asked),
            _listed(one.precision for one in asked),
            _listed(scope_title(matrix, scope_of(one)) for one in asked),
        )
        for reason, asked in reasons.items()
    ]
    texts = (doc.Column(name, "text") for name in ("engine/mode", "precisions", "models"))
    columns = (doc.Column("reason", "text"), *doc.numbers("count"), *texts)
    return doc.section("Refused combinations", doc.Table(columns, rows), on=doc.PAGES)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(names))


def failures(matrix: Matrix) -> doc.Section | None:
    """Visits that failed, and cells without a timed call."""
    found = [(one, error) for one in matrix.configurations for error in one.errors]
    lines = [doc.Item(error, "failed", lead=_full_title(matrix, one)) for one, error in found]
    return doc.section("Failures", doc.Items(lines))


def _full_title(matrix: Matrix, one: ConfigurationResult) -> str:
    return f"{scope_title(matrix, scope_of(one.configuration))} {title_of(one.configuration)}"
