"""Checks of the run as a whole: that it finished, that answers are right and that nothing is missing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

import numpy as np

from loadgen.base.quantities import counted, join, number, share
from loadgen.checks.registry import (
    AGAIN,
    Judgement,
    check,
    of_tensors,
    of_tokens,
    per_comparison,
    per_load,
    per_workload,
)
from loadgen.findings.rate_search import RatesFound, Trial
from loadgen.metrics.comparisons import MIN_PAIRS, Comparison, leading_comparisons, side_by_side
from loadgen.metrics.facts import PLAN, Facts, WorkloadFacts
from loadgen.metrics.registry import GOODPUT, METRICS, TYPICAL_LATENCY, leading_metric
from loadgen.metrics.summaries import figure_of
from loadgen.records.checks import Severity
from loadgen.records.payloads import GUESSED
from loadgen.records.probes import AnswersCompared, CacheProbe, ServerStart, ShadowRecord, TokensCompared
from loadgen.records.run import Label, ParityRecord, Workload, option_of
from loadgen.records.store import StoredRun
from loadgen.records.targets import ROUTES, Kind
from loadgen.stats.percentiles import samples_needed

LEAST_ALIKE = 0.5
"""Share of the probe's prompts to which all arms give the same first token, below which a check warns: rounding changes
few of them."""
FIRSTS_THAT_PROVE = 16
"""At most one equal first token in so many prompts shows that an arm has another model: one may be alike by chance."""
MOST_DROPPED = 0.01
MOST_LATER = 0.02
"""Share of the latency. On two cores, equal servers of 2.0 ms with copies 2.3 % late were 4.9 % apart, and of 3.7 ms
with copies 1.4 % late 1.1 %."""
LEAST_BLOCKS = 12
LEAST_SHARE = 0.9
"""A server that computes every response takes at least this median share of a new request's time for a repeated one."""
SIGNIFICANCE = 0.005
"""p of new requests being slower by chance. What looks like a cache is probed once more and judged by both probes, so
that fewer than 1 of 300 servers without one fail."""


@check(
    "the run finished",
    "The run did not finish",
    "invalidates",
    "Run the comparison again and let it finish.",
    unknown="invalidates",
    threshold="finished",
    not_known="It is not known whether the run finished",
    fault="incomplete run",
)
def run_finished(facts: Facts) -> Iterator[Judgement]:
    names = facts.names
    state = facts.run.state
    if state is None:
        yield Judgement(None, "run.json is missing", scope=PLAN)
        return
    detail = {
        "running": f"the run {'is still running' if facts.run.running else 'was killed during'}: {state.phase}",
        "finished": "finished",
        "interrupted": f"the run was interrupted during: {state.phase}",
        "failed": f"the run failed during {state.phase}: {state.error}",
    }[state.state]
    remedy = f"Find out why {names[state.failed_arm]} fails, and run again." if state.failed_arm else None
    yield Judgement(state.state == "finished", detail, state.state, scope=PLAN, remedy=remedy)


COMPARISONS, VERDICT = "comparisons", "verdict"
"""The steps of the analysis without which there is no winner."""


@check(
    "everything that was stored was analysed",
    "Part of the run could not be analysed",
    "invalidates",
    AGAIN,
    fault="incomplete run",
)
def analysed(facts: Facts) -> Iterator[Judgement]:
    """Name every file that cannot be read, and every step of the analysis that failed; skipped without one. What a
    check needed of a finding that failed, that check says."""
    for problem in facts.run.problems:
        yield Judgement(False, problem)
    for step, why in facts.failures.items():
        severity: Severity = "invalidates" if step in (COMPARISONS, VERDICT) else "warns"
        yield Judgement(False, f"the {step} could not be computed: {why}", step, severity=severity)


@of_tensors(
    "the arms give the same answers",
    "The arms give different answers",
    "invalidates",
    "Serve the same weights, precision and preprocessing on every arm; the parity table names the failing case.",
    unknown="invalidates",
    not_known="The answers were not compared",
    fault="wrong answers",
)
def parity(facts: Facts) -> Iterator[Judgement]:
    """Judge the answers; skipped where an arm did not answer a request, which `parity_answered` says."""
    record = facts.run.parity
    if record is not None and not _all_answered(record):
        return
    if record is None or (not record.cases and record.error is None):
        shadow = facts.run.record_of(ShadowRecord)
        if shadow is not None and shadow.drawn:
            detail = "the tokens of all texts were drawn (temperature above 0 or not given), which may differ"
            yield Judgement(None, detail, severity="warns")
        else:
            yield Judgement(None, "parity was not measured")
        return
    relative, figures = record.largest_relative_error, parity_figures(record)
    wrong = [case for case in record.cases if not case.ok]
    failed = [case.name for case in wrong]
    against_record = bool(wrong) and all(case.kind == "recorded" for case in wrong)
    detail = record.error or f"{figures} in {counted(len(record.cases), 'case')}"
    if failed and record.error is None:
        cases = f"{len(failed)} of {len(record.cases)} cases ({', '.join(failed)})"
        does = "do not give the recorded answers" if against_record else "give different answers"
        detail = f"the arms {does} in {cases}, so their speeds cannot be compared; {figures}"
    yield Judgement(
        record.ok and not failed and record.error is None,
        detail,
        record.lowest_cosine if relative is None else relative,
        record.threshold_cosine if relative is None else record.tolerance_relative,
        arms=tuple(dict.fromkeys(case.label for case in wrong)),
        failed="The answers differ from the recorded ones" if against_record else "",
        remedy="Serve the model, weights and precision of the recording, or leave --check-answers out."
        if against_record
        else None,
    )


@of_tensors(
    "every arm answers the parity check",
    "An arm did not answer the parity check",
    "invalidates",
    "Read what the arm answered or logged, and let it answer every request of the load.",
    fault="failed requests",
)
def parity_answered(facts: Facts) -> Iterator[Judgement]:
    """Name the arm that refused or did not answer a request, and why; skipped without one."""
    record = facts.run.parity
    if record is None or record.error is None or _all_answered(record):
        return
    arm = next((arm for arm in facts.run.arms if arm.label == record.failed_arm), None)
    limit = None if arm is None else arm.in_effect.get("max_batch_size")
    remedy = None
    refused = record.refused_items
    if arm is not None and isinstance(limit, int) and refused is not None and limit < refused:
        remedy = (
            f"Raise max-batch-size of {facts.names[arm.label]} from {limit} to {refused}, as with "
            f"{option_of(arm.label, 'option')} max-batch-size={refused}."
        )
    yield Judgement(False, record.error, refused, remedy=remedy, arms=(arm.label,) if arm else ())


def _all_answered(record: ParityRecord) -> bool:
    """Whether no arm refused a request, nor left one without an answer; older runs store refusals alone."""
    return record.answered and record.refused_items is None


def parity_figures(record: ParityRecord) -> str:
    """The figures of the worst case, as text, by the kinds of the outputs."""
    relative, kinds = record.largest_relative_error, set(record.kinds.values())
    figures = [] if kinds and "embedding" not in kinds else [f"lowest cosine {record.lowest_cosine or 0.0:.6f}"]
    if relative is not None and record.tolerance_relative is not None and kinds != {"labels"}:
        figures.insert(0, f"largest relative error {relative:.1e} (tolerance {record.tolerance_relative:.1e})")
    figures.append(order_words(record.lowest_share("top1"), record.lowest_share("top5")))
    if "labels" in kinds:
        equal = all(case.ok or record.kinds.get(str(case.output)) != "labels" for case in record.cases)
        figures.append("labels are equal" if equal else "labels differ")
    return ", ".join(filter(None, figures))


def order_words(top1: float | None, top5: float | None) -> str:
    """ "top-1 agrees on 100 %, top-5 on 98 %"; empty without logits."""
    shares = [f"top-1 agrees on {share(top1, 3)}" if top1 is not None else "", f"top-5 on {share(top5, 3)}"]
    return ", ".join(shares if top5 is not None else shares[:1])


@of_tensors(
    "the answers depend on the inputs",
    "The answers do not depend on the inputs",
    "invalidates",
    "Find out why that server answers every input alike: it may not compute at all.",
    fault="wrong answers",
)
def answers_depend_on_inputs(facts: Facts) -> Iterator[Judgement]:
    """Judge whether different inputs get different answers. Skipped without a record, and for the null engine; a model
    whose labels alone are alike may be right."""
    record = facts.run.parity
    engines = {arm.label: arm.in_effect.get("engine") for arm in facts.run.arms}
    if record is None or record.alike is None:
        return
    judged = {label: alike for label, alike in record.alike.items() if engines.get(label) != "null"}
    same = [label for label, alike in judged.items() if alike and set(alike) == set(record.kinds)]
    if same:
        whose = join([facts.names[label] for label in same])
        detail = f"the answers of {whose} do not depend on the inputs: all of them are alike"
        only_labels = set(record.kinds.values()) == {"labels"}
        yield Judgement(False, detail, len(same), severity="warns" if only_labels else None, arms=tuple(same))
    elif judged:
        yield Judgement(True, "different inputs get different answers", 0)


@of_tokens(
    "the arms begin their answers with the same tokens",
    "The arms begin their answers with other tokens",
    "invalidates",
    "Serve the same model, weights and chat template on every arm, and compare what each answers to one prompt.",
    threshold=LEAST_ALIKE,
    fault="wrong answers",
    not_known="It is not known whether the arms serve the same model",
)
def same_first_tokens(facts: Facts) -> Iterator[Judgement]:
    """Judge how many prompts of the probe get the same first token, as an id or as text, as from the baseline: at most
    one in 16 takes the verdict away, fewer than half warn. Skipped for runs from before they were compared."""
    names = facts.names
    experiment, counts = facts.run.experiment, dict[Label, tuple[int, int]]()
    for record in facts.run.records_of(TokensCompared):
        if record.firsts is not None:
            firsts, equal = counts.get(record.label, (0, 0))
            counts[record.label] = firsts + record.firsts, equal + record.equal_firsts
    if not counts:
        return
    baseline = names[experiment.baseline.label]
    if silent := [names[label] for label, (firsts, _) in counts.items() if not firsts]:
        detail = f"{baseline} and {join(silent)} read prompts in other forms, or one of them sends neither ids nor text"
        yield Judgement(None, detail)
    judged = {label: (equal, firsts) for label, (firsts, equal) in counts.items() if firsts}
    if not judged:
        return
    apart = tuple(label for label, (equal, firsts) in judged.items() if equal < LEAST_ALIKE * firsts)
    is_certain = not any("temperature" in arm.body for arm in experiment.arms)
    others = [label for label, (equal, firsts) in judged.items() if firsts >= FIRSTS_THAT_PROVE * max(equal, 1)]
    parts = {label: equal / firsts for label, (equal, firsts) in judged.items()}
    detail = join([
        f"{equal} of {firsts} answers of {names[label]}" for label, (equal, firsts) in judged.items()
        if not apart or label in apart
    ])  # fmt: skip
    detail += f" begin as those of {baseline} do"
    if others and is_certain:
        detail += f": {join([names[label] for label in others])} has another model, or prompts reach it differently"
    yield Judgement(
        not apart, detail, min(parts.values()), severity=None if others and is_certain else "warns", arms=apart
    )


@of_tensors(
    "the inputs have values that the model takes",
    "The values of some inputs are made up",
    "warns",
    "Send your own with --inputs FILE: a model may do less, or other, work for 0 and 1.",
)
def inputs_are_known(facts: Facts) -> Iterator[Judgement]:
    """Skipped unless integers were drawn of which neither a file nor a server says what they may be."""
    inputs = facts.run.environment.inputs if facts.run.environment is not None else {}
    _, guessed, names = str(inputs.get("kind", "")).partition(GUESSED)
    if guessed:
        yield Judgement(False, f"every integer of {names} is 0 or 1", names)


@check(
    "every arm got the same payload",
    "The arms got different payloads",
    "invalidates",
    "Give every arm the same --payload.",
    threshold="equal",
    fault="unfair configuration",
)
def same_payload(facts: Facts) -> Iterator[Judgement]:
    names = facts.names
    experiment = facts.run.experiment
    first, *others = experiment.payloads
    if others:
        sent = {names[arm.label]: experiment.payload_of(arm) for arm in experiment.arms}
        apart = join([arm if payload in arm else f"{arm} {payload}" for arm, payload in sent.items()])
        yield Judgement(False, f"the arms got different payloads ({apart})", ", ".join(experiment.payloads))
    elif facts.run.blocks or facts.run.records_of(ServerStart):
        yield Judgement(True, f"{first} over {experiment.transport}", first)
    else:
        yield Judgement(None, "nothing was sent", first)


@check(
    "the servers' certificates are verified",
    "A server's certificate was not verified",
    "warns",
    "Trust the server's authority with --a-ca FILE instead of --a-insecure.",
    threshold="verified",
)
def certificates(facts: Facts) -> Iterator[Judgement]:
    """Skipped where no arm is reached over TLS."""
    names = facts.names
    experiment = facts.run.experiment
    secured = [arm for arm in experiment.arms if arm.tls_addresses or (arm.embedded and experiment.tls)]
    open_arms = [names[arm.label] for arm in secured if arm.access.insecure]
    if open_arms:
        detail = f"the certificate of {join(open_arms)} was not verified, so another server may have answered"
        yield Judgement(False, detail, "not verified")
    elif secured:
        yield Judgement(True, f"verified for {join([names[arm.label] for arm in secured])}", "verified")


@check(
    "all arms or none are reached over TLS",
    "Only some arms are reached over TLS",
    "warns",
    "Give every arm an https:// address, or none: encryption takes time on both sides.",
    threshold="equal",
)
def same_encryption(facts: Facts) -> Iterator[Judgement]:
    """Skipped where no arm is reached over TLS."""
    names = facts.names
    experiment = facts.run.experiment
    encrypted = [
        names[arm.label]
        for arm in experiment.arms
        if (experiment.tls and arm.embedded)
        or (arm.grpc if ROUTES[experiment.transport].is_grpc else arm.target) in arm.tls_addresses
    ]
    if encrypted:
        alike = len(encrypted) == len(experiment.arms)
        yield Judgement(alike, "all use TLS" if alike else f"only {join(encrypted)} uses TLS", ", ".join(encrypted))


@check(
    "no request failed",
    "Requests failed",
    "invalidates",
    "Read the error message and the log of that server.",
    unknown="invalidates",
    threshold=0,
    not_known="No requests were sent",
    fault="failed requests",
)
@per_load
def request_errors(load: WorkloadFacts, facts: Facts) -> Judgement:
    """Judge failed requests. A rate search counts a failed request as a late one instead, and goodput as one that is
    not good: there a server may refuse what it could not answer in time."""
    sent = {
        label: sum(b.requests for b in load.blocks if b.label == label)
        for label in facts.run.experiment.loaded(load.workload)
    }
    requests, errors = sum(sent.values()), sum(block.errors for block in load.blocks)
    value = errors / requests if requests else None
    messages = [message for block in load.stored for message in block.record.error_messages]
    detail = f"{errors:,} of {counted(requests, 'request')} failed"
    detail += "".join(f"; first message: {message}" for message in messages[:1])
    is_counted = bool(errors) and leading_metric(load.workload) is GOODPUT
    if is_counted:
        detail += "; goodput counts them as not good, and times are those of the other answers"
    if silent := [facts.names[label] for label, count in sent.items() if not count]:
        detail = f"no request was sent to {join(silent)}" + (f"; {detail}" if errors else "")
        whys = [block.note for block in load.blocks if block.note and not sent[block.label]]
        return Judgement(False if errors else None, detail + "".join(f": {why}" for why in whys[:1]), value)
    failing = {block.label for block in load.blocks if block.errors}
    blamed = tuple(label for label in sent if label in failing)
    return Judgement(not errors, detail, value, severity="warns" if is_counted else None, arms=blamed)


@of_tensors(
    "answers under load equal those of single requests",
    "Answers under load are wrong",
    "invalidates",
    "Find out why that server answers concurrent requests differently: its speed means nothing until it is right.",
    unknown="invalidates",
    threshold=0,
    not_known="Answers under load were not compared",
    fault="wrong answers",
)
@per_workload
def answers_under_load(load: WorkloadFacts, facts: Facts) -> Judgement | None:
    """Judge the answers under load. Skipped for runs stored before answers under load were compared."""
    run, name = facts.run, load.workload.name
    loaded = loaded_arms(run, load.workload)
    if not loaded or not run.has_records_of(AnswersCompared):
        return None
    return _answers(facts, [record for record in run.records_of(AnswersCompared) if record.workload == name], loaded)


def loaded_arms(run: StoredRun, workload: Workload) -> set[tuple[Label, int]]:
    """The arms that had the workload's load, in blocks or in trials of a search, with the start of the servers."""
    blocks = {
        (block.record.label, block.record.restart) for block in run.blocks if block.record.workload == workload.name
    }
    return blocks | {(trial.label, trial.restart) for trial in run.records_of(Trial) if trial.workload == workload.name}


def _answers(facts: Facts, compared: Sequence[AnswersCompared], loaded: set[tuple[Label, int]]) -> Judgement:
    wrong = [part for part in compared if part.wrong]
    errors = [part.error for part in compared if part.error]
    silent = {label for label, _ in loaded - {(part.label, part.restart) for part in compared}}
    names = facts.names
    missing = [names[label] for label in facts.run.experiment.labels if label in silent]
    if wrong:
        detail = "; ".join(
            f"{sum(part.wrong for part in wrong if part.label == label):,} of "
            f"{sum(part.answers for part in compared if part.label == label):,} answers of {names[label]} are wrong: "
            + next(str(part.fault) for part in wrong if part.label == label)
            for label in dict.fromkeys(part.label for part in wrong)
        )
    elif errors:
        detail = errors[0]
    elif missing:
        detail = f"no answers of {join(missing)} were compared"
    else:
        answers, items = sum(part.answers for part in compared), sum(part.items for part in compared)
        worst = max((part.relative_max or 0.0 for part in compared), default=0.0)
        recorded = sum(part.recorded for part in compared)
        of_record = f", {recorded:,} compared with recorded answers," if recorded else ""
        detail = (
            f"{answers:,} answers ({items:,} items){of_record} differ by at most {worst:.1e} "
            f"(tolerance {compared[0].tolerance_relative:.1e})"
        )
        first, fifth = (
            min((value for part in compared if (value := getattr(part, name)) is not None), default=None)
            for name in ("top1", "top5")
        )
        detail = ", ".join(filter(None, (detail, order_words(first, fifth))))
    is_complete = not errors and not missing
    ok = False if wrong else True if is_complete else None
    value = sum(part.wrong for part in compared) if is_complete else None
    blamed = tuple(dict.fromkeys(part.label for part in wrong))
    return Judgement(ok, detail, value, arms=blamed)


@check(
    "repeated requests take as long as new ones",
    "Repeated requests are faster than new ones",
    "invalidates",
    "Turn off the response cache of that server.",
    threshold=LEAST_SHARE,
    not_known="Caches could not be looked for",
    fault="unfair configuration",
)
def repeated_requests(facts: Facts) -> Iterator[Judgement]:
    names = facts.names
    probes = facts.run.records_of(CacheProbe)
    if not probes:
        return
    shares = {probe.label: part for probe in probes if (part := shortened_to(probe)) is not None}
    cached = [probe.label for probe in probes if answers_from_memory(probe)]
    parts = []
    if shares:
        times = join([f"{share(part)} on {names[label]}" for label, part in shares.items()])
        parts.append(f"time of a repeated request, as a share of a new one's: {times}")
        if cached:
            parts[0] += f", so {join([names[label] for label in cached])} answers from a cache"
    errors = [f"{names[probe.label]} did not answer the probe: {probe.error}" for probe in probes if probe.error]
    ok = False if cached else None if errors else True
    remedies = {Kind.TENSORS: None, Kind.TOKENS: "Turn off the prefix cache of that server."}
    worst = min(shares.values(), default=None)
    yield Judgement(
        ok, "; ".join(parts + errors), worst, remedy=remedies[facts.run.experiment.kind], arms=tuple(cached)
    )


def shortened_to(probe: CacheProbe) -> float | None:
    """Median share of a new request's time that a repeated one of its group takes; None without a whole probe."""
    return median(median(group) / fresh for fresh, group in _groups(probe)) if probe.fresh_ns else None


def answers_from_memory(probe: CacheProbe) -> bool:
    """Whether repeated requests are faster by a relevant amount and by more than chance, the quick ones too: where
    others use the machine, the new request of a group waits for a core more often than those that follow it."""
    part = shortened_to(probe)
    if part is None or part >= LEAST_SHARE or chance(probe) >= SIGNIFICANCE:
        return False
    fresh, again = (float(np.quantile(times, 0.25)) for times in (probe.fresh_ns, probe.repeated_ns))
    return again < LEAST_SHARE * fresh


def chance(probe: CacheProbe) -> float:
    """One-sided p of new requests being slower. Without a cache the new request of a group has each rank with the same
    probability, so the sum of ranks has a known distribution; only the groups must be independent."""
    groups = _groups(probe)
    if not groups:
        return 1.0
    size = len(groups[0][1]) + 1
    ranks = sum(sum(again < fresh for again in group) for fresh, group in groups)
    sums = np.ones(1)
    for _ in groups:
        sums = np.convolve(sums, np.full(size, 1.0 / size))
    return float(sums[ranks:].sum())


def _groups(probe: CacheProbe) -> list[tuple[int, tuple[int, ...]]]:
    each = len(probe.repeated_ns) // max(1, len(probe.fresh_ns))
    return [(fresh, probe.repeated_ns[n * each : (n + 1) * each]) for n, fresh in enumerate(probe.fresh_ns)]


@check(
    "every planned block is complete",
    "Blocks are missing or cut short",
    "invalidates",
    "Find out what cut the block short (a dead server, Ctrl-C, a full disk) and run again.",
    unknown="invalidates",
    not_known="No block was measured",
    fault="incomplete run",
)
@per_workload
def blocks_complete(load: WorkloadFacts, facts: Facts) -> Judgement | None:
    if not load.workload.has_blocks:
        return None
    planned = len(facts.run.experiment.loaded(load.workload)) * load.workload.rounds
    lost = sum(facts.run.partial_blocks.values())
    unfinished = f"; {lost:,} requests of an unfinished block are not compared" if lost else ""
    if not load.blocks:
        return Judgement(None, f"none of {planned} blocks was measured{unfinished}", 0, planned)
    complete = [block for block in load.blocks if block.complete]
    notes = [f"block {block.index}: {block.note}" for block in load.blocks if not block.complete and block.note]
    detail = f"{len(complete)} of {planned} blocks are complete"
    if notes:
        detail += f"; {notes[0]}"
    elif len(complete) < planned:
        detail += unfinished
    ok = len(complete) >= planned and len(complete) == len(load.blocks)
    return Judgement(ok, detail, len(complete), planned)


@check(
    "every search found a rate",
    "A search found no rate",
    "invalidates",
    "Choose a bound that every server can hold (--slo-p99-ms, --limits), or find out what cut it short.",
    unknown="invalidates",
    not_known="A search was not measured",
    fault="incomplete run",
)
@per_workload
def searches_ended(load: WorkloadFacts, facts: Facts) -> Judgement | None:
    """Judge each search. If no rate holds the bound, or every rate does, there is no rate to compare."""
    if not load.workload.is_search:
        return None
    names, workload = facts.names, load.workload.name
    planned = len(facts.run.experiment.arms) * load.workload.rounds
    rates = [rate for rate in facts.of(RatesFound).rates if rate.workload == workload]
    done = sum(rate.ended == "found" for rate in rates)
    if not any(trial.workload == workload for trial in facts.run.records_of(Trial)):
        return Judgement(None, f"none of {planned} was measured", done, planned)
    notes = [
        f"{names[rate.label]} misses the bound even at {number(rate.failed_rate_per_s or 0.0)}/s, the lowest rate"
        if rate.ended == "none"
        else f"{names[rate.label]} holds the bound even at {number(rate.rate_per_s or 0.0)}/s, the highest rate"
        for rate in rates
        if rate.ended in ("none", "highest")
    ]
    detail = "; ".join([f"{done} of {planned} searches found a rate", *notes[:1]])
    return Judgement(done >= planned, detail, done, planned)


@check(
    "no sample was lost",
    "Samples were lost",
    "invalidates",
    "Check the disk and run again: a lost sample may be a slow one.",
    unknown="invalidates",
    threshold=0,
    not_known="No sample was stored",
    fault="incomplete run",
)
@per_load
def samples_complete(load: WorkloadFacts, _: Facts) -> Judgement:
    problems = [block.problem for block in load.stored if block.problem]
    detail = problems[0] if problems else f"all {len(load.stored)} sample files match their records"
    return Judgement(not problems, detail, len(problems))


@check(
    "every cold start succeeded",
    "A cold start failed",
    "invalidates",
    "Read the log of the server that did not start.",
    unknown="invalidates",
    not_known="No cold start was measured",
    fault="incomplete run",
)
@per_workload
def cold_starts_succeeded(load: WorkloadFacts, facts: Facts) -> Judgement | None:
    if load.workload.scenario != "cold-start":
        return None
    starts = [start for start in facts.run.records_of(ServerStart) if start.compared]
    planned = len(facts.run.experiment.arms) * load.workload.rounds
    if not starts:
        return Judgement(None, f"none of {planned} was measured", 0, planned)
    good = sum(start.error is None and start.first_answer_ns is not None for start in starts)
    errors = [start.error for start in starts if start.error]
    detail = f"{good} of {planned} cold starts succeeded" + (f"; first error: {errors[0]}" if errors else "")
    return Judgement(good >= planned and not errors, detail, good, planned)


@check(
    "the candidate got every request of its share",
    "Copies were dropped",
    "warns",
    "Give the candidate what the primary has, or copy a smaller --share.",
    threshold=MOST_DROPPED,
    caveat=("failed",),
)
def copies_kept(facts: Facts) -> Iterator[Judgement]:
    """Judge the requests that the candidate of a shadow did not get: most are those of bursts, where it is slowest.
    Where both take turns, the times are not those of copies."""
    if (record := facts.run.record_of(ShadowRecord)) is not None and not record.swap:
        detail = f"{record.dropped:,} of {counted(record.copied + record.dropped, 'chosen request')} were dropped"
        missing = f"{detail}, most of them in bursts, so the figures say nothing about these"
        ok = record.dropped_share <= MOST_DROPPED
        yield Judgement(ok, detail if ok else missing, record.dropped_share)


@check(
    "the candidate was asked as early as the primary",
    "The candidate was asked too late",
    "invalidates",
    "Give `abserve shadow` a CPU core of its own, or copy a smaller --share.",
    threshold=MOST_LATER,
    fault="unfair configuration",
)
def copies_in_time(facts: Facts) -> Iterator[Judgement]:
    """Judge how much later the copies of a shadow were sent: an arm that is asked second waits for a processor, or for
    anything else that both share, for about as long."""
    record = facts.run.record_of(ShadowRecord)
    if record is None or record.swap or record.lag_p50_ms is None:
        return
    typical = [figure_of(summary, TYPICAL_LATENCY) for load in facts.loads for summary in load.summaries]
    shares = [record.lag_p50_ms / latency_ms for latency_ms in typical if latency_ms]
    if shares:
        detail = f"copies were sent {number(record.lag_p50_ms)} ms later (p50), {share(max(shares))} of the latency"
        yield Judgement(max(shares) <= MOST_LATER, detail, max(shares))


@check(
    "enough blocks of time for a verdict",
    "There are too few blocks of time for a verdict",
    "invalidates",
    "Let the shadow run longer.",
    threshold=LEAST_BLOCKS,
    fault="incomplete run",
)
def enough_blocks(facts: Facts) -> Iterator[Judgement]:
    """Judge a shadow, whose blocks are short: a state of one server that lasts for several of them looks like a
    difference until others have been seen (`tests/truth/test_shadow.py`)."""
    if facts.run.record_of(ShadowRecord) is not None:
        blocks = min((comparison.pairs for comparison in leading_comparisons(facts.comparisons)), default=0)
        yield Judgement(blocks >= LEAST_BLOCKS, counted(blocks, "block"), blocks)


@check(
    "enough rounds for an interval",
    "There are too few rounds for an interval",
    "warns",
    "Ask for more --rounds: 2 are the minimum, 6 or more are useful.",
    unknown="warns",
    threshold=MIN_PAIRS,
    not_known="No round was measured",
)
@per_comparison
def enough_pairs(leading: Sequence[Comparison], facts: Facts) -> Judgement:
    """Judge the comparison with the fewest pairs. One without any may have rounds that its metric could not use."""
    least = min(leading, key=lambda comparison: comparison.pairs)
    blocks = {
        (block.round, block.label): block.samples
        for load in facts.loads
        if load.workload.name == least.workload
        for block in load.blocks
        if block.complete
    }
    rounds = side_by_side(blocks, least.pairing)
    if least.pairs or not rounds:
        return Judgement(
            least.pairs >= MIN_PAIRS if least.pairs else None, counted(least.pairs, "complete round"), least.pairs
        )
    metric = METRICS[least.metric]
    fewest = min(sum(samples) for samples in list(zip(*rounds, strict=True))[1:])
    too_few = metric.quantile is not None and fewest < samples_needed(metric.quantile)
    return Judgement(
        False,
        f"{counted(len(rounds), 'complete round')}, but {least.reason}",
        0,
        remedy=f"Ask for longer --open-seconds or more --rounds: {metric.title} leads, and has too few requests."
        if too_few
        else "Mend what is named, then run again.",
        failed="The leading metric was not measured",
    )
