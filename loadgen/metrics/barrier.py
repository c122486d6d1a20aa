"""One step of an analysis or of a report that fails costs itself only: `attempt` says why in place of its result.

A finding, a check, a metric, a threshold, a section: what was measured is worth more than any of them. This project's
own tests set `RAISES`, so that no fault of the program hides behind its sentence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from loadgen.base.documents import one_line
from loadgen.records.store import StoredRunError

T = TypeVar("T")
RAISES = False
"""Whether a fault of the program is raised all the same. A record that cannot be read is none."""


def attempt(step: Callable[[], T], otherwise: Callable[[str], T]) -> T:
    """What the step returns, or `otherwise` of the reason why it failed, in one line."""
    try:
        return step()
    except StoredRunError as exc:
        return otherwise(one_line(str(exc)))
    except Exception as exc:
        if RAISES:
            raise
        return otherwise(f"{type(exc).__name__}: {one_line(str(exc))}")
