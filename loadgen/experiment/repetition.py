"""How often a comparison is repeated: restarts of the servers, a fixed number of rounds, or rounds until decided."""

from __future__ import annotations

import math
from collections.abc import Sequence

from loadgen.experiment.plan import LEAST_ROUNDS, PRESETS, PlanError
from loadgen.experiment.schedule import load_cells
from loadgen.experiment.settings import ExperimentSettings
from loadgen.records.run import Cell, option_of


def least_rounds(settings: ExperimentSettings) -> int:
    """Rounds per cell, where `--rounds` does not say it: at least two for each restart, and so many that each arm comes
    equally often in each place."""
    arms = len(settings.arms)
    return math.ceil(max(LEAST_ROUNDS, 2 * settings.restarts) / arms) * arms


def minutes_of(settings: ExperimentSettings) -> float | None:
    """For the whole comparison, where the number of rounds follows from the time; more arms get more. Raises
    `PlanError` for both at once."""
    if settings.rounds is not None or settings.until == "decided":
        if settings.minutes is not None:
            other = "--rounds" if settings.rounds is not None else "--until decided"
            raise PlanError(f"--minutes and {other} both say how long the load goes on: choose one of them")
        return None
    preset = PRESETS.get(settings.preset)
    return settings.minutes or (None if preset is None else preset.minutes * len(settings.arms) / 2)


def check_repetition(settings: ExperimentSettings, cells: Sequence[Cell]) -> None:
    """Raises `PlanError` for a repetition that cannot be had, with what to ask for instead."""
    if settings.until not in ("planned", "decided"):
        raise PlanError(f"--until {settings.until}: give planned or decided")
    if settings.restarts == 1:
        return
    if settings.until == "decided":
        raise PlanError(
            "--until decided looks after every pair and --restarts makes one observation of many: choose one of them"
        )
    for label, arm in settings.arms.items():
        if arm.target not in ("native", "triton"):
            raise PlanError(
                f"--restarts {settings.restarts}: {option_of(label)} {arm.target} is not started by us, so it cannot "
                "be started again; leave --restarts out, or let abserve start all servers"
            )
    fewest = min((cell.rounds for cell in load_cells(cells)), default=settings.restarts)
    if fewest < settings.restarts:
        raise PlanError(
            f"--restarts {settings.restarts} need a round each, there are {fewest}: ask for "
            f"--rounds {settings.restarts} or more"
        )
