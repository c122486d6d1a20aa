"""The report of an engine matrix: an overview, charts, tables of results, and the conditions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

import loadgen.report.document as doc
from loadgen.base.quantities import (
    counted,
    items,
    join,
    measured,
    measured_with_interval,
    number,
    ratio,
    ratio_with_interval,
    sentence,
    share,
)
from loadgen.checks.registry import gravest, validity
from loadgen.engines import charts
from loadgen.engines.analyse import has_copies, path_of, worst
from loadgen.engines.charts import latency_ms, scope_title, short_model, shown_length, views
from loadgen.records.matrix import (
    BreakEven,
    CellResult,
    Configuration,
    Matrix,
    Scope,
    Winner,
    shape_text,
)
from loadgen.records.targets import Kind
from loadgen.report.sections.conditions import environment_rows, fact_table, gpu_text
from loadgen.stats.estimates import Estimate

LONG_NS = 2e6
"""Batches of which the host's launch and wait are a small share; sustained times include both."""
SLOWER = 1.05
"""Sustained time over latency from which the overview says so: a GPU at its power limit lowers its clocks."""

MANY = 5
"""Kernels shown per configuration."""
GPU_TIMES = ("whole call, ms", "sustained, ms")
FULL_CELLS = 40
"""Cells up to which Markdown has all of them; beyond that cells.csv has them."""


def matrix_document(matrix: Matrix) -> doc.Document:
    """The document of a matrix, for all formats."""
    chapters = (
        ("", (overview, winners_table)),
        ("Charts", (_charts,)),
        (
            "Results",
            (
                break_even_table,
                *_TOLD[matrix.plan.kind].tables,
                configurations_table,
                kernels,
                refusals,
                failures,
            ),
        ),
        ("Conditions", (method, environment, reproduce)),
    )
    models = list(dict.fromkeys(short_model(configuration.model) for configuration in matrix.plan.configurations))
    return doc.Document(
        f"Engines for {join(models)}" if models else "Engines",
        {
            title: [section for make in makers if (section := doc.attempted(make, matrix)) is not None]
            for title, makers in chapters
        },
        about=f"the engine matrix of {join(models)}" if models else "an engine matrix",
        started_at=matrix.environment.started_at,
    )


def missing_rounds(matrix: Matrix) -> int:
    """Rounds of planned cells that were not measured."""
    plan = matrix.plan
    planned = sum(len(plan.batches) * len(plan.lengths.get(each.model, (None,))) for each in plan.configurations)
    return planned * plan.rounds - sum(each.rounds for each in matrix.cells)


def overview(matrix: Matrix) -> doc.Section | None:
    """What ran where, and the fastest configuration of each model."""
    plan, missing = matrix.plan, missing_rounds(matrix)
    models = list(dict.fromkeys(configuration.model for configuration in plan.configurations))
    failed = sum(len(configuration.errors) for configuration in matrix.configurations)
    finished = matrix.state is not None and matrix.state.state == "finished"
    ran = (
        f"{counted(len(models), 'model')}, {counted(len(plan.configurations), 'configuration')}, "
        f"{counted(len(matrix.cells), 'cell')} in {counted(plan.rounds, 'round')}"
    )
    notes = []
    if missing > 0:
        why = "" if finished else ", because the run did not finish; to continue: abserve engines --resume DIR"
        notes.append(doc.Text(f"{counted(missing, 'measurement')} of cells are missing{why}.", "warning"))
        notes.append(doc.Text("Ratios are of the rounds that both configurations have.", "note"))
    if failed:
        notes.append(doc.Text(f"{counted(failed, 'failure')}: see Failures.", "warning"))
    if (excluded := sum(cell.excluded is not None for cell in matrix.cells)) > 0:
        why = _TOLD[plan.kind].excluded.format(plan)
        notes.append(doc.Text(f"{counted(excluded, 'cell')} not ranked: {why}."))
    if on_gpu(matrix) and (without := _TOLD[plan.kind].without):
        notes.append(doc.Text(without, "note"))
    if (slower := _slower_when_sustained(matrix)) is not None:
        notes.append(doc.Text(slower))
    if plan.refused:
        notes.append(doc.Text(f"{counted(len(plan.refused), 'combination')} refused: see Refused combinations."))
    if plan.rounds < 2:
        notes.append(doc.Text("One round shows no spread: there are no intervals and no certain winner.", "warning"))
    failed_checks = [check for check in matrix.checks if check.ok is False]
    notes[:0] = [
        doc.Text(f"{check.title}: {sentence(check.detail)} {check.remedy}", "warning") for check in failed_checks
    ]
    complete, blamed = finished and missing <= 0, gravest(matrix.checks)
    badge = validity(matrix.checks) if blamed else "COMPLETE" if complete else "INCOMPLETE"
    style: doc.Style = "ok" if blamed is None else "warning" if blamed.severity == "roughens" else "failed"
    fastest = [doc.Item(_sentence(matrix, scope, cells), lead=label) for scope, label, cells in views(matrix)]
    panel = doc.Panel(
        f"Engine matrix: {badge}",
        style if complete else "failed",
        f"{ran}, on {_machine(matrix)}",
        (doc.Items(fastest), *notes),
    )
    return doc.Section("", (panel,))


def _slower_when_sustained(matrix: Matrix) -> str | None:
    """How many cells cannot keep their latency for the longer time in which their energy was measured."""
    factors = [
        cell.sustained_ns.value / cell.latency_ns.value
        for cell in matrix.cells
        if cell.sustained_ns is not None and cell.latency_ns.value > LONG_NS
    ]
    slower = [factor for factor in factors if factor > SLOWER]
    if not slower:
        return None
    return (
        f"In {len(slower)} of {counted(len(factors), 'cell')} a batch took more than {SLOWER - 1:.0%} longer under "
        f"sustained load, at most {ratio(max(slower), None)} as long as in the short timed runs. On a GPU this is "
        "usually the power limit; cells.csv has the time (sustained_ms)."
    ).replace("%", " %")


def _machine(matrix: Matrix) -> str:
    host = matrix.environment.host
    cpu = f"{host.get('cpu_model') or 'an unknown CPU'}, {host.get('cpu_count') or '?'} cores"
    return f"{gpu_text(matrix.environment.gpu)}, {cpu}" if on_gpu(matrix) else cpu


def on_gpu(matrix: Matrix) -> bool:
    """Whether any configuration runs on a GPU."""
    return any(configuration.device != "cpu" for configuration in matrix.plan.configurations)


def timed(matrix: Matrix) -> str:
    """What the times are of."""
    return _TOLD[matrix.plan.kind].timed[on_gpu(matrix)]


def _sentence(matrix: Matrix, scope: Scope, cells: Sequence[CellResult]) -> str:
    """Which configuration leads in most cells of a scope, those that are certain first, and by how much at the middle
    length and the largest batch of them."""
    winners = [winner for winner in matrix.winners if winner.scope == scope]
    if not winners:
        return "no cell with right answers."
    configurations = matrix.plan.configurations
    decided = [winner for winner in winners if winner.certain] or winners
    most = Counter(winner.configuration for winner in decided).most_common(1)[0][0]
    won = [winner for winner in decided if winner.configuration == most]
    length = shown_length(cells)
    at = max(won, key=lambda winner: (winner.length == length, winner.batch))
    cell = next(cell for cell in cells if (cell.configuration, cell.shape) == (most, at.shape))
    baseline = f"{matrix.plan.baseline} {matrix.plan.baseline_precision(most)}"
    over = [] if cell.speedup is None else [f"{times(cell.speedup)} the throughput of {baseline}"]
    if at.runner_up is not None and at.ratio is not None:
        other = configurations[at.runner_up].title
        over += [f"{times(at.ratio)} that of {other}"] if not over or other != baseline else []
    name, shapes = configurations[most].title, f"{len(won)} of {counted(len(winners), 'shape')}"
    lead = f"{name} is the fastest at {shapes}"
    if not at.certain:
        lead = f"no certain winner; {name} measured the highest throughput at {shapes}"
    rate = f"{value(cell.items_per_second)} {items(matrix.configurations[most].item)}/s"
    return f"{lead}. At {shape_text(at.shape)}: {rate}{', ' if over else ''}{join(over)}."


def _charts(matrix: Matrix) -> doc.Section | None:
    drawn = (
        charts.winner_chart(matrix),
        charts.batch_chart(matrix),
        charts.speedup_chart(matrix),
        charts.length_chart(matrix),
        charts.memory_chart(matrix),
        charts.energy_chart(matrix),
    )
    return doc.section("Charts", *drawn, on=doc.HTML)


def method(matrix: Matrix) -> doc.Section | None:
    """How it was measured."""
    plan = matrix.plan
    weights = dict.fromkeys(
        str(configuration.description["weights"])
        for configuration in matrix.configurations
        if "weights" in configuration.description
    )
    how = {
        "fresh": "a new process per configuration and round",
        "kept": "one process per configuration, kept through all rounds; up to one per core loaded at the same time, "
        "so load, first call and break-even take longer than for a single start; energy is of the last round only",
    }
    rows = [
        ("rounds", f"{plan.rounds}, each with every configuration once in random order, seed {plan.seed}"),
        ("processes", how[plan.processes]),
        (
            "latency",
            f"{timed(matrix)}: geometric mean over rounds of each round's median, with a 95 % t interval on logs",
        ),
        ("throughput", "batch size ÷ latency; winners, speed-ups and break-even come from it"),
        (
            "speed-up",
            f"throughput over the baseline, paired by round; the baseline: {plan.baseline}, in "
            + _TOLD[plan.kind].baseline,
        ),
        ("batch sizes", ", ".join(map(str, plan.batches))),
        *(
            (f"lengths of {short_model(model)}", ", ".join(str(length) for length in lengths))
            for model, lengths in plan.lengths.items()
            if any(length is not None for length in lengths)
        ),
        (
            "not ranked",
            _TOLD[plan.kind].not_ranked.format(plan),
        ),
        *([("weights", "; ".join(weights))] if weights else []),
        ("settings", f"sha256 {plan.sha256}"),
    ]
    return fact_table("Method", rows)


def environment(matrix: Matrix) -> doc.Section | None:
    """Host, GPU and versions."""
    return fact_table("Environment", environment_rows(matrix.environment))


def reproduce(matrix: Matrix) -> doc.Section | None:
    """The command that made the matrix."""
    return doc.section("Reproduce", doc.Text(matrix.environment.command, "code", doc.PAGES))


def times(estimate: Estimate | None) -> str:
    """ "1.40× (1.31–1.49)", or "" """
    if estimate is None:
        return ""
    words = ratio if estimate.interval is None else ratio_with_interval
    return words(estimate.value, estimate.interval)


def value(estimate: Estimate | None, scale: float = 1.0) -> str:
    """A value with the digits that its interval supports, or "" """
    if estimate is None:
        return ""
    return measured(estimate.value * scale)


def _format(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def _doubt(matrix: Matrix, winner: Winner) -> str:
    if gravest(matrix.checks):
        return "not certain: see above"
    if winner.unbeaten in (None, winner.runner_up):
        return "not certain"
    return f"not certain over {matrix.plan.configurations[winner.unbeaten].title}"


def winners_table(matrix: Matrix) -> doc.Section | None:
    """The winner of every batch size and length."""
    configurations = matrix.plan.configurations
    cells = {(cell.configuration, cell.shape): cell for cell in matrix.cells}
    won = [cells[winner.configuration, winner.shape] for winner in matrix.winners]
    rows = [
        (
            scope_title(matrix, winner.scope),
            winner.batch,
            "" if winner.length is None else winner.length,
            configurations[winner.configuration].title,
            value(cell.items_per_second),
            latency_text(winner.device, cell),
            doc.Cell(
                times(winner.ratio),
                short="" if winner.ratio is None else ratio(winner.ratio.value, winner.ratio.interval),
            ),
            "" if winner.runner_up is None else configurations[winner.runner_up].title,
            doc.Cell("certain", "ok") if winner.certain else doc.Cell(_doubt(matrix, winner), "unknown", short="?"),
        )
        for winner, cell in zip(matrix.winners, won, strict=True)
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
    for scope, label, cells in views(matrix):
        results = [result for result in matrix.break_even if configurations[result.configuration].scope == scope]
        if not results:
            continue
        length, batch = shown_length(cells), max(cell.batch for cell in cells)
        main = [_break_even_row(matrix, result) for result in results if result.shape == (batch, length)]
        title = f"{label}, {shape_text((batch, length))}"
        shown.append(doc.Table(PAYS, main, title=title, grouped=True, on=doc.PAGES))
        shapes = [(*_break_even_row(matrix, result), result.batch, result.length or "") for result in results]
        table = doc.Table((*PAYS, *doc.numbers("batch", "length")), shapes, grouped=True)
        folds.append(doc.Fold(f"{label}: every batch and length", (table,), on=doc.HTML))
    once = ", in which the start, measured once, has no share" if matrix.plan.processes == "kept" else ""
    text = (
        f"Over {matrix.plan.baseline} with the same threads, in the same precision where it was measured, or else in "
        "fp32. One-time: conversions, load, and what the first calls of all shapes took beyond ordinary ones, less "
        "those of the baseline. Items = one-time seconds ÷ seconds gained per item, with Fieller's 95 % interval over "
        f"rounds{once}. Cells that are not ranked are left out."
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


def _break_even_row(matrix: Matrix, result: BreakEven) -> tuple[doc.Value, ...]:
    """The proof of parity is a tooltip of the result."""
    return (
        matrix.plan.configurations[result.configuration].title,
        result.path,
        matrix.plan.configurations[result.baseline].title,
        number(result.one_time_seconds) if result.one_time_seconds > 0 else "0",
        value(result.gain_seconds_per_item, 1e3) if result.gain_seconds_per_item.value > 0 else "none",
        doc.Cell(pays_after(result), "note", hint=result.parity),
    )


def _break_even_items(matrix: Matrix) -> list[doc.Block]:
    """One line per path, for a terminal: at its quickest and its slowest cell."""
    by_path: dict[str, list[BreakEven]] = {}
    for result in matrix.break_even:
        by_path.setdefault(result.path, []).append(result)
    lines = []
    for path, results in by_path.items():
        paying = sorted(
            (result for result in results if result.items is not None),
            key=lambda result: result.items.value if result.items else 0,
        )
        if not paying:
            text = f"no gain in {counted(len(results), 'cell')}"
        else:
            ends = dict.fromkeys(number(result.items.value) for result in (paying[0], paying[-1]) if result.items)
            after = "at once" if list(ends) == ["0"] else f"after {' to '.join(ends)} items"
            text = f"pays {after} in {len(paying)} of {counted(len(results), 'cell')}"
        lines.append(doc.Item(text, lead=path))
    return [doc.Items(lines, on=doc.TERMINAL)]


def pays_after(result: BreakEven) -> str:
    """ "3,400 (2,900–4,100)", "never", "no gain measured", or "3,400 (from 1,200; may never pay)" """
    if result.items is None:
        high = result.gain_seconds_per_item.high
        return "never" if high is not None and high <= 0.0 else "no gain measured"
    after, low, high = result.items.value, result.items.low, result.items.high
    if after == 0.0 and (high in (0.0, None)):
        return "at once" if high == 0.0 or low is None else "at once, if it gains anything"
    if low is None:
        return number(after)
    if high is None:
        return f"{number(after)} (from {number(low)}; may never pay)"
    return f"{number(after)} ({number(low)}–{number(high)})"


def accuracy(matrix: Matrix) -> doc.Section | None:
    """The lowest agreement of each configuration with FP32, beside its largest speed-up."""
    rows = []
    for place, configuration in enumerate(matrix.plan.configurations):
        cells = [cell for cell in matrix.cells if cell.configuration == place]
        reason = next((cell.excluded for cell in cells if cell.excluded), None)
        if cells:
            speedups = [cell.speedup for cell in cells if cell.speedup is not None]
            best = max(speedups, key=lambda speedup: speedup.value, default=None)
            rows.append(
                (
                    scope_title(matrix, configuration.scope),
                    configuration.title,
                    _format(worst((cell.cosine_min for cell in cells), min), ".6f"),
                    _format(worst((cell.top1 for cell in cells), min), ".4f"),
                    _format(worst((cell.relative_error for cell in cells), max), ".2g"),
                    times(best),
                    doc.Cell("not ranked" if all(cell.excluded for cell in cells) else "partly", "failed", hint=reason)
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


def generation_table(matrix: Matrix) -> doc.Section | None:
    """Decoding and prompts of every cell, beside the reference's view of its tokens."""
    rows = [
        (
            scope_title(matrix, configuration.scope),
            configuration.title,
            cell.batch,
            cell.length or "",
            value(cell.items_per_second),
            times(cell.speedup),
            latency_text(configuration.device, cell, interval=True),
            "" if cell.p99_ns is None else number(cell.p99_ns / 1e6),
            value(result.prompt_tokens_per_second),
            value(result.first_token_ns, 1e-6),
            share(result.bandwidth_share.value),
            _format(memory_gb(cell), ".1f"),
            _format(result.mean_deficit, ".2g"),
            _format(result.largest_deficit, ".2g"),
            "" if result.best_share is None else share(result.best_share),
            doc.Cell("not ranked", "failed", hint=cell.excluded) if cell.excluded else doc.Cell("ranked", "ok"),
            cell.excluded or "",
        )
        for cell in matrix.cells
        if (result := cell.generation) is not None
        for configuration in (matrix.plan.configurations[cell.configuration],)
    ]
    columns = (
        *doc.names("model", "engine"),
        *doc.numbers("requests", "prompt", "tokens/s", "over the baseline", "step, ms", "p99, ms"),
        *doc.numbers("prompt tokens/s", "first token, ms", "bandwidth", "memory, GB"),
        *doc.numbers("deficit, mean", "largest", "reference's choice"),
        *doc.names(""),
        doc.Column("why", "text", below=True),
    )
    caption = (
        "A step gives every request one token. Bandwidth: what the steps must read (weights, keys and values) as a "
        "share of a copy on the same device. First token: of the last request, when all come at once. Memory: the "
        "process's on the GPU, or on a CPU its peak. Deficit: how far the logit of a chosen token is below the "
        "reference's largest, which reads the same tokens (see docs/language-models.md)."
    )
    return doc.section("Generation", doc.Table(columns, rows, caption=caption, grouped=True), on=doc.PAGES)


def memory_gb(cell: CellResult) -> float | None:
    """The process's memory on its device by NVML, else the framework's peak there, else on the host."""
    used = cell.process_device_bytes or cell.reserved_bytes or cell.rss_bytes
    return None if used is None else used / 1e9


def cells_table(matrix: Matrix) -> doc.Section | None:
    """Every cell, folded by model and threads."""
    folds = [
        doc.Fold(f"{label}: {counted(len(cells), 'cell')}", (_cells(matrix, scope, cells),), on=doc.HTML)
        for scope, label, cells in views(matrix)
    ]
    if len(matrix.cells) <= FULL_CELLS:
        tables = [
            replace(_cells(matrix, scope, cells), title=label, on=doc.MARKDOWN) for scope, label, cells in views(matrix)
        ]
        return doc.section("Cells", *tables, *folds)
    note = f"{len(matrix.cells)} cells: see cells.csv or report.html."
    return doc.section("Cells", doc.Text(note, on=doc.MARKDOWN), *folds)


def _cells(matrix: Matrix, scope: Scope, cells: Sequence[CellResult]) -> doc.Table:
    on_gpu = scope.device != "cpu"
    tails = any(cell.p99_ns is not None for cell in cells)
    rows = [
        (
            matrix.plan.configurations[cell.configuration].title,
            cell.batch,
            "" if cell.length is None else cell.length,
            latency_text(scope.device, cell, interval=True),
            *(["" if cell.p99_ns is None else number(cell.p99_ns / 1e6)] if tails else []),
            *([value(cell.call_ns, 1e-6), value(cell.sustained_ns, 1e-6)] if on_gpu else []),
            value(cell.items_per_second),
            times(cell.speedup),
            "" if cell.tflops is None else number(cell.tflops),
            number(cell.first_call_seconds),
            value(cell.joules_per_item),
            _format(cell.cosine_min, ".6f"),
            _format(cell.top1, ".4g"),
            doc.Cell("not ranked", "failed", hint=cell.excluded) if cell.excluded else "",
        )
        for cell in cells
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
    return doc.Table(columns, rows, caption=of_gpu if on_gpu else "", grouped=True, on=doc.HTML)


def latency_text(device: str, cell: CellResult, *, interval: bool = False) -> str:
    """The latency in ms, with a mark where an engine on a GPU can only be timed with copies."""
    latency, copies = latency_ms(cell), " with copies" if has_copies(cell, device) else ""
    return measured_with_interval(latency.value, latency.interval if interval else None) + copies


def configurations_table(matrix: Matrix) -> doc.Section | None:
    """What each configuration costs before its first answer."""
    rows = [
        (
            scope_title(matrix, result.configuration.scope),
            result.configuration.title,
            path_of(result.configuration),
            str(result.description.get("version", "")),
            value(result.load_seconds),
            ", ".join(f"{step.step} {number(step.seconds)} s" for step in result.conversions),
            ", ".join(f"{step.file_bytes / 2**20:,.1f}" for step in result.conversions if step.file_bytes is not None),
        )
        for result in matrix.configurations
        if result.description
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
    for place, configuration in enumerate(matrix.plan.configurations):
        profiled = [cell for cell in matrix.cells if cell.configuration == place and cell.kernels]
        if profiled:
            cell = max(profiled, key=lambda cell: (cell.batch, cell.length or 0))
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
            shape = shape_text(cell.shape)
            label = f"{scope_title(matrix, configuration.scope)}, {configuration.title}, {shape}"
            folds.append(doc.Fold(label, (doc.Table(columns, rows),), on=doc.HTML))
    return doc.section("Where the time goes", *folds, on=doc.HTML)


def _number(value: object, scale: float) -> str:
    return number(float(value) * scale) if isinstance(value, int | float) else ""


def refusals(matrix: Matrix) -> doc.Section | None:
    """Combinations that were asked for and not run, by reason."""
    reasons: dict[str, list[Configuration]] = {}
    for refusal in matrix.plan.refused:
        reasons.setdefault(refusal.reason, []).append(refusal.configuration)
    rows = [
        (
            reason,
            len(asked),
            _listed(configuration.engine_mode for configuration in asked),
            _listed(configuration.precision for configuration in asked),
            _listed(scope_title(matrix, configuration.scope) for configuration in asked),
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
    pairs = [(configuration, error) for configuration in matrix.configurations for error in configuration.errors]
    lines = [
        doc.Item(error, "failed", lead=f"{scope_title(matrix, each.configuration.scope)} {each.configuration.title}")
        for each, error in pairs
    ]
    return doc.section("Failures", doc.Items(lines))


class _Told(NamedTuple):
    """What a report says of models of one kind; texts in braces are of the plan."""

    tables: tuple[Callable[[Matrix], doc.Section | None], ...]
    excluded: str
    not_ranked: str
    baseline: str
    """In which precision it runs."""
    timed: tuple[str, str]
    """What the times are of: without and with a configuration on a GPU."""
    without: str = ""
    """What a GPU's times leave out."""


_TOLD: Mapping[Kind, _Told] = {
    Kind.TENSORS: _Told(
        (accuracy, cells_table),
        "wrong answers, or below the limits (cosine {0.min_cosine:g}, top-1 agreement {0.min_top1:g})",
        "below a cosine of {0.min_cosine:g} or a top-1 agreement of {0.min_top1:g}",
        "fp32",
        (
            "whole call",
            "time of one batch on the device, without copies to and from the host (torch between device events, ONNX "
            "Runtime and JAX by the host until the device is done)",
        ),
        "Times are without copies to and from the host; the table of cells has both.",
    ),
    Kind.TOKENS: _Told(
        (generation_table,),
        "see Generation",
        "answers that no rounding explains, beside a reference in a process of its own",
        "the same precision",
        ("time of a decoding step, until its tokens are on the host; every request of a batch gets one",) * 2,
    ),
}
