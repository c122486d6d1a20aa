"""The decision surface: over users × batch size, length or prompt, which arm is best, by how much, and where that
changes.

A point of the surface is a workload, judged by the comparisons of the report: an arm wins a point if it beats every
other arm by the leading metric, after Holm's adjustment over the run. The intervals are those that stay valid after
every round (`loadgen.stats.ratios`), so it may depend on them which points get further rounds, and all points together
have a false winner in at most 5 % of runs (`tests/truth/test_surface.py` shows it by simulation).

**Further rounds** go to the points that are undecided and to those next to which, along the users, another arm wins.

**A crossing** lies along the users between two points that unlike arms win. The log ratio of these arms is taken as
linear in the log of the users from each point to the next, and the crossing is where it is 0. The interval goes from
where the upper ends of the points' intervals reach 0 to where the lower ends do. Between two points, the width of the
interval is the weighted mean of their widths. Two independent estimates would give a narrower one, so the interval
contains the true crossing in at least 95 % of runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Literal

from loadgen.base.quantities import join
from loadgen.metrics.comparisons import Comparison, advantage, leading_comparisons, log_lead
from loadgen.records.run import Experiment, Label, Record, Workload
from loadgen.records.targets import Kind

Across = Literal["batch", "length", "prompt"]
"""What the surface varies beside the users: the batch size of a request, the length of its items, or of a language
model the tokens of its prompt."""
AXIS_TITLES: Mapping[Across, str] = {"batch": "batch size", "length": "length", "prompt": "prompt tokens"}


class SurfacePoint(Record, frozen=True, kw_only=True):
    """One workload of the surface: the best arm and its margin over the runner-up."""

    workload: str
    users: int
    size: int
    """Its place on the other axis."""
    state: Literal["winner", "no_difference", "inconclusive", "invalid"]
    """no_difference: the two best arms are equal within the margin."""
    best: Label | None
    """The arm that measured best; it is the winner if `state` says so. None without a ratio."""
    runner_up: Label | None
    ratio: float | None
    """How many times better the best arm is than the runner-up; at least 1."""
    ci95: tuple[float, float] | None

    @property
    def winner(self) -> Label | None:
        return self.best if self.state == "winner" else None


class Crossing(Record, frozen=True, kw_only=True):
    """Where along the users, at one place on the other axis, another arm becomes the best."""

    size: int
    below: Label
    """The arm that wins with fewer users."""
    above: Label
    """The arm that wins with more users."""
    users: float
    ci95: tuple[float, float]

    @property
    def words(self) -> str:
        """ "24 users (17–31)": in whole users, the interval rounded outwards."""
        low, high = math.floor(self.ci95[0]), math.ceil(self.ci95[1])
        return f"{math.ceil(self.users)} users ({low}–{high})"


class Surface(Record, frozen=True, kw_only=True):
    """The whole map."""

    across: Across
    points: tuple[SurfacePoint, ...]
    """By size, and then by users, ascending."""
    crossings: tuple[Crossing, ...] = ()

    @property
    def rows(self) -> dict[int, list[SurfacePoint]]:
        """The points of each size, by their users."""
        rows: dict[int, list[SurfacePoint]] = {}
        for point in self.points:
            rows.setdefault(point.size, []).append(point)
        return rows

    def at(self, size: int) -> str:
        """A place on the other axis in a sentence: "batch 8"."""
        return f"{size}-token prompts" if self.across == "prompt" else f"{self.across} {size}"


_ACROSS: Mapping[Kind, Across] = {Kind.TENSORS: "batch", Kind.TOKENS: "prompt"}


def surface_of(experiment: Experiment, comparisons: Sequence[Comparison]) -> Surface | None:
    """The surface by these comparisons; None of an experiment without one."""
    workloads = [workload for workload in experiment.workloads if workload.scenario == "surface"]
    if not workloads:
        return None
    across = _ACROSS[workloads[0].kind]
    if len({workload.sequence_length for workload in workloads}) > 1:
        across = "length"
    leading: dict[str, dict[frozenset[Label], Comparison]] = {}
    for comparison in leading_comparisons(comparisons):
        leading.setdefault(comparison.workload, {})[frozenset(comparison.pairing)] = comparison
    points = sorted(
        (_point(workload, across, leading.get(workload.name, {}), experiment.labels) for workload in workloads),
        key=lambda point: (point.size, point.users),
    )
    surface = Surface(across=across, points=tuple(points))
    crossings = [crossing for row in surface.rows.values() for crossing in _crossings(row, leading)]
    return Surface(across=across, points=surface.points, crossings=tuple(crossings))


def uncertain(surface: Surface) -> set[str]:
    """The workloads that get further rounds: those that are undecided, and those next to which another arm wins."""
    names = {point.workload for point in surface.points if point.state == "inconclusive"}
    for row in surface.rows.values():
        for one_side, other_side in pairwise(row):
            if None not in (one_side.winner, other_side.winner) and one_side.winner != other_side.winner:
                names |= {one_side.workload, other_side.workload}
    return names


def _point(
    workload: Workload, across: Across, compared: Mapping[frozenset[Label], Comparison], labels: Sequence[Label]
) -> SurfacePoint:
    sizes = {"batch": workload.batch_size, "length": workload.sequence_length, "prompt": workload.prompt_tokens}
    baseline, *others = labels
    strengths = {baseline: 0.0}
    for label in others:
        lead = log_lead(compared.get(frozenset((baseline, label))), label)
        if lead is not None:
            strengths[label] = lead.value
    best, runner_up = None, None
    state: Literal["winner", "no_difference", "inconclusive", "invalid"] = "inconclusive"
    between = None
    if len(strengths) > 1:
        best, runner_up = sorted(strengths, key=lambda label: -strengths[label])[:2]
        between = compared.get(frozenset((best, runner_up)))
    if any(comparison.verdict == "invalid" for comparison in compared.values()):
        state = "invalid"
    elif between is not None and between.verdict == "no_difference":
        state = "no_difference"
    elif best is not None and all(
        (pair := compared.get(frozenset((best, label)))) is not None and pair.winner == best
        for label in labels
        if label != best
    ):
        state = "winner"
    margin = None if between is None else advantage(between)
    return SurfacePoint(
        workload=workload.name,
        users=workload.concurrency,
        size=sizes[across] or 0,
        state=state,
        best=best,
        runner_up=runner_up,
        ratio=None if margin is None else margin.factor,
        ci95=None if margin is None else margin.ci95,
    )


def _crossings(
    row: Sequence[SurfacePoint], leading: Mapping[str, Mapping[frozenset[Label], Comparison]]
) -> list[Crossing]:
    """The crossings of one size, between each two successive winners that differ."""
    won = [place for place, point in enumerate(row) if point.winner is not None]
    crossings = []
    for start, end in pairwise(won):
        below, above = row[start].winner, row[end].winner
        if below is None or above is None or below == above:
            continue
        leads = [
            (math.log(point.users), lead)
            for point in row[start : end + 1]
            if (lead := log_lead(leading.get(point.workload, {}).get(frozenset((below, above))), above)) is not None
            and point.state != "invalid"
        ]
        places = [place for place, _ in leads]
        zeros = _zeros(places, [lead.value for _, lead in leads])
        crossings.append(
            Crossing(
                size=row[start].size,
                below=below,
                above=above,
                users=math.exp(zeros[len(zeros) // 2]),  # their number is odd
                ci95=(
                    math.exp(_zeros(places, [lead.high or 0.0 for _, lead in leads])[0]),
                    math.exp(_zeros(places, [lead.low or 0.0 for _, lead in leads])[-1]),
                ),
            )
        )
    return crossings


def _zeros(places: Sequence[float], values: Sequence[float]) -> list[float]:
    """Where a line through these values changes its sign, ascending; an infinite value is reached at once beside the
    finite one, so that nothing is said of what lies between them."""
    zeros = []
    for (x, y), (next_x, next_y) in pairwise(zip(places, values, strict=True)):
        if (y < 0.0) == (next_y < 0.0):
            continue
        if math.isinf(y):
            zeros.append(next_x)
        else:
            zeros.append(x if math.isinf(next_y) else x + (next_x - x) * y / (y - next_y))
    return zeros


def place_of_users(users: float, rows: Sequence[int]) -> float:
    """Where a number of users lies among ascending ones: 0 at the first, 1.5 halfway between the second and third on
    the log scale."""
    places = [math.log(row) for row in rows]
    at = math.log(users)
    for number, (low, high) in enumerate(pairwise(places)):
        if at <= high:
            return number + (at - low) / (high - low)
    return float(len(rows) - 1)


def counts_in_words(surface: Surface, names: Mapping[Label, str]) -> str:
    """ "B is faster at 8 of 18 loads, A at 6; undecided at 4" """
    won: dict[Label, int] = {}
    for point in surface.points:
        if point.winner is not None:
            won[point.winner] = won.get(point.winner, 0) + 1
    total = len(surface.points)
    ordered = sorted(won, key=lambda label: -won[label])
    parts = [f"{names[label]} is faster at {won[label]} of {total} loads" for label in ordered[:1]]
    parts += [f"{names[label]} at {won[label]}" for label in ordered[1:]]
    text = ", ".join(parts) or f"no winner at any of {total} loads"
    others = {"no_difference": "equal at", "inconclusive": "undecided at", "invalid": "invalid at"}
    rest = [
        f"{words} {count}"
        for state, words in others.items()
        if (count := sum(point.state == state for point in surface.points))
    ]
    return f"{text}; {', '.join(rest)}" if rest and won else text


def crossing_in_words(surface: Surface, crossing: Crossing, names: Mapping[Label, str]) -> str:
    """ "B is faster from 24 users (17–31) on at batch 8, A below"; where some of the points beyond the interval have no
    winner, "B overtakes A at 24 users (17–31), batch 8"."""
    above, below = names[crossing.above], names[crossing.below]
    low, high = crossing.ci95
    row = surface.rows[crossing.size]
    is_complete = all(
        point.winner == (crossing.below if point.users < low else crossing.above)
        for point in row
        if not low <= point.users <= high
    )
    if is_complete:
        return f"{above} is faster from {crossing.words} on at {surface.at(crossing.size)}, {below} below"
    return f"{above} overtakes {below} at {crossing.words}, {surface.at(crossing.size)}"


def rows_in_words(surface: Surface, names: Mapping[Label, str]) -> list[str]:
    """A clause per size: its crossings, or who wins where."""
    return [_row_in_words(surface, size, row, names) for size, row in surface.rows.items()]


def _row_in_words(surface: Surface, size: int, row: Sequence[SurfacePoint], names: Mapping[Label, str]) -> str:
    crossed = [crossing for crossing in surface.crossings if crossing.size == size]
    if crossed:
        return join([crossing_in_words(surface, crossing, names) for crossing in crossed])
    won = [point for point in row if point.winner is not None]
    if not won:
        return f"no winner at {surface.at(size)}"
    winner = names[won[0].winner or ""]
    if len(won) == len(row):
        return f"{winner} is faster at {surface.at(size)} with any number of users"
    if len(won) > 1 and won == row[-len(won) :]:
        return f"{winner} is faster at {surface.at(size)} from {won[0].users} users on, no winner below"
    users = ", ".join(str(point.users) for point in won)
    return f"{winner} is faster at {surface.at(size)} with {users} users, no winner with the others"
