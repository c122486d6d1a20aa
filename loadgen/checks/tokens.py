"""Checks of the streamed answers of language models: that every arm did the same work, and did it right.

A server that answers less, other prompts, from a cache or with another model's tokens is faster for that, so each of
these takes the verdict away. What changes only how tokens arrive (chunks, stalls) warns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from statistics import fmean, median

from loadgen.base.quantities import counted, do_not, join, number, share
from loadgen.checks.registry import Find, Judgement, late_severity, of_tokens, per_load
from loadgen.checks.run import loaded_arms
from loadgen.findings.tokens import (
    LEAST_DISTINCT,
    LEAST_TOKENS,
    TokensFound,
    TokenTotals,
    deficit_limit,
    fault_text,
    mean_limits,
    proves_nothing,
    share_found,
    wrong_answers,
)
from loadgen.metrics.breakdown import contradictions_of
from loadgen.metrics.facts import Facts, WorkloadFacts, workload_scope
from loadgen.metrics.tokens import MOST_HELD_BACK, MOST_UNKNOWN
from loadgen.records.checks import Severity
from loadgen.records.payloads import is_language
from loadgen.records.probes import TokensCompared
from loadgen.records.run import Label
from loadgen.records.targets import ROUTES

CHUNKS_ALIKE = 1.1
"""Ratio of the tokens per chunk of two arms up to which their gaps compare."""
COALESCED_LIMIT = 0.05
"""Share of events that may arrive together with the one before."""
TEXT_ALIKE, TEXT_DIFFERS = 1.1, 1.25
"""Ratios of the text per token of two arms: up to the first it is the same, beyond the second one count is wrong, or
the tokenizers differ."""
LEAST_TEXT_TOKENS = 200
"""Tokens with text of an arm from which its bytes per token are compared: the mean of fewer says little."""
STALLED_LIMIT = 0.01
"""Share of answers that may stall."""
WAITED_LIMIT = 0.1
"""Share of a block in which the load generator may be kept waiting. Between two steps it is the part of a gap by which
tokens are stamped late. Measured on two cores, 1 to 64 users: 0 to 0.6 % while nothing else runs, 0.6 to 20 % beside
other programs."""
CPU_PER_TOKEN_US = 15.0
"""Above this the load generator may be a large part of what it measures on a small machine."""
CPU_SHARE_THAT_MATTERS = 0.25
"""Share of a core up to which the cost of a token is harmless. At few tokens per second each wakes the process from
idle, which alone takes 25 to 100 µs; nothing is late for that."""


Names = Mapping[Label, str]
"""The arms as sentences call them."""


def per_totals(judge: Callable[[Sequence[TokenTotals], Names], Judgement | None]) -> Find:
    """Declare a check that judges the totals of all arms in each workload with streamed answers."""

    @per_load
    @wraps(judge)
    def find(load: WorkloadFacts, facts: Facts) -> Judgement | None:
        totals = facts.of(TokensFound).in_workload(load.workload.name)
        return judge(totals, facts.names) if totals else Judgement(None, "no answer was stored")

    return find


def _found(
    names: Names,
    totals: Sequence[TokenTotals],
    count: Callable[[TokenTotals], int],
    of: Callable[[TokenTotals], int] = lambda total: total.answers,
) -> tuple[int, str, tuple[Label, ...]]:
    """The answers of all arms that are counted, "12 of 300 answers of B" for each arm that has any, and these arms."""
    having = [total for total in totals if count(total)]
    texts = [f"{count(total):,} of {counted(of(total), 'answer')} of {names[total.label]}" for total in having]
    return sum(map(count, having)), join(texts), tuple(total.label for total in having)


def _share(count: int, of: int) -> float:
    return count / of if of else 0.0


@of_tokens(
    "the time lasts for every scenario",
    "The time does not last for every scenario",
    "warns",
    "Raise --minutes, ask for fewer users with --concurrency or for shorter answers with --output-tokens.",
    threshold=0,
)
def time_for_all(facts: Facts) -> Iterator[Judgement]:
    experiment = facts.run.experiment
    if experiment.minutes is not None:
        left_out = experiment.left_out
        are = "is" if len(left_out) == 1 else "are"
        detail = f"{join(left_out)} {are} left out" if left_out else "none is left out"
        yield Judgement(not left_out, detail, len(left_out))


@of_tokens(
    "every answer has the length that was asked for",
    "Answers have another length than asked for",
    "invalidates",
    "Make the server honour max_tokens and ignore_eos: a shorter answer is less work.",
    threshold=0,
    fault="wrong answers",
)
@per_totals
def answer_lengths(totals: Sequence[TokenTotals], names: Names) -> Judgement:
    wrong, _, arms = _found(names, totals, lambda total: total.short + total.long)
    _, short, _ = _found(names, totals, lambda total: total.short)
    _, long, _ = _found(names, totals, lambda total: total.long)
    texts = [f"{short} are too short" if short else "", f"{long} are too long" if long else ""]
    answers = sum(total.answers for total in totals)
    detail = "; ".join(filter(None, texts)) or f"all {answers:,} answers have the length that was asked for"
    return Judgement(not wrong, detail, _share(wrong, answers), arms=arms)


@of_tokens(
    "every stream ends because of its length",
    "Streams end too early or without an end",
    "warns",
    "Send ignore_eos, no stop words, and read the server's log for requests that it gave up.",
    threshold=0,
)
@per_totals
def finish_reasons(totals: Sequence[TokenTotals], names: Names) -> Judgement:
    """A stream that is cut is a failed request besides, and an early end a short answer."""
    cuts, cut, _ = _found(names, totals, lambda total: total.cut)
    stops, stopped, _ = _found(names, totals, lambda total: total.stopped)
    wrong = cuts + stops
    texts = [f"{cut} have no end" if cut else "", f"{stopped} did not end by their length" if stopped else ""]
    if not wrong and (silent := [names[total.label] for total in totals if total.end_unknown]):
        return Judgement(None, f"{do_not(silent, 'report')} why an answer ends")
    detail = "; ".join(filter(None, texts)) or "every answer ended by its length"
    return Judgement(not wrong, detail, wrong)


@of_tokens(
    "every arm answered the prompts that were sent",
    "An arm answered other prompts than those sent",
    "invalidates",
    "Raise the server's context length, and turn off templates and truncation: the arm read another prompt.",
    unknown="warns",
    threshold=0,
    fault="wrong answers",
    not_known="It is not known which prompts an arm answered",
)
@per_totals
def prompts_received(totals: Sequence[TokenTotals], names: Names) -> Judgement:
    """Judge the prompt's ids that the server sent back, or else its count of them."""
    wrong, where, arms = _found(names, totals, lambda total: total.prompts_differ, lambda total: total.prompts_known)
    if wrong:
        return Judgement(False, f"{where} are answers to another prompt, or to a part of it", wrong, arms=arms)
    if silent := [names[total.label] for total in totals if total.good and not total.prompts_known]:
        reason = "; a server that reads text makes its own tokens of a prompt, so their number proves nothing"
        return Judgement(None, f"{do_not(silent, 'report')} the ids of the prompt, or their number{reason}")
    known = sum(total.prompts_known for total in totals)
    return Judgement(True, f"{known:,} answers name the prompt that was sent, or its length", 0)


@of_tokens(
    "the servers count the tokens that they send",
    "A server's token count is not what it sends",
    "invalidates",
    "Trust the ids and not that server's usage; find out which tokens it leaves out.",
    threshold=0,
    fault="wrong answers",
    not_known="The tokens of an arm have no ids",
)
@per_totals
def token_counts(totals: Sequence[TokenTotals], names: Names) -> Judgement:
    wrong, where, arms = _found(names, totals, lambda total: total.counts_differ, lambda total: total.counts_known)
    if wrong:
        detail = f"the server's usage of {where} differs from the tokens that arrived"
        return Judgement(False, detail, wrong, arms=arms)
    if silent := [total for total in totals if total.without_ids]:
        how = "; ".join(f"those of {names[total.label]} by {total.counted_by}" for total in silent)
        return Judgement(None, f"tokens without ids are counted by the server's own word: {how}", severity="warns")
    known = sum(total.counts_known for total in totals)
    if not known:
        return Judgement(None, "no server reports its usage; the ids are counted")
    return Judgement(True, f"ids and usage agree in {counted(known, 'answer')}", 0)


@of_tokens(
    "a token has as much text on every arm",
    "A token has more text on one arm than on another",
    "invalidates",
    "Find out which server counts tokens that it does not send, or whether the models have different tokenizers: their "
    "tokens/s do not compare.",
    threshold=TEXT_ALIKE,
    fault="wrong answers",
    not_known="The text of the tokens was not compared",
)
@per_totals
def text_per_token(totals: Sequence[TokenTotals], names: Names) -> Judgement | None:
    """Answers of one model have about the same bytes per token, whatever the prompts: a server that counts more tokens
    than it sends has fewer."""
    sizes = {t.label: t.bytes_per_token for t in totals if t.bytes_per_token and t.text_tokens >= LEAST_TEXT_TOKENS}
    if len(sizes) < 2:
        return None
    apart = max(sizes.values()) / min(sizes.values())
    detail = "bytes of text per token: " + ", ".join(f"{names[label]} {number(size)}" for label, size in sizes.items())
    least = (min(sizes, key=lambda label: sizes[label]),) if apart > TEXT_DIFFERS else ()
    severity: Severity = "invalidates" if apart > TEXT_DIFFERS else "warns"
    return Judgement(apart <= TEXT_ALIKE, detail, apart, arms=least, severity=severity)


@of_tokens(
    "the tokens are those of the model",
    "Tokens are not those of the model",
    "invalidates",
    "Find out why that server computes other tokens (weights, cache of keys and values, sampling): its speed means "
    "nothing until they are right.",
    unknown="invalidates",
    threshold=0,
    fault="wrong answers",
    not_known="The tokens were not compared with a reference",
)
def tokens_agree(facts: Facts) -> Iterator[Judgement]:
    """Judge a random sample of the answers under load by the deficit of each token below the reference's best; of a
    mixture of experts by the mean deficit.
    Without a record the model is not known to abserve, so there is no reference: that only warns."""
    run = facts.run
    texts = {arm.label for arm in run.experiment.arms if ROUTES[run.experiment.transport_of(arm)].is_text}
    loads = [(workload, loaded) for workload in run.experiment.workloads if (loaded := loaded_arms(run, workload))]
    if loads and not (run.has_records_of(TokensCompared) and is_language(run.experiment.model)):
        yield Judgement(None, "abserve does not know the model, so it has no reference", severity="warns")
        return
    for workload, loaded in loads:
        compared = [record for record in run.records_of(TokensCompared) if record.workload == workload.name]
        scope = workload_scope(workload.name)
        yield replace(_agreement(facts.names, compared, loaded, run.experiment.loaded(workload), texts), scope=scope)


def _agreement(
    names: Names,
    compared: Sequence[TokensCompared],
    loaded: set[tuple[Label, int]],
    labels: Sequence[Label],
    texts: set[Label],
) -> Judgement:
    """`texts`: the arms that read text."""
    if wrong := [record for record in compared if wrong_answers(record)]:
        blamed = tuple(label for label in labels if any(record.label == label for record in wrong))
        detail = "; ".join(_fault(names, compared, label) for label in blamed)
        return Judgement(False, detail, sum(len(wrong_answers(record)) for record in wrong), arms=blamed)
    if errors := [record.error for record in compared if record.error]:
        return Judgement(None, errors[0])
    missing = {label for label, _ in loaded - {(record.label, record.restart) for record in compared if record.answers}}
    if missing and missing <= texts:
        silent = do_not(sorted(names[label] for label in missing), "send")
        detail = f"{silent} ids, so no answer in text is beside the reference"
        return Judgement(None, detail, severity="warns")
    if missing:
        return Judgement(None, f"no answers of {join(sorted(names[label] for label in missing))} were compared")
    answers = [answer for record in compared for answer in record.answers if answer.deficit is not None]
    if not answers:
        return Judgement(None, "there is no reference for this model", severity="warns")
    if blind := [record for record in compared if proves_nothing(record)]:
        return Judgement(
            None,
            f"rounding alone brings answers in {blind[0].precision} {number(blind[0].most_noise or 0.0)} below the "
            f"reference's best, random tokens {number(blind[0].answers[0].random)}: no fault could be seen",
        )
    of_arms = [[each for record in compared if record.label == label for each in record.answers] for label in labels]
    found = f"in {share(share_found(min(map(len, of_arms))))} of an arm's answers would be found with 95 % probability"
    limits = [both for record in compared if (both := mean_limits(record))]
    if len(limits) == len(compared):
        mean = max(fmean(answer.mean or 0.0 for answer in of_arm) for of_arm in of_arms if of_arm)
        seen = (
            f"tokens are at most {number(mean)} below the reference's best on an arm's average, those of the reference "
            f"itself in {compared[0].precision} {number(compared[0].mean_noise or 0.0)}; tokens more than "
            f"{number(max(limits)[0])} below on average {found}"
        )
    else:
        worst = max(answer.deficit or 0.0 for answer in answers)
        limit = min(deficit_limit(record, answer.largest) for record in compared for answer in record.answers)
        seen = f"no token is more than {worst:.1e} below the reference's best (limit {limit:.1e})"
        seen = (seen if worst else "every token is the reference's best") + f"; wrong tokens {found}"
    return Judgement(True, f"{counted(len(answers), 'answer')} under load: {seen}", 0)


def _fault(names: Names, compared: Sequence[TokensCompared], label: Label) -> str:
    """ "3 of 64 answers of B have wrong tokens: block 4, request 7 of user 2: token 12 …" """
    of_arm = [record for record in compared if record.label == label]
    faults = [(answer, record) for record in of_arm for answer in wrong_answers(record)]
    checked = sum(len(record.answers) for record in of_arm)
    first, record = faults[0]
    text = (
        f"{len(faults)} of {counted(checked, 'answer')} of {names[label]} have wrong tokens: {first.block}, request "
        f"{first.request + 1:,} of user {first.user}: {fault_text(record, first)}"
    )
    masked = sum(answer.masked_ends for answer, _ in faults)
    if masked and all(answer.masked_ends for answer, _ in faults):
        text += (
            f"; in {counted(masked, 'place')} the model would have ended the text: the server forbids that, as "
            "min_tokens does, instead of going on"
        )
    return text


@of_tokens(
    "different prompts get different answers",
    "Different prompts get the same answer",
    "invalidates",
    "Find out whether that server computes at all: it gives one answer to different prompts.",
    fault="wrong answers",
)
def answers_depend_on_prompts(facts: Facts) -> Iterator[Judgement]:
    """Judge the answers kept under load; skipped without two of an arm. Recorded prompts may repeat."""
    names = facts.names
    digests: dict[Label, list[str]] = {}
    repeating = {workload.name for workload in facts.run.experiment.workloads if workload.traffic}
    for record in (each for each in facts.run.records_of(TokensCompared) if each.workload not in repeating):
        digests.setdefault(record.label, []).extend(
            answer.digest for answer in record.answers if answer.digest and answer.tokens >= LEAST_TOKENS
        )
    judged = {label: len(set(kept)) / len(kept) for label, kept in digests.items() if len(kept) > 1}
    if not judged:
        return
    same = tuple(label for label, part in judged.items() if part < LEAST_DISTINCT)
    detail = (
        f"{join([names[label] for label in same])} gives the same answer to different prompts"
        if same
        else "answers differ as prompts do"
    )
    yield Judgement(not same, detail, min(judged.values()), LEAST_DISTINCT, arms=same)


@of_tokens(
    "answers do not repeat the same tokens",
    "Answers repeat the same tokens",
    "invalidates",
    "Use trained weights, or random ones as large as abserve draws them: a model that repeats one token hides faults.",
    threshold=LEAST_DISTINCT,
    fault="wrong answers",
)
@per_totals
def distinct_tokens(totals: Sequence[TokenTotals], names: Names) -> Judgement:
    """Most answers of an arm must repeat for it: trained models repeat themselves now and then."""
    parts = {total.label: _share(total.repeating, total.ids_known) for total in totals if total.ids_known}
    if not parts:
        return Judgement(None, "no answer is long enough and has ids")
    worst = max(parts.values())
    repeating = tuple(label for label, part in parts.items() if part > 1.0 - LEAST_DISTINCT)
    if repeating:
        whose = join([names[label] for label in repeating])
        detail = f"in {share(worst)} of the answers of {whose} most tokens are repeats"
        return Judgement(False, detail, 1.0 - worst, arms=repeating)
    return Judgement(True, f"at most {share(worst)} of an arm's answers repeat tokens", 1.0 - worst)


@of_tokens(
    "no prompt came from a cache",
    "Prompts came from a prefix cache",
    "invalidates",
    "Turn prefix caching off on every arm (vLLM: --no-enable-prefix-caching), or compare shared-prefix alone.",
    threshold=0,
    fault="unfair configuration",
)
@per_load
def cached_prompts(load: WorkloadFacts, facts: Facts) -> Judgement | None:
    """Judge the servers' own count of cached tokens; `repeated_requests` looks for caches that are not reported. A
    workload whose prompts share their beginning asks for a cache, as traces and recorded traffic do."""
    names = facts.names
    if load.workload.shared_prefix or load.workload.replayed:
        return None
    totals = facts.of(TokensFound).in_workload(load.workload.name)
    if cached := {total.label: total.cached_tokens for total in totals if total.cached_tokens}:
        detail = join([f"{count:,} prompt tokens of {names[label]}" for label, count in cached.items()])
        most = max(cached.values())
        return Judgement(False, f"{detail} came from a cache, not from the model", most, arms=tuple(cached))
    if not any(total.caches_known for total in totals):
        return Judgement(None, "no server reports cached tokens")
    return Judgement(True, "the servers report no cached prompt tokens", 0)


@of_tokens(
    "the arms send chunks of the same size",
    "The arms send chunks of different sizes",
    "warns",
    "Compare tokens/s and the time per answer, which do not depend on it. TTFT includes the wait for the whole first "
    "chunk, and gaps are between chunks: set the same stream interval on every arm, and turn buffering off.",
    threshold=CHUNKS_ALIKE,
)
@per_totals
def chunk_sizes(totals: Sequence[TokenTotals], names: Names) -> Judgement:
    sizes = {names[total.label]: total.tokens_per_chunk for total in totals if total.tokens_per_chunk}
    if not sizes:
        return Judgement(None, "no chunk has tokens")
    apart = max(sizes.values()) / min(sizes.values())
    detail = "tokens per chunk: " + ", ".join(f"{label} {number(size)}" for label, size in sizes.items())
    return Judgement(apart <= CHUNKS_ALIKE, detail, apart)


@of_tokens(
    "tokens arrive as they are made",
    "The tokens of an arm are held back",
    "warns",
    "Turn buffering off in the proxy before that server (nginx: proxy_buffering off; HAProxy: option http-no-delay) or "
    "in the server; if the load generator waited for a core, give it one. When a token was made is not known, so that "
    "arm has no TTFT, no TPOT and no gaps. Tokens/s and the time per answer hold.",
    threshold=MOST_UNKNOWN,
)
@per_totals
def tokens_held_back(totals: Sequence[TokenTotals], names: Names) -> Judgement:
    """Where answers arrive in one piece, or the first read of most of them brings several events, somebody waits."""
    texts: dict[Label, str] = {}
    for total in totals:
        whole, several = (_share(count, total.answers) for count in (total.in_one_piece, total.held_back))
        if whole > MOST_UNKNOWN:
            texts[total.label] = f"{share(whole)} of the answers of {names[total.label]} came with one read"
        elif several > MOST_HELD_BACK:
            texts[total.label] = (
                f"{share(several)} of the answers of {names[total.label]} begin with several events at once"
            )
    worst = max(_share(total.in_one_piece, total.answers) for total in totals)
    detail = "; ".join(texts.values()) or f"at most {share(worst)} of an arm's answers came with one read"
    return Judgement(not texts, detail, worst, arms=tuple(texts))


@of_tokens(
    "every token that is counted is streamed",
    "A server counts tokens that it does not stream",
    "warns",
    "Let that server stream the thoughts of the model, or turn them off on every arm: its TTFT is that of the visible "
    "answer, and its TPOT is not known.",
    threshold=0,
)
@per_totals
def hidden_tokens(totals: Sequence[TokenTotals], names: Names) -> Judgement:
    hidden = [total for total in totals if total.hidden_tokens]
    texts = [f"{total.hidden_tokens:,} of {total.tokens:,} tokens of {names[total.label]}" for total in hidden]
    detail = f"{join(texts)} were not streamed" if hidden else "no server counts tokens that it does not stream"
    return Judgement(not hidden, detail, sum(t.hidden_tokens for t in hidden), arms=tuple(t.label for t in hidden))


@of_tokens(
    "every event was read by itself",
    "Events were read together",
    "warns",
    "Where one arm alone has them, look for its server's stream interval or a proxy before it; where all have them and "
    "the load generator waited for a core, give it one, or use fewer users.",
    threshold=COALESCED_LIMIT,
)
@per_totals
def events_read(totals: Sequence[TokenTotals], names: Names) -> Judgement:
    """Events in one read have one time and are one chunk: the server, a proxy, the network or a late client joined
    them. TTFT and gaps say when chunks came."""
    parts = {total.label: _share(total.coalesced, total.events) for total in totals}
    worst = max(parts.values())
    detail = join([f"{share(part)} of the events of {names[label]}" for label, part in parts.items()])
    joined = tuple(label for label, part in parts.items() if part > COALESCED_LIMIT)
    return Judgement(worst <= COALESCED_LIMIT, f"{detail} came with the one before", worst, arms=joined)


@of_tokens(
    "no answer stalled",
    "Answers stalled",
    "warns",
    "Look for preempted or recomputed requests, long prompts that block decoding (chunked prefill), or a full queue.",
    threshold=STALLED_LIMIT,
)
@per_totals
def stalled_answers(totals: Sequence[TokenTotals], names: Names) -> Judgement:
    """A stall is a gap of ten times the arm's median gap and at least 50 ms."""
    parts = {total.label: _share(total.stalled, total.good) for total in totals}
    worst = max(parts.values())
    texts = [
        f"{share(parts[total.label])} of the answers of {names[total.label]} stalled, the longest for "
        f"{number(total.worst_gap_ms or 0.0)} ms (median gap {number(total.median_gap_ms or 0.0)} ms)"
        for total in totals
        if parts[total.label] > STALLED_LIMIT
    ]
    longest = max((total.worst_gap_ms or 0.0 for total in totals), default=0.0)
    return Judgement(not texts, "; ".join(texts) or f"the longest gap is {number(longest)} ms", worst)


@of_tokens(
    "no arm speculates alone",
    "Only some arms speculate",
    "invalidates",
    "Give every arm the same speculative decoding, or none.",
    threshold="equal",
    fault="unfair configuration",
)
def same_speculation(facts: Facts) -> Iterator[Judgement]:
    """Skipped where no arm reports speculative decoding."""
    names = facts.names
    settings = {arm.label: arm.in_effect.get("speculative") for arm in facts.run.arms}
    if not any(settings.values()):
        return
    named = ", ".join(f"{names[label]} {value or 'none'}" for label, value in settings.items())
    alike = len({str(value or "none") for value in settings.values()}) == 1
    yield Judgement(alike, f"speculative decoding: {named}", named)


@of_tokens(
    "every arm speaks the same protocol",
    "The arms speak different protocols",
    "warns",
    "Use a protocol that all arms speak, or compare one server with itself over both to see what the protocol costs.",
    threshold="equal",
)
def same_protocol(facts: Facts) -> Iterator[Judgement]:
    names = facts.names
    experiment = facts.run.experiment
    spoken = {names[arm.label]: experiment.transport_of(arm) for arm in experiment.arms}
    alike = len(set(spoken.values())) == 1
    words = next(iter(spoken.values())) if alike else join([f"{label} {name}" for label, name in spoken.items()])
    yield Judgement(alike, words if alike else f"the arms speak different protocols ({words})", words)


@of_tokens(
    "the servers counted the answers that the client got",
    "A server's statistics contradict the measurement",
    "warns",
    "Do not rely on that server's own figures, and look for other clients of it.",
    not_known="no server counts its answers",
)
@per_load
def server_counts(load: WorkloadFacts, facts: Facts) -> Judgement | None:
    """Blocks that a server contradicts do not count for the steps of its engine."""
    names = facts.names
    counted_by = [block for block in load.stored if block.record.complete and block.record.stages is not None]
    if not counted_by:
        return Judgement(None, "no server reports how many requests it has answered")
    faults = [
        f"{names[label]}: {text}"
        for label in facts.run.experiment.labels
        for text in contradictions_of([block for block in counted_by if block.record.label == label])
    ]
    labels = [names[label] for label in dict.fromkeys(block.record.label for block in counted_by)]
    detail = "; ".join(faults) or f"those of {join(sorted(labels))} agree with the client's"
    return Judgement(not faults, detail, len(faults))


@of_tokens(
    "the load generator ran when a token came",
    "The load generator waited for a CPU core",
    "invalidates",
    "Give the load generator a core of its own (no quota), fewer users, or another machine: it stamped tokens late.",
    threshold=WAITED_LIMIT,
    fault="overloaded load generator",
)
@per_load
def generator_scheduled(load: WorkloadFacts, _: Facts) -> Judgement | None:
    """Judge the median block, since a moment's wait only widens the intervals."""
    records = [block.record for block in load.stored if block.record.complete]
    shares = [
        record.generator_waited_ns / (record.window_end_ns - record.window_start_ns)
        for record in records
        if record.generator_waited_ns is not None and record.window_end_ns > record.window_start_ns
    ]
    if not shares:
        return Judgement(None, "the kernel does not say how long the load generator waited for a core")
    middle = median(shares)
    detail = f"the load generator waited for a core for {share(middle)} of the time, in the median block"
    ok = middle <= WAITED_LIMIT
    return Judgement(ok, detail, middle, severity=late_severity(ok, load))


@of_tokens(
    "the load generator needs little CPU per token",
    "The load generator needs much CPU per token",
    "warns",
    "Use a faster or an idle machine for the load generator, more --processes, or a server that sends larger chunks.",
    threshold=CPU_PER_TOKEN_US,
)
@per_load
def generator_cpu_per_token(load: WorkloadFacts, facts: Facts) -> Judgement | None:
    """Judge closed loops: in an open one with few requests the wait for each takes more CPU than its tokens. A dear
    token matters only where the load generator takes a good part of a core."""
    if load.workload.is_open:
        return None
    complete = [block.record for block in load.stored if block.record.complete]
    tokens = sum(total.tokens for total in facts.of(TokensFound).in_workload(load.workload.name))
    tokens += sum(record.cool_down_tokens for record in complete)
    spent_ns = sum(record.generator_cpu_ns for record in complete)
    shares = [block.generator_cpu_share for block in load.blocks if block.generator_cpu_share is not None]
    if not tokens or not spent_ns or not shares:
        return Judgement(None, "the CPU time of the load generator is unknown")
    each_us = spent_ns / tokens / 1000.0
    detail = f"{number(each_us)} µs of CPU per token, at most {share(max(shares))} of a core"
    return Judgement(each_us <= CPU_PER_TOKEN_US or max(shares) <= CPU_SHARE_THAT_MATTERS, detail, each_us)
