"""GPU verification: judges where the model ran once all blocks are done, and shows the findings with their signals.

One arm also runs on the CPU deliberately, the control run: a detector that never says "no" proves nothing, so the
control must come out CPU_FALLBACK.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import loadgen.report.charts as charts
import loadgen.report.document as doc
from loadgen.base.quantities import number, share
from loadgen.experiment.prompts import SETTLING
from loadgen.experiment.schedule import ScheduledBlock, has_load
from loadgen.findings.gpu.analysis import ControlRun, GpuFound, analyse, assess_run
from loadgen.findings.gpu.records import EvidenceFile, EvidenceRecord, GpuFinding, ReadingsError
from loadgen.findings.registry import Probe
from loadgen.records.probes import Variant
from loadgen.records.run import ArmRequest, Experiment, Kind, Label, Workload, item_of, shown
from loadgen.records.samples import read_samples
from loadgen.records.store import RunStore, read_run
from loadgen.verdict.result import Result

if TYPE_CHECKING:
    from loadgen.measure.context import RunContext

CONTROL_SECONDS = 12.0
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


def measure(context: RunContext) -> None:
    """Judge, run the control, judge again with it. The first judgement survives an interrupt."""
    recording = context.gpu
    if not recording.running:
        return
    recording.note_processes()  # of this restart: they have ended by the time they are judged
    if not context.last:
        return
    context.enter("verifying where the model ran")
    _judge(context, {})
    controls = _run_controls(context)
    recording.stop()
    _judge(context, controls)


def _judge(context: RunContext, controls: Mapping[Label, ControlRun]) -> None:
    recording = context.gpu
    try:
        evidence = assess_run(
            context.store.directory,
            [recording.FILE],
            arms=recording.records,
            blocks=read_run(context.store.directory).blocks,
            gaps=recording.gaps,
            pids=recording.pids,
            controls=controls,
            processes_unknown=recording.processes_unknown,
        )
    except ReadingsError as exc:
        context.progress.now(f"no GPU evidence: {exc}")
    else:
        context.store.write(evidence)


def _run_controls(context: RunContext) -> dict[Label, ControlRun]:
    """Run one arm as a control: whether the detector can say "no" does not depend on the arm."""
    experiment = context.experiment
    embedded = [request for request in experiment.arms if request.embedded]
    if not experiment.gpu_control or not embedded:
        return {}
    if experiment.deployment != "embedded":
        context.progress.now("no CPU control run: servers of a compose stack stay on the device that .env sets")
        return {}
    movable = [request for request in embedded if not request.own_repository]
    if not movable:
        context.progress.now("no CPU control run: your own repository stays on the device that its config sets")
        return {}
    request = min(movable, key=lambda request: request.target != "native")
    context.progress.now(f"{shown(request.label)} once more, on the CPU: the control run")
    controls: dict[Label, ControlRun] = {}

    def run_control() -> None:
        controls[request.label] = _run_control(context, request)

    failure = context.attempt(run_control, OSError, ValueError)
    if failure is not None:
        context.progress.now(f"no CPU control run: {failure}")
    return controls


def _run_control(context: RunContext, request: ArmRequest) -> ControlRun:
    """Start the server on the CPU, load it between two idle gaps, stop it. Raises what starting and loading raise.

    The control's folder, DIR/gpu/control, looks like a run's.
    """
    workload = control_workload(context.experiment)
    store = RunStore(context.store.directory / "gpu" / "control")
    with context.varied(request.label, control_variant(context.experiment, request), store, "control") as started:
        arm = replace(started, request=request)
        record = context.gpu.describe(arm.record(), store)
        runner = context.load_runner({request.label: arm}, store)
        runner.warm_up([workload])
        context.gpu.gap()  # a new gap: after the load a GPU cools down for a while, and its idle power falls
        block = runner.measure(ScheduledBlock(0, workload, 0, request.label, 0))
        context.gpu.gap()
        pids = frozenset(arm.deployment.pids())
    return ControlRun(arm=record, block=block, samples=read_samples(store.samples_path(block.index)), pids=pids)


def control_variant(experiment: Experiment, request: ArmRequest) -> Variant:
    """The arm on the CPU, in the engine's default mode there and in FP32, which every engine offers."""
    settings = {"mode": "", "precision": "fp32", "device": "cpu"}
    payload, transport = experiment.payload_of(request), experiment.transport_of(request)
    return Variant(payload=payload, transport=transport, settings=settings)


def control_workload(experiment: Experiment) -> Workload:
    """The smallest request of the run, sent one after the other; for a language model, which may be slow on a CPU, the
    small prompt that is also sent before each block."""
    batch_size = min(workload.batch_size for workload in experiment.workloads if workload.has_blocks)
    return Workload(
        prompt_tokens=SETTLING.prompt_tokens if experiment.kind is Kind.TOKENS else None,
        output_tokens=SETTLING.output_tokens if experiment.kind is Kind.TOKENS else None,
        scenario="single" if batch_size == 1 else "batched",
        batch_size=batch_size,
        concurrency=1,
        requests=2,
        seconds=CONTROL_SECONDS,
        max_seconds=2 * CONTROL_SECONDS,
        rounds=1,
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


PROBE = Probe(
    wanted=has_load,
    measure=measure,
    records=(EvidenceFile,),
    finding=GpuFound,
    analyse=analyse,
    sections={"Proof": (gpu_verification,)},
)
