"""How often a comparison is repeated: restarts of the servers, a fixed number of pairs, or pairs until decided."""

from __future__ import annotations

from collections.abc import Sequence

from loadgen.experiment.plan import PRESETS, PlanError
from loadgen.experiment.schedule import load_cells
from loadgen.experiment.settings import ExperimentSettings
from loadgen.records.run import Cell

LEAST_PAIRS = 4
"""With `--until decided`, where `--pairs` says nothing: two balanced rounds."""


def pairs_of(settings: ExperimentSettings) -> int | None:
    """Pairs of blocks a cell where the preset's do not suit: the least of an open-ended run, two for each restart."""
    if settings.pairs is not None:
        return settings.pairs
    if settings.until == "decided":
        return LEAST_PAIRS
    preset = PRESETS.get(settings.preset)
    return None if preset is None or settings.restarts == 1 else max(preset.pairs, 2 * settings.restarts)


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
    for label, arm in (("a", settings.a), ("b", settings.b)):
        if arm.target not in ("native", "triton"):
            raise PlanError(
                f"--restarts {settings.restarts}: --{label} {arm.target} is not started by us, so it cannot be started "
                "again; leave --restarts out, or let abserve start both servers"
            )
    fewest = min((cell.pairs for cell in load_cells(cells)), default=settings.restarts)
    if fewest < settings.restarts:
        raise PlanError(
            f"--restarts {settings.restarts} need a pair each, there are {fewest}: ask for --pairs {settings.restarts} "
            "or more"
        )
