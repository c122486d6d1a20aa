"""Sections of the GPU verification: the findings with their signals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import loadgen.report.charts as charts
import loadgen.report.document as doc
from loadgen.base.quantities import number, share
from loadgen.findings.gpu.analysis import GpuFound
from loadgen.findings.gpu.records import EvidenceRecord, GpuFinding
from loadgen.records.run import item_of, shown
from loadgen.verdict.result import Result

ALL_SCENARIOS = "all scenarios"


STYLES: dict[GpuFinding, doc.Style] = {
    GpuFinding.GPU_VERIFIED: "ok",
    GpuFinding.CPU_FALLBACK: "failed",
    GpuFinding.INCONCLUSIVE: "warning",
}


CAPTION = (
    "One finding per arm and scenario, from the driver's own readings. Utilisation and power are means over the arm's "
    "blocks and, in brackets, over the idle gaps beside them. docs/gpu-proof.md explains the rules and every code."
)


@dataclass(frozen=True, slots=True)
class FindingRow:
    """One finding as the report shows it."""

    arm: str
    scenario: str
    words: str
    style: doc.Style
    figures: tuple[str, ...]
    """The figures: load, utilisation, power, joules per item, the same above idle."""
    inputs: str
    why: str
    repeats: bool
    """Whether the arm's row over all scenarios says the same."""
    line: str
    """The finding in a sentence or two."""


def findings(result: Result) -> list[FindingRow]:
    """The findings over all scenarios first, then those of each scenario, then the control run's. Of an arm on several
    GPUs the finding for each of them follows the one for all."""
    places = {workload.name: place for place, workload in enumerate(result.experiment.workloads)}
    arms = result.experiment.labels
    records = sorted(
        _records(result),
        key=lambda record: (
            record.control,
            places.get(record.workload, len(places)) if record.workload else -1,
            arms.index(record.label),
        ),
    )
    rows = [
        (one, shown(one.label) + ("" if one is record else f" on {one.uuid}"))
        for record in records
        for one in (record, *record.gpus)
    ]
    whole = {(one.label, one.uuid): one for one, _ in rows if one.workload is None and not one.control}
    return [_row(one, arm, whole.get((one.label, one.uuid)), item_of(result.environment)) for one, arm in rows]


def _records(result: Result) -> Sequence[EvidenceRecord]:
    evidence = result.of(GpuFound).evidence
    return evidence.records if evidence is not None else ()


def _row(record: EvidenceRecord, arm: str, whole: EvidenceRecord | None, item: str) -> FindingRow:
    words = record.finding.value + (f" ({record.code})" if record.code is not None else "")
    figures = _figures(record)
    _, utilisation, power, joules, _ = figures
    energy, reasons = "" if joules == "–" else f", {joules} J/{item}", list(record.notes)
    if record.no_energy is not None and not record.control:
        energy = f", no J/{item} ({record.no_energy})"
        reasons.append(f"no J/{item}: {record.no_energy}")
    measured = f"; busy {utilisation}, {power}{energy}" if record.inputs.gpu is not None else ""
    return FindingRow(
        arm=arm,
        scenario=(record.workload or ALL_SCENARIOS) + (", CPU control run" if record.control else ""),
        words=words,
        style="ok" if record.control and record.finding is GpuFinding.CPU_FALLBACK else STYLES[record.finding],
        figures=figures,
        inputs=f"placement {record.inputs.placement.result}, activity {record.activity or 'unknown'}, "
        f"attributed {_yes(record.attributed)}, CPU load as in the control run {_yes(record.cpu_witness)}",
        why=" ".join((record.sentence, *(f"{note[0].upper()}{note[1:]}." for note in reasons))),
        repeats=whole is not None
        and record is not whole
        and not record.control
        and (whole.finding, whole.code) == (record.finding, record.code),
        line=f"{words}{measured}. {record.sentence}",
    )


def _figures(record: EvidenceRecord) -> tuple[str, str, str, str, str]:
    gpu, load = record.inputs.gpu, record.inputs.load
    loaded = f"{load.window_s:.1f} s"
    if gpu is None:
        return loaded, "–", "–", "–", "–"
    busy = share(gpu.busy_s / gpu.covered_s) if gpu.covered_s > 0 else "–"
    watts = "–" if gpu.energy_joules is None or load.window_s <= 0 else f"{gpu.energy_joules / load.window_s:.0f} W"
    idle_watts = "–" if gpu.idle_power_watts is None else f"{gpu.idle_power_watts:.0f} W"
    per_item = (None, None) if record.control else (gpu.joules_per_item, gpu.excess_joules_per_item)
    whole, excess = ("–" if joules is None else number(joules) for joules in per_item)
    return loaded, f"{busy} ({share(gpu.idle_utilisation_low)})", f"{watts} ({idle_watts})", whole, excess


def _yes(value: bool | None) -> str:
    return "unknown" if value is None else "yes" if value else "no"


def gpu_verification(result: Result) -> doc.Section | None:
    """A terminal shows one line per finding that differs from the arm's finding over all scenarios; a page shows every
    finding with its figures."""
    rows, item = findings(result), item_of(result.environment)
    different = [row for row in rows if not row.repeats]
    return doc.section(
        "GPU verification",
        doc.Items([doc.Item(row.line, row.style, f"{row.arm} {row.scenario}") for row in different], on=doc.TERMINAL),
        _table(different, item, CAPTION),
        doc.Fold("The same finding in each scenario", (_table([row for row in rows if row.repeats], item),)),
        gpu_chart(result),
    )


def _table(rows: Sequence[FindingRow], item: str, caption: str = "") -> doc.Table:
    return doc.Table(
        (
            *doc.names("arm", "scenario", "finding"),
            *doc.numbers("load", "utilisation", "power", f"J/{item}", "above idle"),
            doc.Column("why", "text", below=True),
            doc.Column("inputs", "text", below=True),
        ),
        [(row.arm, row.scenario, doc.Cell(row.words, row.style), *row.figures, row.why, row.inputs) for row in rows],
        caption=caption,
        on=doc.PAGES,
    )


def gpu_chart(result: Result) -> doc.Chart | None:
    """Utilisation, SM activity and power over the run, with the blocks of each arm shaded."""
    data: list[doc.Figure] = []
    devices = result.of(GpuFound).series
    for device in devices:
        name = "" if len(devices) == 1 else f" {charts.label_text(device.uuid[:12])}"
        for title, points, factor, panel, unit, line in (
            ("utilisation", device.utilisation, 100.0, "y", "%", {"color": "--ink", "dash": "solid"}),
            ("SM activity", device.sm_active, 100.0, "y", "%", {"color": "--muted", "dash": "dot"}),
            ("power", device.power_watts, 1.0, "y2", "W", {"color": "--ink", "dash": "solid"}),
        ):
            if points:
                data.append(
                    {
                        "type": "scatter",
                        "mode": "lines",
                        "name": title + name,
                        "x": [charts.rounded(seconds / 60.0) for seconds, _ in points],
                        "y": [charts.rounded(factor * value) for _, value in points],
                        "yaxis": panel,
                        "line": {**line, "width": 1.5},
                        "hovertemplate": f"{title}: %{{y:.4~g}} {unit}<extra></extra>",
                    }
                )
    if not data:
        return None
    control = any(record.control for record in _records(result))
    whose = "the arms" if charts.several(result) else " and of ".join(map(shown, result.experiment.labels))
    return doc.Chart(
        "gpu",
        "GPU activity over the run",
        f"Means over one second, by the driver. Shaded: the blocks of {whose} in their colours"
        + (", the CPU control run in grey" if control else "")
        + "; nothing is sent in the gaps between rounds.",
        data,
        {
            "height": 460,
            "xaxis": charts.axis("minutes since the first block", anchor="y2"),
            "yaxis": charts.axis("% of the time", range=[0, 101.5], domain=[0.54, 1]),
            "yaxis2": charts.axis("power, W", rangemode="tozero", domain=[0, 0.46]),
            "shapes": _shading(result),
            "legend": charts.LEGEND_ABOVE,
        },
    )


def _shading(result: Result) -> list[doc.Figure]:
    spans = [(b.start_s, b.start_s + b.duration_s, charts.colour(result, b.label)) for b in result.blocks]
    windows = [(record.control, window) for record in _records(result) for window in record.inputs.load.windows]
    # The run's first block began then, on the clock of the evidence.
    origin_ns = min((window.start_ns for control, window in windows if not control), default=None)
    if origin_ns is not None:
        spans += [
            ((window.start_ns - origin_ns) / 1e9, (window.end_ns - origin_ns) / 1e9, "--muted")
            for control, window in windows
            if control
        ]
    shape = {"type": "rect", "xref": "x", "yref": "paper", "y0": 0, "y1": 1, "line": {"width": 0}, "layer": "below"}
    shape["opacity"] = 0.16
    return [
        {**shape, "x0": charts.rounded(start / 60.0), "x1": charts.rounded(end / 60.0), "fillcolor": fill}
        for start, end, fill in spans
    ]


SECTIONS = {"Proof": (gpu_verification,)}
