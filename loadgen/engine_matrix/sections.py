"""The report of an engine matrix: an overview, charts, tables and the answers to the questions of earlier studies."""

from __future__ import annotations

from collections import Counter

import loadgen.report.document as doc
from loadgen.engine_matrix import charts, tables
from loadgen.engine_matrix.charts import Scope, View, short_model, title_of, views
from loadgen.engine_matrix.questions import times
from loadgen.engine_matrix.records import Matrix, Winner
from loadgen.engine_matrix.tables import shape_text, value
from loadgen.quantities import counted, items, join, ratio
from loadgen.report.machine import environment_rows, gpu_text

LONG_NS = 2e6
"""Batches of which the host's launch and wait are a small share; sustained times include both."""
SLOWER = 1.05
"""Sustained time over latency from which the overview says so: a GPU at its power limit lowers its clocks."""
OUTCOMES: dict[str, doc.Style] = {"yes": "ok", "no": "note", "undetermined": "unknown"}


def matrix_document(matrix: Matrix) -> doc.Document:
    """The document of a matrix, for all formats."""
    chapters = (
        ("", (overview(matrix), tables.winners_table(matrix), questions(matrix))),
        ("Charts", (_charts(matrix),)),
        (
            "Results",
            (
                tables.break_even_table(matrix),
                tables.accuracy(matrix),
                tables.cells_table(matrix),
                tables.configurations_table(matrix),
                tables.kernels(matrix),
                tables.refusals(matrix),
                tables.failures(matrix),
            ),
        ),
        ("Conditions", (method(matrix), environment(matrix), reproduce(matrix))),
    )
    models = list(dict.fromkeys(short_model(one.model) for one in matrix.plan.configurations))
    return doc.Document(
        f"Engines for {join(models)}" if models else "Engines",
        tuple(doc.Chapter(title, tuple(one for one in found if one is not None)) for title, found in chapters),
        about=f"the engine matrix of {join(models)}" if models else "an engine matrix",
        started_at=matrix.environment.started_at,
    )


def missing_rounds(matrix: Matrix) -> int:
    """Rounds of planned cells that were not measured."""
    plan = matrix.plan
    planned = sum(len(plan.batches) * len(plan.lengths.get(one.model, (None,))) for one in plan.configurations)
    return planned * plan.rounds - sum(one.rounds for one in matrix.cells)


def overview(matrix: Matrix) -> doc.Section | None:
    """What ran where, and the fastest configuration of each model."""
    plan, missing = matrix.plan, missing_rounds(matrix)
    models = list(dict.fromkeys(one.model for one in plan.configurations))
    failed = sum(len(one.errors) for one in matrix.configurations)
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
    if (excluded := sum(one.excluded is not None for one in matrix.cells)) > 0:
        limits = f"cosine {plan.min_cosine:g}, top-1 agreement {plan.min_top1:g}"
        notes.append(
            doc.Text(f"{counted(excluded, 'cell')} not ranked: wrong answers, or below the limits ({limits}).")
        )
    if on_gpu(matrix):
        notes.append(doc.Text("Times are without copies to and from the host; the table of cells has both.", "note"))
    if (slower := _slower_when_sustained(matrix)) is not None:
        notes.append(doc.Text(slower))
    if plan.refused:
        notes.append(doc.Text(f"{counted(len(plan.refused), 'combination')} refused: see Refused combinations."))
    if plan.rounds < 2:
        notes.append(doc.Text("One round shows no spread: there are no intervals and no certain winner.", "warning"))
    complete = finished and missing <= 0
    panel = doc.Panel(
        f"Engine matrix: {'COMPLETE' if complete else 'INCOMPLETE'}",
        "ok" if complete else "failed",
        f"{ran}, on {_machine(matrix)}",
        (doc.Items([doc.Item(_sentence(matrix, view), lead=view.label) for view in views(matrix)]), *notes),
    )
    return doc.Section("", (panel,))


def _slower_when_sustained(matrix: Matrix) -> str | None:
    """How many cells cannot keep their latency for the longer time in which their energy was measured."""
    factors = [
        one.sustained_ns.value / one.latency_ns.value
        for one in matrix.cells
        if one.sustained_ns is not None and one.latency_ns.value > LONG_NS
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
    return any(one.device != "cpu" for one in matrix.plan.configurations)


def timed(matrix: Matrix) -> str:
    """What the times are of."""
    if not on_gpu(matrix):
        return "whole call"
    return (
        "time of one batch on the device, without copies to and from the host (torch between device events, ONNX "
        "Runtime and JAX by the host until the device is done)"
    )


def _own_winners(matrix: Matrix, scope: Scope) -> list[Winner]:
    return [one for one in matrix.winners if (one.model, one.device, one.threads) == scope]


def _sentence(matrix: Matrix, view: View) -> str:
    """Which configuration leads in most cells of a view, those that are certain first, and by how much at the middle
    length and the largest batch of them."""
    own = _own_winners(matrix, view.scope)
    if not own:
        return "no cell with right answers."
    configurations = matrix.plan.configurations
    decided = [one for one in own if one.certain] or own
    most = Counter(one.configuration for one in decided).most_common(1)[0][0]
    won = [one for one in decided if one.configuration == most]
    length = charts.shown_length(view.cells)
    at = max(won, key=lambda one: (one.length == length, one.batch))
    cell = next(one for one in view.cells if (one.configuration, one.batch, one.length) == (most, at.batch, at.length))
    baseline = f"{matrix.plan.baseline} fp32"
    over = [] if cell.speedup is None else [f"{times(cell.speedup)} the throughput of {baseline}"]
    if at.runner_up is not None and at.ratio is not None:
        other = title_of(configurations[at.runner_up])
        over += [f"{times(at.ratio)} that of {other}"] if not over or other != baseline else []
    name, shapes = title_of(configurations[most]), f"{len(won)} of {counted(len(own), 'shape')}"
    lead = f"{name} is the fastest at {shapes}"
    if not at.certain:
        lead = f"no certain winner; {name} measured the highest throughput at {shapes}"
    rate = f"{value(cell.items_per_second)} {items(matrix.configurations[most].item)}/s"
    return f"{lead}. At {shape_text(at.batch, at.length)}: {rate}{', ' if over else ''}{join(over)}."


def questions(matrix: Matrix) -> doc.Section | None:
    """The answers: the most basic of each question on a terminal, all on a page."""
    answers = matrix.answers
    first = [one for place, one in enumerate(answers) if one.question not in {o.question for o in answers[:place]}]
    rest = len(answers) - len(first)
    return doc.section(
        "Questions of earlier studies",
        doc.Items(
            [doc.Item(f"{one.question} {one.outcome.capitalize()}. {one.sentence}") for one in first], on=doc.TERMINAL
        ),
        doc.Text(f"{counted(rest, 'more answer')}: see report.html.", "note", on=doc.TERMINAL) if rest else None,
        doc.Table(
            (doc.Column("question", "text"), doc.Column("answer"), doc.Column("because", "text")),
            [(one.question, doc.Cell(one.outcome, OUTCOMES[one.outcome]), one.sentence) for one in answers],
            grouped=True,
            on=doc.PAGES,
        ),
    )


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
        str(one.description["weights"]) for one in matrix.configurations if "weights" in one.description
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
        ("speed-up", f"throughput over the baseline, paired by round; the baseline: {plan.baseline}, in fp32"),
        ("batch sizes", ", ".join(map(str, plan.batches))),
        *(
            (f"lengths of {short_model(model)}", ", ".join(str(one) for one in lengths))
            for model, lengths in plan.lengths.items()
            if any(one is not None for one in lengths)
        ),
        ("not ranked below", f"cosine {plan.min_cosine:g}, top-1 agreement {plan.min_top1:g}"),
        *([("weights", "; ".join(weights))] if weights else []),
        ("settings", f"sha256 {plan.sha256}"),
    ]
    return doc.section("Method", doc.Table((*doc.names(""), *doc.texts("")), rows), on=doc.PAGES, half=True)


def environment(matrix: Matrix) -> doc.Section | None:
    """Host, GPU and versions."""
    rows = environment_rows(matrix.environment)
    return doc.section("Environment", doc.Table((*doc.names(""), *doc.texts("")), rows), on=doc.PAGES, half=True)


def reproduce(matrix: Matrix) -> doc.Section | None:
    """The command that made the matrix."""
    return doc.section("Reproduce", doc.Code(matrix.environment.command))
