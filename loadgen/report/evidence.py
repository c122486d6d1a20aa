"""Where the arms ran, for people: the findings with what they rest on, and what the GPU did over the run."""

from __future__ import annotations

from dataclasses import dataclass

from loadgen.analysis.result import Result
from loadgen.evidence.records import EvidenceRecord, Finding
from loadgen.quantities import number, share
from loadgen.report.charts import LEGEND_ABOVE, Chart, Figure, axis, rounded
from loadgen.report.check_tables import CheckState

HEADINGS = ("arm", "scenario", "finding", "load", "utilisation", "power", "J/image", "beyond idle", "inputs", "why")
ALL_SCENARIOS = "all scenarios"
STATES: dict[Finding, CheckState] = {
    Finding.GPU_VERIFIED: "ok",
    Finding.CPU_FALLBACK: "failed",
    Finding.INCONCLUSIVE: "warning",
}


@dataclass(frozen=True, slots=True)
class EvidenceRow:
    """`figures`: load, utilisation, power, J/image, J/image beyond idling. `inputs`: what the decision rests on."""

    arm: str
    scenario: str
    finding: str
    state: CheckState
    figures: tuple[str, ...]
    inputs: str
    why: str
    repeats: bool
    """Says of one scenario what its arm's row over all scenarios says."""


def evidence_rows(result: Result) -> list[EvidenceRow]:
    """The findings over all scenarios first, then each scenario's, then the negative control."""
    records = _ordered(result)
    whole = {record.label: record for record in records if record.cell is None and not record.control}
    return [_row(record, whole.get(record.label)) for record in records]


def _row(record: EvidenceRecord, whole: EvidenceRecord | None) -> EvidenceRow:
    scenario = record.cell or ALL_SCENARIOS
    return EvidenceRow(
        arm=record.label.upper(),
        scenario=f"{scenario}, on the CPU on purpose" if record.control else scenario,
        finding=record.finding.value + (f" ({record.code})" if record.code is not None else ""),
        state="ok" if record.control and record.finding is Finding.CPU_FALLBACK else STATES[record.finding],
        figures=_figures(record),
        inputs=_inputs(record),
        why=" ".join((record.sentence, *(f"{note[0].upper()}{note[1:]}." for note in record.notes))),
        repeats=record is not whole
        and whole is not None
        and not record.control
        and (whole.finding, whole.code) == (record.finding, record.code),
    )


def _figures(record: EvidenceRecord) -> tuple[str, ...]:
    gpu, load = record.inputs.gpu, record.inputs.load
    loaded = f"{load.window_s:.1f} s"
    if gpu is None:
        return loaded, "–", "–", "–", "–"
    busy = share(gpu.busy_s / gpu.covered_s) if gpu.covered_s > 0 else "–"
    watts = "–" if gpu.energy_joules is None or load.window_s <= 0 else f"{gpu.energy_joules / load.window_s:.0f} W"
    idle_watts = "–" if gpu.idle_power_watts is None else f"{gpu.idle_power_watts:.0f} W"
    return (
        loaded,
        f"{busy} ({share(gpu.idle_utilisation_low)})",
        f"{watts} ({idle_watts})",
        "–" if record.control else _joules(gpu.joules_per_item),
        "–" if record.control else _joules(gpu.excess_joules_per_item),
    )


def _inputs(record: EvidenceRecord) -> str:
    return (
        f"placement {record.inputs.placement.result}, activity {record.activity or 'unknown'}, "
        f"attributed {_yes(record.attributed)}, worked like a CPU {_yes(record.cpu_witness)}"
    )


def _yes(value: bool | None) -> str:
    return "unknown" if value is None else "yes" if value else "no"


def _joules(value: float | None) -> str:
    return "–" if value is None else number(value)


def summary_lines(result: Result) -> list[str]:
    """One line an arm, one for each scenario that is not like the whole, one for the control."""
    lines = []
    for row, record in zip(evidence_rows(result), _ordered(result), strict=True):
        if row.repeats:
            continue
        _, utilisation, power, joules, _ = row.figures
        energy = "" if joules == "–" else f", {joules} J/image"
        figures = f"; busy {utilisation}, {power}{energy}" if record.inputs.gpu is not None else ""
        lines.append(f"{row.arm} {row.scenario}: {row.finding}{figures}. {record.sentence}")
    return lines


def _ordered(result: Result) -> list[EvidenceRecord]:
    records = result.evidence.records if result.evidence is not None else ()
    places = {cell.name: place for place, cell in enumerate(result.experiment.cells)}
    return sorted(
        records,
        key=lambda record: (record.control, places.get(record.cell, len(places)) if record.cell else -1, record.label),
    )


def gpu_chart(result: Result) -> Chart | None:
    """Utilisation, SM activity and power over the run, with the blocks of each arm behind them."""
    data: list[Figure] = []
    for device in result.gpu:
        name = "" if len(result.gpu) == 1 else f" {device.uuid[:12]}"
        for title, points, factor, panel, dash in (
            ("utilisation", device.utilisation, 100.0, "y", "solid"),
            ("SM activity", device.sm_active, 100.0, "y", "dot"),
            ("power", device.power_watts, 1.0, "y2", "solid"),
        ):
            if not points:
                continue
            data.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "name": title + name,
                    "x": [rounded(seconds / 60.0) for seconds, _ in points],
                    "y": [rounded(factor * value) for _, value in points],
                    "yaxis": panel,
                    "line": {"color": "--ink" if title != "SM activity" else "--muted", "width": 1.5, "dash": dash},
                    "hovertemplate": f"{title}: %{{y:.4~g}} {'W' if panel == 'y2' else '%'}<extra></extra>",
                }
            )
    if not data:
        return None
    control = any(record.control for record in (result.evidence.records if result.evidence is not None else ()))
    return Chart(
        "gpu",
        "What the GPU did",
        "Means over a second, by the driver. Shaded: the blocks of A and of B in their colours"
        + (", the deliberate CPU run in grey" if control else "")
        + "; between the rounds nothing is sent.",
        data,
        {
            "height": 460,
            "xaxis": axis("minutes since the first block", anchor="y2"),
            "yaxis": axis("% of the time", range=[0, 101.5], domain=[0.54, 1]),
            "yaxis2": axis("power, W", rangemode="tozero", domain=[0, 0.46]),
            "shapes": _shading(result),
            "legend": LEGEND_ABOVE,
        },
    )


def _shading(result: Result) -> list[Figure]:
    spans = [(b.start_s, b.start_s + b.duration_s, f"--{b.label}") for b in result.blocks]
    origin_ns = _origin_ns(result)
    for record in result.evidence.records if result.evidence is not None else ():
        if record.control and origin_ns is not None:
            spans += [
                ((w.start_ns - origin_ns) / 1e9, (w.end_ns - origin_ns) / 1e9, "--muted")
                for w in record.inputs.load.windows
            ]
    return [
        {
            "type": "rect",
            "xref": "x",
            "yref": "paper",
            "x0": rounded(start / 60.0),
            "x1": rounded(end / 60.0),
            "y0": 0,
            "y1": 1,
            "line": {"width": 0},
            "fillcolor": colour,
            "opacity": 0.16,
            "layer": "below",
        }
        for start, end, colour in spans
    ]


def _origin_ns(result: Result) -> int | None:
    """When the run's first block began, on the clock of the evidence."""
    windows = [
        window.start_ns
        for record in (result.evidence.records if result.evidence is not None else ())
        if not record.control
        for window in record.inputs.load.windows
    ]
    return min(windows, default=None)
