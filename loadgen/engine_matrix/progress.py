"""The events that the measurement of a matrix reports; the display is in `loadgen.report.engine_progress`."""

from __future__ import annotations

from loadgen.engine_matrix.records import Configuration, Visit
from loadgen.quantities import counted


class Progress:
    """Listens to a run and shows nothing. Calls come in order, from one thread."""

    def now(self, text: str) -> None:
        """The current step."""

    def visit_done(self, configuration: Configuration, visit: Visit, done: int, of: int, seconds_left: float) -> None:
        """One visit is stored; `seconds_left` is estimated from those of this run."""


def name_of(configuration: Configuration) -> str:
    """For a reader: "torchvision:resnet50 torch/eager fp32, 2 threads"."""
    threads = "" if configuration.threads is None else f", {counted(configuration.threads, 'thread')}"
    where = configuration
    return f"{where.model} {where.engine}/{where.mode} {where.precision}{threads}"
