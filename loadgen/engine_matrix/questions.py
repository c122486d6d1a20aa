"""The questions of earlier studies, asked of the cells of a matrix.

Each answer rests on ratios that are paired by round and a 95 % t interval over rounds. Without the cells that it needs,
or without an interval, an answer is undetermined. Excluded cells take no part.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise, product
from typing import Literal

from loadgen.engine_matrix.break_even import mean_interval
from loadgen.engine_matrix.cells import Cell, Shape, baseline_of, engine_mode, estimate, ratios
from loadgen.engine_matrix.records import Answer, Configuration, Estimate, Plan
from loadgen.quantities import Interval, counted, number, ratio, ratio_interval
from loadgen.stats.ratios import SIGNIFICANCE, RatioEstimate, adjust_holm, estimate_ratio

FP16_GAIN = "Does FP16 gain more for the transformer than for the CNN?"
QUADRATIC = "Does latency turn quadratic in the sequence length?"
HALF = "Does DistilBERT take half the time of BERT?"
DIP = "Is there a dip of throughput at a batch size?"

MORE = 1.05
"""From this ratio one gain is called larger than another; with quiet times smaller differences are certain, too."""
STEEP = 1.5
"""The exponent from which growth is called quadratic: half way between linear (1) and quadratic (2)."""
HALF_LIMITS = 0.5 / 1.1, 0.5 * 1.1
"""What counts as about a half."""
FEW_ROUNDS = "fewer than two rounds have all these cells"
SMALL_DIP = 0.05
"""Where no dip was found, one larger than this share of the throughput must be excluded for a plain "no"."""

CNN = re.compile(r"resnet", re.IGNORECASE)
TRANSFORMER = re.compile(r"(?<![a-z])(?:vit|deit)(?![a-z])", re.IGNORECASE)
BERT = re.compile(r"(?<![a-z])bert(?![a-z])", re.IGNORECASE)
DISTILBERT = re.compile(r"distilbert", re.IGNORECASE)

Outcome = Literal["yes", "no", "undetermined"]


def answers(plan: Plan, cells: Sequence[Cell]) -> tuple[Answer, ...]:
    """The answers to all questions, each question's most basic one first."""
    ranked = [one for one in cells if one.excluded is None]
    return tuple(answer for ask in QUESTIONS for answer in ask(plan, ranked))


def short_name(model: str) -> str:
    """resnet50 for torchvision:resnet50"""
    return model.rpartition(":")[2] or model


def _models(plan: Plan, pattern: re.Pattern[str]) -> list[str]:
    found = dict.fromkeys(one.model for one in plan.configurations)
    return [model for model in found if pattern.search(short_name(model))]


def _unanswered(question: str, sentence: str) -> list[Answer]:
    return [Answer(question=question, outcome="undetermined", sentence=sentence)]


def _baseline_first(plan: Plan, scopes: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Scopes that begin with engine/mode, the baseline's first."""
    return sorted(dict.fromkeys(scopes), key=lambda scope: scope[0] != plan.baseline)


def _select(plan: Plan, cells: Sequence[Cell], **wanted: object) -> dict[tuple[int | None, Shape], Cell]:
    """The cells of configurations with these properties, by threads and shape."""
    found = {}
    for one in cells:
        asked = plan.configurations[one.configuration]
        if all(_property(asked, name) == value for name, value in wanted.items()):
            found[asked.threads, one.shape] = one
    return found


def _property(asked: Configuration, name: str) -> str:
    return engine_mode(asked) if name == "engine_mode" else str(getattr(asked, name))


def _mean_by_round(parts: Sequence[Mapping[int, float]]) -> list[float]:
    """The geometric mean of several ratios in every round that has them all."""
    shared = set.intersection(*(set(one) for one in parts)) if parts else set()
    return [math.exp(math.fsum(math.log(one[key]) for one in parts) / len(parts)) for key in sorted(shared)]


def _speedups(over: Cell, under: Cell) -> dict[int, float]:
    """Throughput of one cell over another's by round."""
    both = [key for key in over.latencies_ns if key in under.latencies_ns]
    return dict(zip(both, ratios(over, under), strict=True))


def times(found: Estimate) -> str:
    """ "1.40× (1.31–1.49)" """
    return ratio(found.value, found.interval) + (f" ({ratio_interval(found.interval)})" if found.interval else "")


def fp16_gain(plan: Plan, cells: Sequence[Cell]) -> list[Answer]:
    """The ratio of the speed-ups by FP16 of a vision transformer and of a ResNet, over the shapes that both have."""
    cnns, transformers = _models(plan, CNN), _models(plan, TRANSFORMER)
    if not cnns or not transformers:
        return _unanswered(FP16_GAIN, "This needs a ResNet and a vision transformer, each in FP32 and in FP16.")
    scopes = _baseline_first(
        plan, ((engine_mode(one), one.device) for one in plan.configurations if one.precision == "fp16")
    )
    found = [
        answer
        for mode, device in scopes
        for cnn in cnns
        for transformer in transformers
        if (answer := _gain_answer(plan, cells, (transformer, cnn), mode, device)) is not None
    ]
    return found or _unanswered(
        FP16_GAIN, "No engine has measured both models in FP32 and in FP16 at the same batch size with right answers."
    )


def _gain_answer(plan: Plan, cells: Sequence[Cell], models: tuple[str, str], mode: str, device: str) -> Answer | None:
    by_shape = [
        {
            precision: _select(plan, cells, engine_mode=mode, device=device, model=model, precision=precision)
            for precision in ("fp32", "fp16")
        }
        for model in models
    ]
    keys = [key for key in by_shape[0]["fp16"] if all(key in part for one in by_shape for part in one.values())]
    gains = [[_speedups(one["fp16"][key], one["fp32"][key]) for key in keys] for one in by_shape]
    means = [estimate(_mean_by_round(of_model)) for of_model in gains]
    parts = [
        {number_: value / cnn[number_] for number_, value in transformer.items() if number_ in cnn}
        for transformer, cnn in zip(*gains, strict=True)
    ]
    found = estimate(_mean_by_round(parts))
    if found is None or means[0] is None or means[1] is None:
        return None
    transformer, cnn = map(short_name, models)
    batches = sorted({shape[0] for _, shape in keys})
    return Answer(
        question=FP16_GAIN,
        outcome=_above(found.interval, MORE),
        sentence=(
            f"With {mode} on {device}, FP16 makes {transformer} {times(means[0])} and {cnn} "
            f"{times(means[1])} as fast as FP32 (geometric mean over {_listed('batch size', batches)}); the "
            f"transformer's gain is {times(found)} the CNN's{_why_undetermined(found.interval, MORE)}. It counts as "
            f"more from {MORE:g}×."
        ),
    )


def _above(interval: Interval | None, limit: float) -> Outcome:
    if interval is None:
        return "undetermined"
    return "yes" if interval[0] > limit else "no" if interval[1] < limit else "undetermined"


def _why_undetermined(interval: Interval | None, limit: float) -> str:
    """Why `_above` says so, to end a sentence; "" if it says something else."""
    if interval is None:
        return f", without an interval: {FEW_ROUNDS}"
    return f", and the interval includes {limit:g}" if interval[0] <= limit <= interval[1] else ""


def _listed(noun: str, values: Sequence[int]) -> str:
    """ "batch size 8", "batch sizes 1, 8" """
    return f"{noun}{'' if len(values) == 1 else 's'} {', '.join(map(str, values))}"


def quadratic_length(plan: Plan, cells: Sequence[Cell]) -> list[Answer]:
    """The local exponent of latency in length between neighbouring lengths, of the baseline at the largest batch."""
    found = []
    for place, asked in enumerate(plan.configurations):
        own = [one for one in cells if one.configuration == place and one.length is not None]
        if baseline_of(plan, asked) == place and own:
            largest = max(one.batch for one in own)
            if answer := _slope_answer(plan, asked, [one for one in own if one.batch == largest]):
                found.append(answer)
    return found or _unanswered(
        QUADRATIC, f"This needs the baseline ({plan.baseline}) in FP32 at two or more lengths, with right answers."
    )


def _slope_answer(plan: Plan, asked: Configuration, cells: Sequence[Cell]) -> Answer | None:
    steps: list[tuple[int, int, Estimate]] = []
    ordered = sorted(cells, key=lambda one: one.length or 0)
    for short, long in pairwise(ordered):
        spread = math.log((long.length or 1) / (short.length or 1))
        slopes = [math.log(one) / spread for one in _speedups(short, long).values()]
        if slopes:
            steps.append((short.length or 0, long.length or 0, mean_interval(slopes)))
    if not steps:
        return None
    threads = "" if asked.threads is None else f", {asked.threads} threads" if asked.threads > 1 else ", 1 thread"
    where = f"{short_name(asked.model)} with {plan.baseline} fp32 on {asked.device}{threads}, batch {ordered[0].batch}"
    exponents = "; ".join(f"{low}–{high}: {_exponent(found)}" for low, high, found in steps)
    steep = next(((low, high) for low, high, found in steps if found.low is not None and found.low > STEEP), None)
    if steep is not None:
        outcome: Outcome = "yes"
        said = f"from {steep[0]} to {steep[1]} the exponent is certainly above {STEEP}"
    elif all(found.high is not None and found.high <= STEEP for _, _, found in steps):
        outcome, said = "no", f"not within the lengths measured, no exponent is above {STEEP}"
    else:
        outcome, said = (
            "undetermined",
            f"an exponent's interval includes {STEEP}, half way from linear (1), or is missing",
        )
    return Answer(question=QUADRATIC, outcome=outcome, sentence=f"{where}: {said}. Exponents: {exponents}.")


def _exponent(found: Estimate) -> str:
    if found.low is None or found.high is None:
        return f"{found.value:.2f} (no interval)"
    return f"{found.value:.2f} ({found.low:.2f} to {found.high:.2f})"


def half_of_bert(plan: Plan, cells: Sequence[Cell]) -> list[Answer]:
    """The ratio of DistilBERT's latency to BERT's over the shapes that both have, against 0.5 within ±10 %."""
    whole, small = _models(plan, BERT), _models(plan, DISTILBERT)
    if not whole or not small:
        return _unanswered(HALF, "This needs BERT and DistilBERT.")
    scopes = _baseline_first(plan, ((engine_mode(one), one.precision, one.device) for one in plan.configurations))
    scopes.sort(key=lambda scope: scope[:2] != (plan.baseline, "fp32"))
    alike: dict[tuple[str, str, str, str, Outcome, str, bool], list[str]] = {}
    for (mode, precision, device), bert, distilbert in product(scopes, whole, small):
        of = {"engine_mode": mode, "precision": precision, "device": device}
        large, less = (_select(plan, cells, model=one, **of) for one in (bert, distilbert))
        keys = [key for key in large if key in less]
        value = estimate(_mean_by_round([_speedups(large[key], less[key]) for key in keys]))
        if value is not None:
            outcome, why = _about_half(value.interval)
            pairs, alone = counted(len(keys), "pair"), not alike  # the first answer stands alone
            group = (short_name(bert), short_name(distilbert), device, pairs, outcome, why, alone)
            alike.setdefault(group, []).append(f"{mode} {precision} {times(value)}")
    low, high = HALF_LIMITS
    return [
        Answer(
            question=HALF,
            outcome=outcome,
            sentence=f"On {device} {distilbert} takes this share of the time of {bert} (geometric mean over {pairs} of "
            f"cells): {'; '.join(found)}. About a half is {low:.3f} to {high:.3f}{why}.",
        )
        for (bert, distilbert, device, pairs, outcome, why, _), found in alike.items()
    ] or _unanswered(HALF, "No configuration has measured both models at the same batch size and length.")


def _about_half(interval: Interval | None) -> tuple[Outcome, str]:
    """Whether a ratio is about a half, and why it is undetermined, to end a sentence."""
    if interval is None:
        return "undetermined", f"; {FEW_ROUNDS}"
    low, high = HALF_LIMITS
    if low <= interval[0] and interval[1] <= high:
        return "yes", ""
    if interval[1] < low or high < interval[0]:
        return "no", ""
    return "undetermined", "; an interval is partly outside"


def batch_dip(plan: Plan, cells: Sequence[Cell]) -> list[Answer]:
    """Whether the throughput at a batch size is lower than at the next smaller one, per model and device; tests are
    adjusted by Holm's method over all configurations, lengths and batch sizes of the model."""
    found = []
    for model, device in dict.fromkeys(one.group for one in plan.configurations):
        series: dict[tuple[int, int | None], list[Cell]] = {}
        for one in cells:
            if plan.configurations[one.configuration].group == (model, device):
                series.setdefault((one.configuration, one.length), []).append(one)
        steps = [
            (smaller, larger)
            for own in series.values()
            for smaller, larger in pairwise(sorted(own, key=lambda one: one.batch))
            if smaller.latencies_ns.keys() & larger.latencies_ns.keys()
        ]
        if steps:
            found.append(_dip_answer(plan, f"{short_name(model)} on {device}", steps))
    return found or _unanswered(DIP, "This needs two batch sizes of one configuration, with right answers.")


def _dip_answer(plan: Plan, where: str, steps: Sequence[tuple[Cell, Cell]]) -> Answer:
    tests = [estimate_ratio(ratios(larger, smaller), SMALL_DIP) for smaller, larger in steps]
    adjusted = adjust_holm([one.p_value for one in tests])
    dips = sorted(
        (one.ratio, place)
        for place, (one, p_value) in enumerate(zip(tests, adjusted, strict=True))
        if one.ratio is not None and one.ratio < 1.0 and p_value is not None and p_value < SIGNIFICANCE
    )
    if dips:
        parts = [_dip(plan, *steps[place], tests[place]) for _, place in dips[:3]]
        more = f"; and {len(dips) - 3} more" if len(dips) > 3 else ""
        return Answer(question=DIP, outcome="yes", sentence=f"{where}: {'; '.join(parts)}{more}.")
    lows = [one.ci95[0] for one in tests if one.ci95 is not None]
    sure = len(lows) == len(tests) and min(lows) >= 1.0 - SMALL_DIP
    lowest = min(one.ratio for one in tests if one.ratio is not None)
    sentence = (
        f"{where}: no certain drop of throughput from one batch size to the next; the lowest of {len(tests)} ratios is "
        f"{ratio(lowest, None)}"
        + (
            "."
            if sure
            else f", and a drop of more than {number(100 * SMALL_DIP, 1)} % is not excluded for all of them."
        )
    )
    return Answer(question=DIP, outcome="no" if sure else "undetermined", sentence=sentence)


def _dip(plan: Plan, smaller: Cell, larger: Cell, found: RatioEstimate) -> str:
    asked = plan.configurations[larger.configuration]
    details = [f"{engine_mode(asked)} {asked.precision}"]
    details += [] if asked.threads is None else [f"threads {asked.threads}"]
    details += [] if larger.length is None else [f"length {larger.length}"]
    value = f"{ratio(found.ratio, found.ci95)} ({ratio_interval(found.ci95)})"
    return f"batch {larger.batch} has {value} the throughput of batch {smaller.batch} ({', '.join(details)})"


QUESTIONS: tuple[Callable[[Plan, Sequence[Cell]], list[Answer]], ...] = (
    fp16_gain,
    quadratic_length,
    half_of_bert,
    batch_dip,
)
"""A new question is one function and its name here."""
