"""The errors that end a run, or a part of it. Those of the run's folder are in `loadgen.run.storage`."""

from __future__ import annotations


class LoadError(Exception):
    """Load could not run or was cut short; everything before it is stored."""


class PreparationError(Exception):
    """A preparation failed; the message says why."""


class ParityFailedError(Exception):
    """The arms do not compute the same function, so their speed is not compared."""
