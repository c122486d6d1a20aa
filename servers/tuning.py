"""Settings that only affect a server's speed: which of them apply. Imports no other module of the project.

`all` leaves a server as it is configured, `none` gives it its own defaults, and a list of names keeps only these.
`abserve compare` starts such servers beside an arm to see whether its configuration makes it slow.
"""

from __future__ import annotations

from collections.abc import Iterable

ALL = "all"
NONE = "none"


class TuningError(ValueError):
    """The choice names a setting that the server does not have; the message lists those that it has."""


def keeps(tuning: str, names: Iterable[str]) -> frozenset[str]:
    """Which of the settings `names`, those that are set, the choice `tuning` keeps. Raises `TuningError`."""
    have = frozenset(names)
    if tuning in (ALL, NONE):
        return have if tuning == ALL else frozenset()
    asked = frozenset(name.strip() for name in tuning.split(","))
    if unknown := asked - have:
        known = f"set here: {', '.join(sorted(have))}" if have else "none is set here"
        raise TuningError(f"--tuning {tuning}: {', '.join(sorted(unknown))} is not a setting in effect; {known}")
    return asked
