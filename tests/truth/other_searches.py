"""What `abserve tune` could have searched with instead: contenders at random, and Optuna's TPE.

Only what is measured next differs. Finalists and winners are chosen as `Search` chooses them, from the same regression.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

import numpy as np

from loadgen.records.run import Label
from loadgen.records.tuning import Contender, Space, TuningRun
from loadgen.tune.search import Search
from loadgen.tune.space import canonical, every_contender

ASKED = 40
"""Suggestions of a library that have been measured already, before one is drawn at random."""
WORST = -1.0
"""What a library is told of a contender with wrong answers, as a log ratio."""


class RandomSearch(Search):
    """The defaults first, then any contender that has no name yet."""

    def __init__(self, spaces: Sequence[Space], seed: int) -> None:
        super().__init__(spaces, seed)
        self._draws = {space.target: np.random.default_rng([seed, *space.target.encode(), 7]) for space in spaces}

    def _suggestions(self, target: str) -> Iterator[Contender]:
        space = self.spaces[target]
        every = list(every_contender(space))
        for place in self._draws[target].permutation(len(every)):
            known = len(self.contenders)
            contender = self._name(target, every[place])
            if len(self.contenders) > known:
                yield contender


class TpeSearch(RandomSearch):
    """Optuna's tree of Parzen estimators, multivariate, with a group for each set of settings that apply together."""

    def __init__(self, spaces: Sequence[Space], seed: int) -> None:
        optuna = self._optuna = import_module("optuna")
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._studies: dict[str, Any] = {}
        self._asked: dict[Label, tuple[str, Any]] = {}
        """By contender that is not measured yet, its target and Optuna's trial."""
        self._values: dict[Label, float] = {}
        super().__init__(spaces, seed)
        for space in spaces:
            sampler = optuna.samplers.TPESampler(multivariate=True, group=True, constant_liar=True, seed=seed)
            self._studies[space.target] = optuna.create_study(direction="maximize", sampler=sampler)
            self._studies[space.target].enqueue_trial({item.name: item.default for item in space.settings})
            self._ask(space.target)  # the defaults

    def tell(self, run: TuningRun) -> None:
        """As `Search`, and of screenings Optuna gets the scores."""
        super().tell(run)
        if run.stage == "screening":
            values = {score.contender: score.log_ratio for score in run.scores} | dict.fromkeys(run.out, WORST)
            self._values |= values | {self.anchor: 0.0}
            for name in [name for name in self._asked if name in self._values]:
                target, trial = self._asked.pop(name)
                self._studies[target].tell(trial, self._values[name])

    def _suggestions(self, target: str) -> Iterator[Contender]:
        asked = 0
        while asked < ASKED:
            known = len(self.contenders)
            contender = self._ask(target)
            asked += 1
            if len(self.contenders) > known:
                asked = 0
                yield contender
        yield from super()._suggestions(target)

    def _ask(self, target: str) -> Contender:
        space, trial = self.spaces[target], self._studies[target].ask()
        values: dict[str, str] = {}
        for item in space.settings:
            if all(values.get(name) in allowed for name, allowed in item.when.items()):
                values[item.name] = trial.suggest_categorical(item.name, item.values)
        contender = self._name(target, canonical(space, values))
        if contender.name in self._values:  # the settings differ, and not the server
            self._studies[target].tell(trial, self._values[contender.name])
        elif contender.name in self._asked:
            self._studies[target].tell(trial, state=self._optuna.trial.TrialState.PRUNED)
        else:
            self._asked[contender.name] = target, trial
        return contender
