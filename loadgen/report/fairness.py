"""What was looked at before the load, in words: "14 fairness checks passed, 2 need a look"."""

from __future__ import annotations

from collections.abc import Sequence

from loadgen.analysis.checks.fairness.arms import SAME
from loadgen.analysis.checks.fairness.definitions import FAIRNESS_DEFINITIONS
from loadgen.analysis.checks.names import CheckName
from loadgen.analysis.checks.outcome import Check

NAMES = {name.value for name in (*FAIRNESS_DEFINITIONS, *SAME, CheckName.SETTINGS_IN_EFFECT)}


def fairness_summary(checks: Sequence[Check]) -> str | None:
    """Counted by name, an arm that needs a look outweighing one that does not; None where nothing was looked at."""
    states: dict[str, list[bool | None]] = {}
    for check in checks:
        if check.name in NAMES:
            states.setdefault(check.name, []).append(check.ok)
    if not states:
        return None
    look = sum(1 for found in states.values() if False in found)
    unknown = sum(1 for found in states.values() if False not in found and None in found)
    passed = len(states) - look - unknown
    words = f"{passed} fairness check{'' if passed == 1 else 's'} passed, {look} need{'s' if look == 1 else ''} a look"
    return words + (f", {unknown} could not be made" if unknown else "")


def fairness_lines(checks: Sequence[Check]) -> list[str]:
    """Each check that needs a look, with its remedy."""
    return [
        f"{check.title}? {check.detail} → {check.remedy}"
        for check in checks
        if check.name in NAMES and check.ok is False
    ]
