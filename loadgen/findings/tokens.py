"""What the streamed answers of each arm were: lengths, ends, prompts, counts, chunks, and deficits below the reference.

Two right engines need not give equal answers: in BF16 they agree in a fraction of them, because rounding decides
between tokens that are almost equally good, and one other token changes all that follow. So each token is judged by its
own context (`loadgen.records.probes.ReferenceAnswer`): a right one is never far below the reference's best, a wrong one
is many times the tolerance below it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from loadgen.base.quantities import number
from loadgen.base.quantities import share as percent
from loadgen.metrics.breakdown import contradictions_in
from loadgen.metrics.facts import Facts
from loadgen.metrics.tokens import gaps_ms, in_one_piece, samples_of, values_of
from loadgen.records.probes import JudgedAnswers, ReferenceAnswer
from loadgen.records.run import Found, Label, Record
from loadgen.records.samples import NS_PER_MS, Samples, good
from loadgen.records.store import StoredBlock
from loadgen.records.targets import ROUTES
from loadgen.records.tokens import COUNTED_BY, CUT, ECHO, ECHO_DIFFERS, IDS, OTHER, STOP, UNKNOWN
from loadgen.stats.agreement import tolerance_of
from loadgen.stats.percentiles import Pool, distribution

LEAST_DISTINCT = 0.5
"""Least share of different tokens in an answer; a model with unscaled random weights repeats one token."""
LEAST_TOKENS = 8
"""A shorter answer may repeat tokens by chance."""
NOISE_FACTOR = 4.0
"""Of the reference's own noise: an engine rounds in other places, and in more of them."""
MOST_RANDOM = 0.5
"""A limit above this share of a random token's deficit would pass wrong answers, so that nothing is proved."""
STALL_FACTOR, LEAST_STALL_MS = 10.0, 50.0
"""An answer stalled if one of its gaps is this many times the arm's median gap, and at least so long."""
MOST_POINTS = 120
"""Points of a drawn line."""

Points = tuple[tuple[float, float], ...]


class TokenTotals(Record, frozen=True, kw_only=True):
    """The streamed answers of one arm in one workload, over all complete blocks."""

    workload: str
    label: Label
    answers: int
    """Requests, the failed ones included."""
    short: int
    """Answers with fewer tokens than asked for, but at least one, and with an end."""
    long: int
    """Answers with more tokens than asked for."""
    cut: int
    """Streams that ended without their end."""
    stopped: int
    """Answers that ended for another reason than their length."""
    end_unknown: int
    """Answers whose end has no reason."""
    prompts_known: int
    """Answers whose server sent the prompt's ids back, or counted them."""
    prompts_differ: int
    """Of these, answers to another prompt, or to one of another length."""
    counts_known: int
    """Answers with ids and with a count of the server's."""
    counts_differ: int
    """Of these, answers of whose tokens the server counted more or fewer than it sent."""
    without_ids: int
    """Answers with tokens that have no ids."""
    caches_known: int
    """Answers whose server says how many tokens of the prompt came from a cache."""
    cached_tokens: int
    """Tokens of prompts that came from a cache, as the servers report."""
    ids_known: int
    """Answers of at least `LEAST_TOKENS` tokens, all with ids."""
    repeating: int
    """Of these, answers with fewer different tokens than `LEAST_DISTINCT`."""
    tokens: int
    chunks: int
    coalesced: int
    """Events that came together with the one before them."""
    stalled: int
    """Good answers with a stall."""
    good: int
    worst_gap_ms: float | None
    median_gap_ms: float | None
    """Between two chunks."""
    counted: dict[str, int] = {}  # noqa: RUF012 (a field of a struct, which copies it)
    """Answers with tokens by how these were counted, in the words of `loadgen.records.tokens.COUNTED_BY`."""
    text_bytes: int = 0
    """Of the text of all answers that have text."""
    text_tokens: int = 0
    """The streamed tokens of these answers."""
    hidden_tokens: int = 0
    """Tokens that the server counted and did not stream."""
    in_one_piece: int = 0
    """Answers of several tokens that came with one read."""
    held_back: int = 0
    """Other answers whose first read brought several events."""
    events: int = 0
    """Events with a part of an answer."""
    steps: int | None = None
    """Steps of the engine by the server's statistics; None: it reports none."""
    step_ms: float | None = None
    """Their mean time."""
    engine_share: float | None = None
    """The part of the blocks in which a step ran. Were it 1, the server would make as many tokens as its engine
    alone. None in an open loop, in which an engine also waits for requests."""
    gaps_ms: Points = ()
    """Gap between two tokens and the share of gaps that are at most that long, for drawing."""
    timeline_ms: Points = ()
    """Of the answer with the median latency: time since it fell due, and the tokens until then."""

    @property
    def tokens_per_chunk(self) -> float | None:
        return self.tokens / self.chunks if self.chunks else None

    @property
    def bytes_per_token(self) -> float | None:
        """Bytes of text per streamed token."""
        return self.text_bytes / self.text_tokens if self.text_bytes and self.text_tokens else None

    @property
    def counted_by(self) -> str:
        """How most of its tokens were counted, in words; empty if that is not stored."""
        return max(self.counted, key=lambda name: self.counted[name], default="")


class TokensFound(Found, frozen=True, kw_only=True):
    """The streamed answers of a language model."""

    STUDY = "tokens"
    totals: tuple[TokenTotals, ...] = ()
    """An entry per workload and arm with answers."""

    def in_workload(self, name: str) -> list[TokenTotals]:
        """The totals of every arm that has answers in this workload."""
        return [total for total in self.totals if total.workload == name]


def analyse(facts: Facts) -> TokensFound:
    """The totals of every workload and arm with streamed answers."""
    return TokensFound(
        totals=tuple(
            totals
            for load in facts.loads
            for label in facts.run.experiment.labels
            if (totals := total([block for block in load.stored if block.record.label == label])) is not None
        )
    )


def total(blocks: Sequence[StoredBlock]) -> TokenTotals | None:
    """The totals of one arm's complete blocks in one workload; None without answers."""
    counts: Counter[str] = Counter()
    counted: Counter[str] = Counter()
    gaps, between, worst = Pool(), Pool(), Pool()
    timelines: list[tuple[float, Points]] = []
    complete = [block for block in blocks if block.record.complete]
    for block in complete:
        samples, answers, events = samples_of(block), block.answers, block.events
        if samples is None or answers is None or events is None or len(answers) != len(samples):
            continue
        reads_text = ROUTES[block.record.transport].is_text
        counts.update(_count(samples, answers, events, reads_text=reads_text))
        counted.update(COUNTED_BY[code] for code in answers["counted"][answers["output_tokens"] > 0].tolist())
        answered, index = good(samples), block.record.index
        gaps.add(index, gaps_ms(answered))
        between.add(index, np.diff(events["at_ns"])[np.diff(events["sample"].astype(np.int64)) == 0] / NS_PER_MS)
        worst.add(index, values_of("worst_gap_ms")(answered))
        timelines.append(_timeline(samples, events))
    if not counts.get("answers"):
        return None
    median_gap = float(np.median(between.values)) if between.count else None
    limit_ms = max(LEAST_STALL_MS, STALL_FACTOR * (median_gap or 0.0))
    return TokenTotals(
        workload=complete[0].workload.name,
        label=complete[0].record.label,
        stalled=round(worst.count * float(np.mean(worst.values > limit_ms))) if worst.count else 0,
        worst_gap_ms=float(worst.values.max()) if worst.count else None,
        median_gap_ms=median_gap,
        **_steps(complete),
        gaps_ms=thinned(distribution(gaps.values)),
        timeline_ms=sorted(timelines)[len(timelines) // 2][1],
        counted=dict(counted),
        **counts,
    )


def _steps(blocks: Sequence[StoredBlock]) -> dict[str, Any]:
    """The fields about the engine's steps, from the blocks whose server reports them and counted the same answers."""
    reported = [
        (stages.executions, stages.step_ns, block.record.window_end_ns - block.record.window_start_ns)
        for block in blocks
        if (stages := block.record.stages) is not None and stages.executions and stages.step_ns is not None
        if not contradictions_in(block)
    ]
    if not reported:
        return {}
    steps, step_ns, whole_ns = map(sum, zip(*reported, strict=True))
    share = None if blocks[0].workload.is_open or not whole_ns else min(1.0, step_ns / whole_ns)
    return {"steps": steps, "step_ms": step_ns / steps / NS_PER_MS, "engine_share": share}


def explain_tokens(
    baseline: TokenTotals, arm: TokenTotals, tpot_ms: Mapping[Label, float], names: Mapping[Label, str], *, alike: bool
) -> str:
    """Where the time of a token goes, in sentences; empty where no server reports the steps of its engine. `tpot_ms`:
    the time per token that the client saw; `alike`: both arms run the same engine."""
    texts, silent = [], []
    for totals in (baseline, arm):
        pace, step, share = tpot_ms.get(totals.label), totals.step_ms, totals.engine_share
        if pace is None or step is None:
            silent.append(totals)
            continue
        parts = (
            f"a step of its engine {number(step)} ms, its loop, front end, network and client {number(pace - step)} ms"
            if pace > step
            else f"not more than a step of its engine, which takes {number(step)} ms with those that read prompts"
        )
        texts.append(f"A token of {names[totals.label]} takes {number(pace)} ms: {parts}.")
        if share is not None:
            texts[-1] += (
                f" The engine is in a step {percent(share)} of the time, so served ÷ engine is {number(share)}."
            )
    if texts and silent and (pace := tpot_ms.get(silent[0].label)) is not None:
        known = arm if silent[0] is baseline else baseline
        other, gap_ms = names[silent[0].label], pace - tpot_ms[known.label]
        texts.append(f"A token of {other} takes {number(pace)} ms; its server reports no steps.")
        if alike and gap_ms > 0.0:
            texts.append(
                f"It runs the same engine as {names[known.label]}, so the {number(gap_ms)} ms more are of its serving "
                "layer, or of what that leaves the engine."
            )
        elif alike and pace < (known.step_ms or 0.0) <= tpot_ms[known.label]:
            texts.append(
                f"It runs the same engine as {names[known.label]}, whose step alone takes longer: compare the threads "
                "of both, how these wait, and what else runs on their cores."
            )
    return " ".join(texts)


def _count(samples: Samples, answers: Samples, events: Samples, *, reads_text: bool) -> dict[str, int]:
    """The counts of one block. A server that reads text makes tokens of its own from a prompt, so their number says
    nothing; only the ids that were meant do, where it sends them back."""
    tokens, asked, flags = answers["output_tokens"], answers["asked"], answers["flags"]
    usage, prompts, cached = answers["usage_tokens"], answers["prompt_tokens"], answers["cached_tokens"]
    has_tokens, has_ids, finish = tokens > 0, (flags & IDS) > 0, answers["finish"]
    echoed, is_good = (flags & ECHO) > 0, samples["error"] < 0
    counted = has_ids & (usage >= 0)
    long_enough = has_ids & (tokens >= LEAST_TOKENS) & (answers["distinct"] >= 0)
    # A server may count a token that begins the text, so a count may exceed the prompt by one.
    other_prompt = ((flags & ECHO_DIFFERS) > 0) | (
        ~echoed & (prompts >= 0) & ((prompts < answers["prompt_asked"]) | (prompts > answers["prompt_asked"] + 1))
    )
    masks = {
        "short": has_tokens & (tokens < asked) & ((flags & CUT) == 0),
        "long": tokens > asked,
        "cut": (flags & CUT) > 0,
        "stopped": (finish == STOP) | (finish == OTHER),
        "end_unknown": is_good & (finish == UNKNOWN),
        "prompts_known": echoed if reads_text else echoed | (prompts >= 0),
        "prompts_differ": other_prompt & echoed if reads_text else other_prompt,
        "counts_known": counted,
        "counts_differ": counted & (usage != tokens),
        "without_ids": has_tokens & ~has_ids,
        "caches_known": cached >= 0,
        "ids_known": long_enough,
        "repeating": long_enough & (answers["distinct"] < LEAST_DISTINCT * tokens),
        "in_one_piece": in_one_piece(samples),
        "held_back": (samples["first_events"] > 1) & ~in_one_piece(samples),
        "good": is_good,
    }
    return {name: int(mask.sum()) for name, mask in masks.items()} | {
        "answers": len(samples),
        "cached_tokens": int(np.maximum(cached, 0).sum()),
        "tokens": int(tokens[has_tokens].sum()),
        "chunks": len(events),
        "events": int(events["events"].sum()),
        "coalesced": int(events["events"].sum()) - len(events),
        "text_bytes": int(answers["text_bytes"].sum()),
        "text_tokens": int((tokens - answers["hidden_tokens"])[answers["text_bytes"] > 0].sum()),
        "hidden_tokens": int(answers["hidden_tokens"].sum()),
    }


def _timeline(samples: Samples, events: Samples) -> tuple[float, Points]:
    """(latency in ms, points) of the good answer with the median latency."""
    rows = np.flatnonzero((samples["error"] < 0) & (samples["chunks"] > 0))
    if not len(rows):
        return 0.0, ()
    latencies = samples["end_ns"][rows] - samples["intended_ns"][rows]
    row = int(rows[np.argsort(latencies, kind="stable")[len(rows) // 2]])
    chunks = events[events["sample"] == row]
    at_ms = (chunks["at_ns"] - samples["intended_ns"][row]) / NS_PER_MS
    arrived = np.cumsum(chunks["tokens"].astype(np.int64))
    points = tuple(zip(at_ms.tolist(), arrived.astype(float).tolist(), strict=True))
    return float(at_ms[-1]), thinned(points)


def thinned(points: Points) -> Points:
    """At most `MOST_POINTS` of the points, the first and the last among them."""
    if len(points) <= MOST_POINTS:
        return points
    places = np.unique(np.linspace(0, len(points) - 1, MOST_POINTS).round().astype(int))
    return tuple(points[place] for place in places)


# The answers kept of the load, beside the reference.


def deficit_limit(judged: JudgedAnswers, largest: float) -> float:
    """The largest deficit that rounding explains: two logits may each move by the tolerance of the precision, and the
    reference's own noise is seldom exceeded fourfold. `largest` is the largest magnitude of a logit."""
    tolerance = tolerance_of([judged.precision]).relative
    return max(2.0 * tolerance * largest, NOISE_FACTOR * (judged.noise or 0.0))


def mean_limits(judged: JudgedAnswers) -> tuple[float, float] | None:
    """Of a mixture of experts the largest mean deficits that rounding explains: of one answer, and of all together,
    whose mean varies less the more there are. None for other models, whose tokens are judged one by one.

    A token of a mixture may be far below the best, since rounding exchanges experts. But that befalls the reference,
    too, when it computes in the precision that is served, and about as often.
    """
    if judged.mean_noise is None or judged.most_noise is None or not judged.answers:
        return None
    rounding = 2.0 * tolerance_of(["fp32"]).relative * max(answer.largest for answer in judged.answers)
    between = (judged.most_noise - judged.mean_noise) / len(judged.answers) ** 0.5
    together = NOISE_FACTOR * (judged.mean_noise + between)
    return max(rounding, NOISE_FACTOR * judged.most_noise), max(rounding, together)


def proves_nothing(judged: JudgedAnswers) -> bool:
    """Whether rounding alone brings a mixture's answers near those of random tokens, so that no fault could be seen."""
    limits = mean_limits(judged)
    return limits is not None and limits[0] > MOST_RANDOM * min(answer.random for answer in judged.answers)


def wrong_answers(judged: JudgedAnswers) -> list[ReferenceAnswer]:
    """The answers that no rounding explains: with such a token, or of a mixture with such a mean, alone or together."""
    limits = mean_limits(judged)
    if limits is None:
        return [answer for answer in judged.answers if (answer.deficit or 0.0) > deficit_limit(judged, answer.largest)]
    of_one, together = limits
    means = [answer.mean for answer in judged.answers if answer.mean is not None]
    limit = together if means and sum(means) / len(means) > together else of_one
    return [answer for answer in judged.answers if (answer.mean or 0.0) > limit]


def fault_text(judged: JudgedAnswers, answer: ReferenceAnswer) -> str:
    """Why one of the wrong answers is wrong."""
    limits = mean_limits(judged)
    if limits is None:
        limit = deficit_limit(judged, answer.largest)
        return (
            f"token {answer.place + 1} is {number(answer.deficit or 0.0)} below the reference's best "
            f"(limit {number(limit)})"
        )
    return (
        f"its tokens are {number(answer.mean or 0.0)} below the reference's best on average (those of the reference "
        f"in {judged.precision} {number(judged.mean_noise or 0.0)}, random ones {number(answer.random)}; limit "
        f"{number(limits[0])}, of all answers together {number(limits[1])})"
    )


def share_found(answers: int, probability: float = 0.95) -> float:
    """The smallest share of wrong answers that so many checked ones find with this probability."""
    return float(1.0 - (1.0 - probability) ** (1.0 / answers)) if answers else 1.0
