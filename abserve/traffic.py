"""Recorded traffic as Python objects: its requests, what they contain, and how it was recorded."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from abserve.errors import AbserveError
from abserve.packages import own_packages

if TYPE_CHECKING:
    from loadgen.records.traffic import RecordedTraffic


def load_traffic(folder: str | os.PathLike[str]) -> RecordedTraffic:
    """The traffic in a folder of `abserve record`, also while it is recorded, in a HAR file, or in a trace of AIPerf
    with prompts. Raises `AbserveError` if it holds none or cannot be read.

    `requests` are in the order of their arrivals; `content` and `answer` give the bytes of one, `recording` says how it
    was recorded and what is missing, and `save` writes some or all requests into a new folder.
    """
    with own_packages():
        from loadgen.records.imported import read_traffic
        from loadgen.records.traffic import TrafficError

        try:
            traffic = read_traffic(os.fspath(folder))
            _ = traffic.requests
        except TrafficError as exc:
            raise AbserveError(str(exc)) from exc
        return traffic
