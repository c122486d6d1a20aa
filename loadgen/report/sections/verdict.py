"""The first screen: whether the run is valid, under which conditions, who wins, why, and the basis of the figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import PurePath

import loadgen.report.document as doc
from loadgen.base.quantities import counted, join, sentence, share
from loadgen.checks.gpu import gpu_present
from loadgen.checks.registry import gravest, reached, validity
from loadgen.checks.run import parity as answers_agree
from loadgen.checks.run import parity_figures
from loadgen.checks.tokens import tokens_agree
from loadgen.metrics.comparisons import leading_comparisons
from loadgen.records.checks import Check
from loadgen.records.machine import own_devices, used_gpus
from loadgen.records.model_config import padding_in_effect
from loadgen.records.payloads import inputs_in_brief
from loadgen.records.run import ArmRecord, Experiment, shown
from loadgen.records.targets import ROUTES, Kind
from loadgen.report.charts import arm_style, base_and_arm, several
from loadgen.report.sections.causes import causes_note, time_spent
from loadgen.report.sections.checks import check_rows, counts, standing_style, style_of_check
from loadgen.report.sections.comparisons import against_baseline, comparison_table, threshold_sentence
from loadgen.report.sections.gpu import ALL_SCENARIOS, findings
from loadgen.report.sections.surface import surface_chart
from loadgen.report.sections.throughput import throughput_chart
from loadgen.verdict.result import Result

MOST_FAILED = 4
"""Most failed checks that a terminal shows with the verdict; all of them are in their own section."""
MOST_TITLES = 3


def verdict(result: Result) -> doc.Section | None:
    """Valid or not, the finding, the conditions and arms, and every check that takes the verdict away."""
    conclusion, blamed = result.verdict, gravest(result.checks)
    warned = sum(style_of_check(row) == "warning" for row in check_rows(result))
    warnings = f", {counted(warned, 'warning')}" if warned and conclusion.valid else ""
    failed = [doc.Item(text, "failed") for text in conclusion.untold]
    few = failed[:MOST_FAILED]
    if more := len(failed) - len(few):
        few.append(doc.Item(f"and {more} more failed checks, below", "failed"))
    broken = not all(threshold.state == "kept" for threshold in result.thresholds)
    no_gpu = {sentence(check.detail) for check in result.checks if check.name == gpu_present.name}
    caveats = [doc.Item(caveat, "note" if caveat in no_gpu else "warning") for caveat in conclusion.caveats]
    concluded = any(comparison.verdict != "invalid" for comparison in leading_comparisons(result.comparisons))
    in_full = conclusion.sentence if concluded else ""
    arms = [doc.Item(name, arm_style(result, label), shown(label)) for label, name in result.titles.items()]
    return doc.section(
        "",
        doc.Panel(
            f"{validity(result.checks)}{warnings}",
            standing_style(result),
            result.headline,
            (
                doc.Text(conclusion.consequence),
                doc.Text("" if blamed is None else f"→ {blamed.remedy}"),
                doc.Items(few, on=doc.TERMINAL),
                doc.Items(failed, on=doc.PAGES),
                doc.Text((broken and threshold_sentence(result)) or "", "failed", on=doc.HTML),
                doc.Items(arms),
                *filter(None, [surface_chart(result) or throughput_chart(result)]),
                *(doc.Text(line, "note") for line in conditions_in_brief(result)),
                doc.Items(caveats),
                doc.Text(in_full, on=doc.TERMINAL | doc.MARKDOWN),
                doc.Fold("The verdict in full", (doc.Text(in_full),), on=doc.HTML),
            ),
        ),
    )


def conditions_in_brief(result: Result) -> tuple[str, str]:
    """Two lines: model, weights, precision and hardware; inputs, transport, batches and date."""
    experiment = result.experiment
    model = _per_arm(result, lambda arm: str(arm.in_effect.get("model") or experiment.model))
    weights = _per_arm(result, lambda arm: str(arm.in_effect.get("weights") or ""), "weights not reported")
    precision = _per_arm(result, lambda arm: str(arm.in_effect.get("precision") or "precision not reported"))
    sizes = sorted({workload.batch_size for workload in experiment.workloads if workload.has_blocks})
    started = result.environment.started_at if result.environment else ""
    described = result.environment.inputs if result.environment else {}
    swept = [workload.sequence_length for workload in experiment.workloads if workload.sequence_length is not None]
    sent = f"{inputs_in_brief(described, swept)} as {' and '.join(experiment.payloads)}".removeprefix(" as ")
    second = [f"{sent} over {ROUTES[experiment.transport].title}"]
    if experiment.kind is Kind.TOKENS:
        second = [_prompts_in_brief(experiment)]
    elif sizes:
        second.append(f"batch size{'s' if len(sizes) > 1 else ''} {', '.join(map(str, sizes))}")
    second.append(_padding(result))
    if started:
        second.append(f"{started[:16].replace('T', ' ')} UTC")
    first = (
        model if model and " " not in model else experiment.model,
        weights,
        precision,
        _per_arm(result, lambda arm: _hardware(result, arm)),
    )
    return " · ".join(filter(None, first)), " · ".join(filter(None, second))


def _prompts_in_brief(experiment: Experiment) -> str:
    """ "prompts of 32 tokens and answers of 64 over OpenAI's completions" """
    loads = experiment.workloads
    lengths = {(w.prompt_tokens or 0, w.output_tokens or 0) for w in loads if not w.replayed}
    protocols = {ROUTES[experiment.transport_of(arm)].title: None for arm in experiment.arms}
    sizes = [f"prompts of {prompt:,} tokens and answers of {output:,}" for prompt, output in sorted(lengths)]
    files = (w.replayed for w in loads)
    sizes += dict.fromkeys(f"the prompts of {PurePath(file).name}" for file in files if file)
    return f"{', '.join(sizes) or 'prompts'} over {join(list(protocols))}"


def _padding(result: Result) -> str:
    """Which items may share a batch; empty where the servers report no rule."""
    if not any(arm.in_effect.get("pad_to") for arm in result.arms):
        return ""
    words = {None: "padding not reported", "none": "only equal lengths share a batch"}
    return _per_arm(result, lambda arm: words.get(rule := padding_in_effect(arm), f"batches padded to {rule}"))


def _per_arm(result: Result, describe: Callable[[ArmRecord], str], missing: str = "not reported") -> str:
    """The description that all arms share, or one per arm, `missing` without one; empty if no arm has one."""
    descriptions = {arm.label: describe(arm) for arm in result.arms}
    if len(set(descriptions.values())) <= 1:
        return next(iter(descriptions.values()), "")
    return ", ".join(f"{result.names[label]} {words or missing}" for label, words in descriptions.items())


def _hardware(result: Result, arm: ArmRecord) -> str:
    """The processor that an arm's server reports, or that of this machine where abserve started the server."""
    environment = result.environment
    device = str(arm.in_effect.get("device"))
    on_cpu = device.startswith("cpu")
    for document in (arm.gpu_info, environment.gpu if environment and arm.launched else None):
        used = used_gpus(document)
        if used and not on_cpu:
            name = next((str(gpu.get("name") or "GPU") for gpu in own_devices(document, used)), "GPU")
            return name if len(used) == 1 else f"{len(used)} × {name}"
    without_gpu = environment is not None and environment.gpu.get("status") not in (None, "ok", "unknown")
    if arm.launched and environment is not None and (on_cpu or without_gpu):
        name = str(environment.host.get("cpu_model") or "of unknown model")
        return name if "CPU" in name else f"CPU {name}"
    return "CPU" if on_cpu else device if "," in device else "device not reported"


def overview(result: Result) -> doc.Section | None:
    """The leading comparison of each scenario and arm with the baseline."""
    leading = leading_comparisons(against_baseline(result))
    base, arm = base_and_arm(result)
    return doc.section(
        "Overview",
        comparison_table(result, leading),
        doc.Text(
            f"The leading metric of each scenario. Left of the line {base} is better, right of it {arm}; an interval "
            f"inside the shaded band (±{share(result.experiment.equivalence_margin)}) is no meaningful difference."
            if leading
            else "",
            "note",
        ),
        doc.Link("Every comparison", "#comparisons") if leading else None,
        on=doc.HTML,
    )


def brief_why(result: Result) -> doc.Section | None:
    """Where a request's time goes in the most loaded scenario, the reasons for the difference, and what is not known.
    Never empty."""
    main = result.verdict.main_scenario
    explained = [scenario for scenario in result.verdict.scenarios if scenario.workload == main and scenario.reasons]
    spent = [] if main is None else time_spent(result, main)
    blocks: list[doc.Block] = [doc.Text(f"In {main}:", "note")] if spent or explained else []
    blocks.append(doc.Items(spent))
    for scenario in explained:
        if several(result):
            which = f"{result.names[scenario.arm]} against {result.names[scenario.baseline]}"
            blocks.append(doc.Items([doc.Item("", arm_style(result, scenario.arm), which, scenario.reasons)]))
        else:
            blocks += map(doc.Text, scenario.reasons)
    blocks.append(doc.Text(causes_note(result), "note"))
    blocks.append(doc.Link("The causes, and the other scenarios", "#why"))
    return doc.section("Why", *blocks, on=doc.HTML, half=True)


def brief_proof(result: Result) -> doc.Section | None:
    """The basis of the figures, in a line each."""
    return doc.section(
        "Proof", doc.Items(proof(result)), doc.Link("Every check and finding", "#proof"), on=doc.HTML, half=True
    )


def proof(result: Result) -> list[doc.Item]:
    """Equal answers, the GPU verification, failed requests, the checks and the thresholds."""
    compared = any(check.name == answers_agree.name for check in reached(result.checks))
    tokens = [row for row in check_rows(result) if row.name == tokens_agree.name]
    items = [_item(style_of_check(row), row.detail) for row in tokens]
    items += [*([_parity(result)] if compared else []), *_devices(result)]
    requests = sum(summary.requests for summary in result.summaries)
    errors = sum(summary.errors for summary in result.summaries)
    if requests:
        items.append(_item("failed" if errors else "ok", f"{errors:,} of {counted(requests, 'request')} failed"))
    items += _checks(result)
    if text := threshold_sentence(result):
        met = all(threshold.state == "kept" for threshold in result.thresholds)
        items.append(_item("ok" if met else "failed", text))
    return items


def _item(style: doc.Style, text: str) -> doc.Item:
    return doc.Item(sentence(text), style)


def _parity(result: Result) -> doc.Item:
    parity, arms = result.parity, "all" if several(result) else "both"
    if parity is None or not parity.cases:
        return _item("unknown", f"whether {arms} arms give the same answers was not measured")
    text = f"{parity_figures(parity)} in {counted(len(parity.cases), 'case')}"
    if parity.ok:
        return _item("ok", f"{arms} arms give the same answers: {text}")
    return _item("failed", f"the arms give different answers: {text}")


def _devices(result: Result) -> list[doc.Item]:
    overall = [finding for finding in findings(result) if finding.scenario == ALL_SCENARIOS]
    if overall:
        return [
            _item(finding.style, f"GPU verification of {finding.arm}, all scenarios: {finding.words}")
            for finding in overall
        ]
    present = next((check for check in result.checks if check.name == gpu_present.name), None)
    if present is None or present.ok:
        return []
    return [_item("note" if present.ok is False else "unknown", present.detail)]


def _checks(result: Result) -> list[doc.Item]:
    rows = check_rows(result)
    failed = [row for row in rows if style_of_check(row) == "failed"]
    warned = [row for row in rows if style_of_check(row) == "warning"]
    items = []
    if failed:
        items.append(_item("failed", f"failed checks take verdicts away: {_titles(failed)}"))
    if warned:
        items.append(_item("warning", f"read the figures with care: {_titles(warned)}"))
    return [*items, _item("note" if failed else "ok", f"{counted(len(rows), 'check')}: {counts(rows)}")]


def _titles(rows: Sequence[Check]) -> str:
    named = "; ".join(f"“{row.title}”" for row in rows[:MOST_TITLES])
    return named + (f" and {len(rows) - MOST_TITLES} more" if len(rows) > MOST_TITLES else "")
