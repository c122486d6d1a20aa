"""Prints the simulated tables of docs/results/measured/statistics.md, in half an hour.

`python -m tests.truth.tables [NAME …]` prints those named. They depend on seeds and on the code, not on the machine.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping

import numpy as np

from loadgen.stats.ratios import detectable_effect
from loadgen.tune.search import Search
from tests.truth import promises, simulated_tuning
from tests.truth.closed_loops import KINDS, bias
from tests.truth.planted_runs import TRUTHS, try_truth
from tests.truth.simulated_batches import PLACES, best, own
from tests.truth.simulated_rules import BEYOND, ENDINGS, LASTING, MACHINES, Machine, winners
from tests.truth.simulated_runs import plain, weather
from tests.truth.simulated_states import GAUSSIAN, JUMPS, ONE_OF_FIVE, PLANS, Plan, States, false_winners, found
from tests.truth.simulated_surfaces import SIZES, names_a_point, play_surface


def percent(share: promises.Share) -> str:
    """98.1 %."""
    return f"{100 * share.value:.1f} %"


def table(headings: str, rows: Iterator[str], first: int = 1) -> str:
    """Markdown; columns after the first ones are numbers."""
    columns = headings.count("|") + 1
    rule = " | ".join(["---"] * first + ["---:"] * (columns - first))
    return "\n".join([f"| {headings} |", f"| {rule} |", *(f"| {row} |" for row in rows), ""])


RUNS, MAPS, TUNINGS = 1000, 200, 100
STRONGEST = LASTING[-1]


def one_run_in_twenty() -> Iterator[str]:
    """False winners by every rule that ends a run."""
    for machine in (*MACHINES, BEYOND):
        shares = [percent(promises.Share(winners(ending, machine, RUNS), RUNS)) for ending in ENDINGS]
        yield f"{machine.name} | {' | '.join(shares)}"


def lasting_states() -> Iterator[str]:
    """False winners where arms stay fast or slow."""
    for states in (States(0.0), GAUSSIAN, *JUMPS, *ONE_OF_FIVE):
        shares = [
            "–" if states.only_first and plan.workloads == 1 else percent(false_winners(plan, states, runs_of(plan)))
            for plan in PLANS
        ]
        yield f"{states} | {' | '.join(shares)}"


def runs_of(plan: Plan) -> int:
    """As many as a minute allows."""
    return RUNS // 5 if plan.until_decided else RUNS // 2 if plan.arms > 2 else 4 * RUNS if plan.rounds < 30 else RUNS


def planted_in_independent_rounds() -> Iterator[str]:
    """Differences that are found, where blocks scatter by 2 %."""
    for plan in (Plan(4, 1), Plan(4), Plan(8), Plan(14, 1), Plan(14), Plan(30), Plan(14, 7, arms=4)):
        trials = RUNS // (plan.workloads * (plan.arms - 1))
        yield f"{plan} | {' | '.join(percent(found(plan, faster, trials)) for faster in (1.02, 1.05, 1.1))}"


def own_figures() -> Iterator[str]:
    """Intervals of an arm's own throughput that hold it, and those of a t interval over all blocks."""
    for sizes in ((23, 17, 7), (4, 4, 4, 4, 4), (6, 6)):
        for start in (0.0, 0.01, 0.02, 0.05):
            shares = promises.own_figure(RUNS, sizes, start, 0.0)
            yield f"{', '.join(map(str, sizes))} | {100 * start:g} % | 0 | {' | '.join(map(percent, shares))}"
    for blocks in (4, 14, 30):
        for correlation in (0.0, 0.3, 0.5):
            shares = promises.own_figure(RUNS, (blocks,), 0.0, correlation)
            yield f"{blocks} | – | {correlation:g} | {' | '.join(map(percent, shares))}"


def until_decided_with_tails() -> Iterator[str]:
    """False winners of runs until decided that compare p90 and p99 too."""
    for machine in (MACHINES[0], *(machine for machine in MACHINES if machine.correlation == STRONGEST.correlation)):
        endings = [ending for ending in ENDINGS if ending.rule == "until decided"]
        shares = [
            percent(promises.Share(winners(ending, machine, 2 * RUNS, tails=True), 2 * RUNS)) for ending in endings
        ]
        yield f"{machine.name} | {' | '.join(shares)}"


def false_maps(machine: Machine, trials: int, arms: int, sizes: tuple[int, ...] = SIZES) -> promises.Share:
    """Decision surfaces of identical arms that name any winner."""
    rng = np.random.default_rng(31)
    named = sum(names_a_point(play_surface(machine, rng, arms=arms, sizes=sizes)) for _ in range(trials))
    return promises.Share(named, trials)


def planted_maps(
    machine: Machine, trials: int, crossings: Mapping[int, float]
) -> tuple[promises.Share, promises.Share]:
    """Planted crossings that are found, the right arm below, and among them those in their intervals."""
    rng, found, covered = np.random.default_rng(37), 0, 0
    for _ in range(trials):
        surface = play_surface(machine, rng, crossings, sizes=tuple(crossings)).surface
        right = [crossing for crossing in surface.crossings if (crossing.below, crossing.above) == ("a", "b")]
        found += len(right)
        covered += sum(low <= crossings[crossing.size] <= high for crossing in right for low, high in [crossing.ci95])
    return promises.Share(found, trials * len(crossings)), promises.Share(covered, max(found, 1))


def surfaces() -> Iterator[str]:
    """Decision surfaces with time for 12 rounds of each point."""
    for machine in MACHINES:
        shares = [false_maps(machine, MAPS, 2), false_maps(machine, MAPS // 2, 3, sizes=(1, 8))]
        shares += planted_maps(machine, MAPS // 2, {1: 3.0, 8: 11.0})
        yield f"{machine.name} | {' | '.join(map(percent, shares))}"


def batches() -> Iterator[str]:
    """The native server's rule for batches beside the best that waits for a fixed number of rows."""
    for mean_ms, same in PLACES:
        ours, others = own(mean_ms, same), best(mean_ms, same)
        share = f"{ours.rows_per_s / others.rows_per_s:.2f}"
        yield (
            f"{mean_ms} ms | {100 * same:.0f} % | {ours.rows_per_s:,.0f} | {ours.rows:.1f} | {others.rows_per_s:,.0f} "
            f"| {others.rows:.1f} | {share}"
        )


def detectable() -> Iterator[str]:
    """Smallest differences that are named."""
    for pairs in (4, 6, 12):
        effects = [detectable_effect(0.02 / math.sqrt(pairs), pairs - 1, family) for family in (1, 10, 20)]
        yield f"{pairs} | " + " | ".join(f"{100 * (effect or 0.0):.1f} %" for effect in effects)


def fixed_plan() -> Iterator[str]:
    """Coverage and power."""
    for noise in (plain, weather):
        shares = [percent(promises.coverage(2000, noise, pairs)) for pairs in (4, 12)]
        yield f"95 % intervals that cover a true ratio of 1.05, of 2,000 (≥ 92 %) | {noise.__name__} | " + (
            " | ".join(shares)
        )
    power = [percent(promises.power_at_the_stated_effect(500, plain, pairs)) for pairs in (4, 12)]
    yield f"differences of the stated detectable size that are named, of 500 (about 80 %) | plain | {' | '.join(power)}"


def restarts() -> Iterator[str]:
    """Coverage over restarts and over pairs."""
    for number, pairs in ((2, 6), (5, 2), (5, 4), (10, 2)):
        for between in (0.0, 0.01, 0.03):
            over = [
                percent(promises.coverage_with_restarts(2000, between, number, pairs, as_pairs=as_pairs))
                for as_pairs in (False, True)
            ]
            yield f"{number} | {pairs} | {between:.0%} | {' | '.join(over)}".replace("%", " %").replace("  %", " %")


def restarts_run() -> Iterator[str]:
    """Whole runs with restarts."""
    for spread in (0.0, 0.03):
        found = promises.false_winners(1000, plain, 10, restarts=5, restart_spread=spread)
        yield f"runs of identical arms with any winner, of 1,000 (≤ 5 %) | {100 * spread:.0f} % | {percent(found)}"
    power = promises.power_at_the_stated_effect(2000, plain, 20, 5)
    yield f"differences of the stated size that are named, of 2,000 (≥ 80 %), 20 pairs | 0 % | {percent(power)}"


def until_decided() -> Iterator[str]:
    """Coverage, false equivalence."""
    for noise in (plain, weather):
        for effect in (1.0, 1.02, 1.05):
            runs = promises.coverage_when_stopped(500, effect, noise, 40)
            yield (
                f"intervals at the stop that cover a true ratio of {effect:g}, of 500 (≥ 95 %) | {noise.__name__} | "
                f"{percent(runs)}"
            )
    runs = promises.coverage_at_all_looks(2000, 60)
    yield f"runs whose intervals cover the truth at every one of 60 looks, of 2,000 (≥ 95 %) | plain | {percent(runs)}"
    runs = promises.false_equivalence(2000, 60)
    yield f"runs ever called equivalent where the difference is δ itself, of 2,000 (≤ 5 %) | plain | {percent(runs)}"
    runs = promises.false_winners_of_repeated_t(2000, 60)
    yield f"for contrast: one comparison, the t interval looked at 60 times | plain | {percent(runs)}"


def durations() -> Iterator[str]:
    """Pairs until decided."""
    for spread in (0.02, 0.05):
        for effect in (1.0, 1.02, 1.05, 1.3):
            workloads = [f"{100 * spread:.0f} %", f"{100 * (effect - 1):.0f} %"]
            for scenarios in (1, 7):
                durations_found = promises.pairs_until_decided(500, effect, scenarios, 60, spread)
                workloads += [
                    str(durations_found.median or "> 60"),
                    str(durations_found.late or "> 60"),
                    percent(durations_found.decided),
                ]
            yield " | ".join(workloads)


def closed_loops() -> Iterator[str]:
    """Bias and coverage of the throughput of a closed loop."""
    for users in (1, 16, 64, 256):
        for kind, times in KINDS.items():
            spans = 60.0 if users == 1 else 6.0
            error, naive = bias(100, times, users, spans)
            shares = [promises.closed_loop_coverage(100, times, users, rounds, spans)[0] for rounds in (12, 24)]
            yield f"{users} | {kind} | {100 * error:+.1f} % | {100 * naive:+.1f} % | {' | '.join(map(percent, shares))}"


def tails() -> Iterator[str]:
    """Coverage of the p99."""
    for slow in (0.005, 0.009, 0.012, 0.02):
        workloads = []
        for pairs in (12, 24, 48):
            workloads += [percent(share) for share in promises.tail_coverage(300, slow, pairs, 100)]
        yield f"{100 * slow:.1f} % | {' | '.join(workloads)}"


def named_in_resembling_rounds() -> Iterator[str]:
    """A real difference where rounds are not independent."""
    for phi in (0.0, 0.5, 0.8):
        shares = [
            promises.named_in_resembling_rounds(500, effect, pairs, phi)
            for effect in (1.1, 1.2, 2.0)
            for pairs in (6, 12)
        ]
        yield f"{phi:g} | {' | '.join(map(percent, shares))}"


def by_time() -> Iterator[str]:
    """Two stages."""
    covered, _ = promises.two_stages(2000, 1.05)
    yield f"95 % intervals that cover a true ratio of 1.05, of 8,000 (92–98 %) | {percent(covered)}"


def noise_floor() -> Iterator[str]:
    """What the floor stops."""
    for between in (0.0, 0.01, 0.02, 0.04):
        shares = [
            percent(promises.false_winners_beside_the_floor(2000, between, floor=floor)) for floor in (False, True)
        ]
        yield f"{100 * between:.0f} % | {' | '.join(shares)}"


def planted() -> Iterator[str]:
    """Truths planted request by request."""
    for truth in TRUTHS:
        outcome = try_truth(truth, 400)
        verdicts = ", ".join(
            f"{verdict.replace('_', ' ')} {count}" for verdict, count in outcome.verdicts.most_common()
        )
        covered = percent(promises.Share(outcome.covered, outcome.trials))
        yield f"{truth.name} | {truth.metric} | {verdicts} | {truth.ratio:.3g} | {truth.pairs} | {covered}"


def tunings() -> Iterator[str]:
    """Targets whose best settings are found."""
    for contenders in (48, 240, 450):
        shares = [
            simulated_tuning.found_best(plant, contenders, screenings, TUNINGS)
            for plant in (simulated_tuning.planted, simulated_tuning.only_together)
            for screenings in (10, 16, 24)
        ]
        yield f"{contenders} | {' | '.join(map(percent, shares))}"


def other_searches() -> Iterator[str]:
    """Targets whose best settings are found, by what searches for them. Needs Optuna."""
    from tests.truth.other_searches import RandomSearch, TpeSearch

    for contenders, screenings in ((240, 10), (240, 16), (240, 24)):
        shares = [
            simulated_tuning.found_best(simulated_tuning.planted, contenders, screenings, TUNINGS, kind)
            for kind in (Search, RandomSearch, TpeSearch)
        ]
        yield f"{contenders} | {5 * screenings // 2} | {' | '.join(map(percent, shares))}"


def equal_targets() -> Iterator[str]:
    """Finals of equal targets that name a winner."""
    for start in (0.0, 0.005, 0.01, 0.02):
        shares = [
            simulated_tuning.named_among_equals(48, 16, TUNINGS, finals=1, restarts=restarts, start=start)
            for restarts in (1, 3, 5)
        ]
        yield f"{100 * start:g} % | {' | '.join(map(percent, shares))}"


TABLES = (
    (f"the machine | {' | '.join(map(str, ENDINGS))}", one_run_in_twenty, 1),
    ("the machine, with p90 and p99 | until decided, 30 | 12, four workloads", until_decided_with_tails, 1),
    (f"the arms | {' | '.join(map(str, PLANS))}", lasting_states, 1),
    ("the plan | 2 % faster | 5 % | 10 %", planted_in_independent_rounds, 1),
    (
        "blocks of each start | spread of a start | correlation of blocks | intervals that hold it | over all blocks",
        own_figures,
        1,
    ),
    (
        "the machine | maps of 2 identical arms with any winner | of 3 | planted crossings that are found | in their "
        "interval",
        surfaces,
        1,
    ),
    (
        "contenders of a target | all effects: 25 tried | 40 | 60 | three settings together: 25 tried | 40 | 60",
        tunings,
        0,
    ),
    ("contenders of a target | tried | abserve tune | at random | Optuna's TPE", other_searches, 0),
    ("spread of a start | finals of equal targets with a winner: 1 start | 3 | 5", equal_targets, 0),
    ("clients' time | of it the same for all | rows/s | rows | best rule's rows/s | rows | share", batches, 0),
    ("pairs | 1 comparison | 10 comparisons | 20 comparisons", detectable, 0),
    ("promise of a fixed plan | noise | 4 pairs | 12 pairs", fixed_plan, 2),
    (
        "users | request times | bias | up to the last answer | coverage, 12 rounds | 24 rounds",
        closed_loops,
        2,
    ),
    (
        "slow requests of B | p99, 12 rounds | by blocks | 24 rounds | by blocks | 48 rounds | by blocks",
        tails,
        0,
    ),
    (
        "φ | 10 % faster, 6 rounds | 12 | 20 %, 6 rounds | 12 | twice as fast, 6 rounds | 12",
        named_in_resembling_rounds,
        0,
    ),
    ("promise of rounds by time | share", by_time, 1),
    ("restarts | pairs each | spread of a restart | interval over restarts | interval over pairs", restarts, 0),
    ("promise with 5 restarts, 10 pairs | spread of a restart | share", restarts_run, 1),
    ("promise of --until decided | noise | share", until_decided, 2),
    (
        "spread of the pairs | difference | pairs of half, 1 scenario | of nine in ten | decided by 60 "
        "| pairs of half, 7 scenarios | of nine in ten | decided by 60",
        durations,
        0,
    ),
    ("spread of a restart | winners without the floor | with it", noise_floor, 0),
    ("planted | metric | verdicts of 400 runs | true B/A | pairs | intervals that cover it", planted, 3),
)


def main() -> None:
    """All of them, or those whose functions are named, each as soon as it is there."""
    for headings, rows, first in TABLES:
        if sys.argv[1:] and rows.__name__ not in sys.argv[1:]:
            continue
        sys.stdout.write(table(headings, rows(), first) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
