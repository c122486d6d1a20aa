"""The whole of a tuning: screenings, the finalists measured freshly, the winners without one setting each, the final.

Each stage has its share of the minutes. The screenings end when the next one would not leave time for what follows,
and the final takes what is left, so that the whole lasts as long as it was asked to. Everything that was decided is a
function of the stored runs: a tuning that goes on after an interruption replays them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from time import monotonic

import msgspec

from loadgen.base.child_process import ABSERVE
from loadgen.base.documents import FINAL, free_path
from loadgen.base.quantities import counted
from loadgen.experiment.plan import PlanError
from loadgen.experiment.settings import ArmSettings, ExperimentSettings
from loadgen.experiment.tuning import TuneSettings, final_settings, screening_settings
from loadgen.launch.work_folder import work_folder
from loadgen.measure.errors import RunError
from loadgen.measure.interruption import interruptible
from loadgen.measure.planning import plan_experiment
from loadgen.measure.preparation import Prepared
from loadgen.measure.progress import RunProgress
from loadgen.records.run import Experiment, Label, RunState
from loadgen.records.store import StorageError, StoredRunError, read_one, running, write_record
from loadgen.records.tuning import ANCHOR, Contender, Space, Stage, Tuning, TuningRun
from loadgen.tune.screening import screen
from loadgen.tune.search import Choice, RaceLead, Search

FINAL_SHARE, LEAST_FINAL_S, MOST_FINAL_SHARE = 0.25, 240.0, 0.4
"""The final gets a quarter of the time, of a short tuning four minutes, but never more than two fifths."""
STARTS, MOST_START_SHARE = (5, 3), 0.6
"""Starts of the servers in the final: the first of these that take at most this share of its time, else one. With one
start the winner of equal servers may be who had the luckier start, see docs/tuning.md."""
PLANNED_START_SHARE = 0.5
"""The final's time is planned for this share of the fewer starts: the stages before it may take longer than planned."""
FINALISTS_SHARE, SETTINGS_SHARE = 0.15, 0.1
"""A stage for which its share is too short is left out, and the screenings get its time."""
START_S, ARM_S = 10.0, 9.0
"""Seconds of a screening and of each of its arms, for planning before one has run."""
FINALISTS = (3, 2)
"""Finalists of each target: the first of these that fit. Where none does, the screenings choose."""
MOST_PASSES = 3
"""Most fresh measurements of a finalist, each with its own start of the server."""
TRIES = 3
"""Runs that may count for nothing, one after the other, before the tuning ends."""
AFTER_S = 5.0
"""Of the analysis and the reports of the final, for planning."""
LEAST_SHARE_OF_FINAL = 0.5
"""Of its planned time, whatever the stages before it took."""
LAST = 3
"""Runs by which the next one is planned."""
STAGE_TITLES: Mapping[Stage, str] = {
    "screening": "screening",
    "finalists": "finalists",
    "settings": "settings put back",
}


class RaceProgress(RunProgress):
    """Listens to a tuning and shows nothing."""

    def stage_begins(self, title: str) -> None:
        """A run of the tuning begins."""

    def run_done(self, run: TuningRun, leads: Sequence[RaceLead]) -> None:
        """A run is stored, and where the race stands after it."""

    def time_left(self, seconds: float) -> None:
        """Until the whole tuning ends."""


def seconds_of(minutes: float) -> dict[Stage, float]:
    """The seconds of each stage of a tuning of so many minutes; the screenings get what the others leave."""
    total = 60.0 * minutes
    final = min(max(LEAST_FINAL_S, FINAL_SHARE * total), MOST_FINAL_SHARE * total)
    others: dict[Stage, float] = {
        "finalists": FINALISTS_SHARE * total, "settings": SETTINGS_SHARE * total, "final": final,
    }  # fmt: skip
    return {"screening": total - sum(others.values()), **others}


def forecast(minutes: float, at_once: int) -> tuple[int, int]:
    """How many screenings fit into a tuning, and how many places for contenders they have, before one has run."""
    count = max(1, int(seconds_of(minutes)["screening"] / (START_S + ARM_S * (at_once + 1))))
    return count, count * at_once


class TuningRace:
    """One tuning: its stages, and what their runs have shown so far."""

    def __init__(
        self, settings: TuneSettings, spaces: Sequence[Space], folder: Path, progress: RaceProgress,
        compare: Callable[[Experiment, Path], RunState | None], *,
        abserve: Sequence[str] = ABSERVE, gpu: bool = False, padding: tuple[int, ...] | None = None,
        resume: Tuning | None = None,
    ) -> None:  # fmt: skip
        """`compare` runs the final comparison with its reports, and returns how it ended, None if nothing could be
        stored. `gpu`: whether the servers may run on a GPU. `padding` are the sizes to which all servers pad, see
        `Experiment.pad_to`. `resume` was read from the folder."""
        tuning = resume or Tuning(settings=settings.content(), spaces=tuple(spaces))
        self.settings, self.folder, self.progress, self.tuning = settings, folder, progress, tuning
        self.compare, self.abserve = compare, abserve
        self.prepared: Prepared
        searched = {setting.name for space in tuning.spaces for setting in space.settings}
        self.padding = () if "pad-to" in searched else padding
        """The sizes to which all contenders pad; none where each has its own."""
        self.at_once = settings.side_by_side(gpu=gpu)
        self.shares = seconds_of(settings.minutes)
        self.began_s = monotonic() - sum(run.seconds for run in tuning.runs)
        self.processes = settings.processes
        """Of the load generator; 0 until a run has chosen their number."""
        self.problems = 0
        """Runs that counted for nothing since the last one that counted."""
        self.search = Search(tuning.spaces, settings.seed, contenders=tuning.contenders, runs=tuning.runs)

    def run(self) -> Tuning:
        """Run the tuning, or go on with it. Returns it as far as it got; `tuning.json` has the same. Raises
        `StorageError` only if nothing can be stored."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise StorageError(f"cannot write to {self.folder}: {exc.strerror or exc}; choose another --out") from exc
        with interruptible(), running(self.folder), work_folder("tune") as work:
            self.prepared = Prepared(work / "samples")
            try:
                self.store(state="running", error=None)
                self._all_stages()
            except KeyboardInterrupt:
                self.store(state="interrupted")
            except (RunError, PlanError, StoredRunError) as exc:
                self.store(state="failed", error=str(exc))
            else:
                self.store(state="finished")
        return self.tuning

    def store(self, **changes: object) -> None:
        """Write the tuning with these changes. Raises `StorageError`."""
        changes = {"contenders": self.search.contenders, **changes}
        self.tuning = msgspec.structs.replace(self.tuning, **changes)
        write_record(self.folder / Tuning.FILE, self.tuning)

    @property
    def left_s(self) -> float:
        """Seconds until the whole should end."""
        return self.began_s + 60.0 * self.settings.minutes - monotonic()

    def _all_stages(self) -> None:
        """All stages that are still to come."""
        if not self.tuning.winners:
            self._screen()
            self._measure_finalists()
            self._choose()
        self._put_back()
        self._choose()  # again: a run that put a setting back may have put a winner out
        self._compare()

    def _screen(self) -> None:
        while True:
            later_s = self.shares["finalists"] * bool(self._finalists_each()) + self.final_s
            later_s += self.shares["settings"] * (self._expected_s(2) <= self.shares["settings"])
            places = self.at_once
            if self._of("screening"):
                fitting = range(self.at_once, 0, -1)
                places = next((count for count in fitting if self._expected_s(count) <= self.left_s - later_s), 0)
            if not places or self.tuning.finalists or self._of("finalists"):
                return
            contenders = self.search.next_screening(places)
            if not contenders:
                return
            self._measure("screening", contenders)

    def _measure_finalists(self) -> None:
        """Once if the time allows, and again as long as it does."""
        each = self._finalists_each()
        finalists = [*map(self._named, self.tuning.finalists)] or self.search.finalists(each or 1)
        if not finalists:
            reasons = [*chain.from_iterable(run.out.values() for run in self.tuning.runs)]
            reasons += [run.problem for run in self.tuning.runs if run.problem is not None]
            raise RunError(" ".join(["no contender could be measured.", *reasons[:1]]))
        if not each and not self.tuning.finalists:
            return
        self.store(finalists=tuple(contender.name for contender in finalists))
        finalists = [contender for contender in finalists if contender.name != self.search.anchor]
        later_s = self.shares["settings"] + self.final_s
        for number in range(MOST_PASSES):
            left = [c for c in finalists if self._times("finalists", c) <= number and self._is_contender(c)]
            needed_s = sum(self._expected_s(len(group)) for group in self._groups(left))
            if not left or (number and needed_s > self.left_s - later_s):
                return
            for group in self._groups(left[number:] + left[:number]):
                self._until_measured("finalists", group, number + 1)

    def _finalists_each(self) -> int:
        """How many finalists of each target can be measured once in the share of the stage; 0: too few to choose."""

        def seconds(each: int) -> float:
            count = each * len(self.tuning.spaces)
            return self._expected_s(count) + (self._expected_s(0) if count > self.at_once else 0.0)

        return next((each for each in FINALISTS if seconds(each) <= self.shares["finalists"]), 0)

    def _put_back(self) -> None:
        """Measure the winners beside themselves with one setting at its default, as far as the time allows."""
        runs: list[list[Contender]] = []
        for name in self.tuning.winners if self.at_once > 1 else ():
            winner = self._named(name)
            others = [c for c in self.search.put_back(winner).values() if self._is_contender(c)]
            left = [c for c in others if not self._times("settings", c)]
            for group in self._groups(left, beside=1):
                if runs and len(runs[-1]) + 1 + len(group) <= self.at_once:
                    runs[-1] += [winner, *group]
                else:
                    runs.append([winner, *group])
        for contenders in runs:
            if self._expected_s(len(contenders)) > self.left_s - self.final_s:
                return
            self._measure("settings", contenders)

    def _choose(self) -> None:
        """Store the winner of each target. If these and the defaults are a single arm, the best of what changes a
        setting takes the place of the defaults, so that the final shows whether anything that was tried is better."""
        winners = {choice.target: self._winner(choice) for choice in self.search.winners()}
        if len(self._arms(winners.values())) == 1:
            others = [c for target in winners if (c := self.search.runner_up(target)) is not None]
            winners |= {other.target: other for other in others}
        self.store(winners=tuple(winner.name for winner in winners.values()))

    def _arms(self, winners: Iterable[Contender]) -> dict[Label, ArmSettings]:
        """The arms of the final: the defaults and the winners, of each what is not out."""
        both = chain.from_iterable((self._named(f"{winner.target}-0"), winner) for winner in winners)
        return {contender.name: self._arm(contender) for contender in both if not self._is_out(contender)}

    def _compare(self) -> None:
        """The final comparison of the defaults and the winners. Raises `RunError` without two arms."""
        arms = self._arms(self._named(name) for name in self.tuning.winners)
        if len(arms) < 2:
            left = ", ".join(arms) or "no contender"
            raise RunError(f"only {left} could be measured, so there is nothing to compare it with.")
        left_s = max(self.left_s - AFTER_S, LEAST_SHARE_OF_FINAL * self.final_s)
        starts = next((many for many in STARTS if many * self._start_s(len(arms)) <= MOST_START_SHARE * left_s), 1)
        self.progress.stage_begins("final comparison of the defaults and the best")
        experiment = self._plan(final_settings(self.settings, arms, left_s / 60.0, starts))
        folder = self.folder / FINAL
        if folder.exists():  # of a final that was interrupted
            folder.rename(free_path(folder))
        began = monotonic()
        state = self.compare(experiment, folder)
        if state is None:
            raise RunError("nothing of the final comparison could be stored")
        if state.state == "interrupted":
            raise KeyboardInterrupt
        if state.state != "finished":
            raise RunError(f"the final comparison did not finish: {state.error}")
        run = TuningRun(folder=FINAL, stage="final", seconds=monotonic() - began)
        self.store(runs=(*self.tuning.runs, run))

    # One run

    def _until_measured(self, stage: Stage, contenders: Sequence[Contender], times: int) -> None:
        """Measure the contenders until each was measured so often in this stage or is out, but not without end. Raises
        `RunError`."""
        for _ in range(TRIES):
            waiting = [c for c in contenders if self._times(stage, c) < times and self._is_contender(c)]
            if not waiting:
                return
            self._measure(stage, waiting)

    def _measure(self, stage: Stage, contenders: Sequence[Contender]) -> None:
        """One run of contenders beside the anchor, stored and told to the search. Raises `RunError` after several
        that count for nothing."""
        names = ", ".join(contender.name for contender in contenders)
        number = len(self.tuning.runs) + 1
        self.progress.stage_begins(f"run {number}, {STAGE_TITLES[stage]}: {names}")
        self.progress.time_left(self.left_s)
        arms = {ANCHOR: self._arm(Contender(name=ANCHOR, target=self.tuning.spaces[0].target, settings={}))}
        arms |= {contender.name: self._arm(contender) for contender in contenders}
        experiment = self._plan(screening_settings(self.settings, arms))
        experiment = msgspec.structs.replace(
            experiment, screening=True, processes=self.processes, seed=self.settings.seed + number
        )
        folder, began = free_path(self.folder / f"{number:02d}-{stage}"), monotonic()  # one may have been interrupted
        run, state = screen(experiment, folder, self.progress, self.settings, self.prepared, abserve=self.abserve)
        anchor = run.anchor and msgspec.structs.replace(run.anchor, contender=self.search.anchor)
        run = msgspec.structs.replace(run, stage=stage, anchor=anchor, seconds=monotonic() - began)
        self.search.tell(run)
        self.store(runs=(*self.tuning.runs, run))
        self.progress.run_done(run, [self.search.lead(target) for target in self.search.spaces])
        if state.state == "interrupted":
            raise KeyboardInterrupt
        stored = read_one(folder, Experiment)
        self.processes = self.processes or (stored.processes if stored is not None else 0)
        self.problems = self.problems + 1 if run.problem is not None and not run.out else 0
        if self.problems >= TRIES:
            raise RunError(f"{counted(TRIES, 'run')} after each other counted for nothing. {run.problem}")

    def _plan(self, settings: ExperimentSettings) -> Experiment:
        experiment = plan_experiment(settings).runs[0][1]
        return experiment if self.padding is None else msgspec.structs.replace(experiment, pad_to=self.padding)

    def _arm(self, contender: Contender) -> ArmSettings:
        fixed = next(space.fixed for space in self.tuning.spaces if space.target == contender.target)
        return ArmSettings(target=contender.target, options={**fixed, **contender.settings})

    # What the runs so far say

    def _of(self, stage: Stage) -> list[TuningRun]:
        return [run for run in self.tuning.runs if run.stage == stage]

    def _times(self, stage: Stage, contender: Contender) -> int:
        """How often a stage has measured a contender."""
        return sum(any(score.contender == contender.name for score in run.scores) for run in self._of(stage))

    def _is_out(self, contender: Contender) -> bool:
        return any(contender.name in run.out for run in self.tuning.runs)

    def _is_contender(self, contender: Contender) -> bool:
        """Whether it may run beside the anchor: it is not the anchor and was not ruled out."""
        return contender.name != self.search.anchor and not self._is_out(contender)

    def _named(self, name: Label) -> Contender:
        return next(contender for contender in self.search.contenders if contender.name == name)

    def _winner(self, choice: Choice) -> Contender:
        """The winner of a target; if none keeps the limit the nearest to it, and if none was measured the defaults."""
        return choice.winner or choice.nearest or self._named(f"{choice.target}-0")

    def _groups(self, contenders: Sequence[Contender], beside: int = 0) -> list[list[Contender]]:
        """The contenders in runs of equal size; a run also has `beside` others, such as the anchor."""
        count = math.ceil(len(contenders) / max(1, self.at_once - beside))
        return [list(contenders[place::count]) for place in range(count)]

    @property
    def final_s(self) -> float:
        """Seconds of the final: its share, or more if its servers need that to be started often enough."""
        needed_s = min(STARTS) * self._start_s(2 * len(self.tuning.spaces)) / PLANNED_START_SHARE
        return max(self.shares["final"], min(needed_s, MOST_FINAL_SHARE * 60.0 * self.settings.minutes))

    def _start_s(self, arms: int) -> float:
        """Seconds of a start of so many servers with all that precedes their load, by the last runs."""
        last = [run for run in self.tuning.runs if run.scores and run.load_seconds][-LAST:]
        started = sum(len(run.scores) + 1 for run in last)
        return sum(run.seconds - run.load_seconds for run in last) / started * arms if started else 0.0

    def _expected_s(self, contenders: int) -> float:
        """Seconds of a run with so many contenders, by the last ones."""
        last = [run for run in self.tuning.runs if run.stage != "final" and run.scores][-LAST:]
        if not last:
            return START_S + ARM_S * (contenders + 1)
        arms = sum(len(run.scores) + 1 for run in last)
        return sum(run.seconds for run in last) / arms * (contenders + 1)
