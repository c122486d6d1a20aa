from __future__ import annotations

from loadgen.records.run import Found, Record


class Temperature(Record, frozen=True, kw_only=True):
    """Of the room."""

    FILE = "temperature.json"
    celsius: float


class TemperatureFound(Found, frozen=True, kw_only=True):
    """The temperature, if it was read."""

    STUDY = "temperature"
    celsius: float | None = None
    warm: bool = False
