"""The calibration of this machine's load generator: where it is stored and how it is read."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from loadgen.documents import DocumentError, read_named, read_record
from loadgen.machine.environment import installed_versions, read_host
from loadgen.machine.fingerprint import cache_path, fingerprint, store_record
from loadgen.records.machine import Calibration

PACKAGES = ("abserve", "gevent", "greenlet", "grpcio", "locust", "msgspec", "numpy", "tritonclient")
"""Packages whose versions affect the generator's speed."""


class CalibrationError(Exception):
    """A calibration cannot be made, stored or read; the message names the remedy."""


def read_machine() -> tuple[dict[str, str | int | float | None], dict[str, str]]:
    return read_host(), installed_versions(PACKAGES)


def default_path(digest: str) -> Path:
    """`$XDG_CACHE_HOME/abserve/calibration-FINGERPRINT.json`."""
    return cache_path("calibration", digest)


def write_calibration(calibration: Calibration, path: Path) -> None:
    """Raises `CalibrationError`."""
    try:
        store_record(path, calibration)
    except OSError as exc:
        raise CalibrationError(f"cannot store {path}: {exc.strerror or exc}; choose another --out") from exc


def read_calibration(path: Path) -> Calibration:
    """Raises `CalibrationError` for a missing or unreadable file."""
    try:
        return cast("Calibration", read_record(read_named(path), Calibration))
    except (OSError, DocumentError) as exc:
        raise CalibrationError(f"cannot read the calibration {path}: {exc}; make one with: abserve calibrate") from exc


def own_calibration() -> Calibration | None:
    """The calibration of this machine with the installed versions; None when it is missing or unreadable."""
    try:
        return read_calibration(default_path(fingerprint(*read_machine())))
    except CalibrationError:
        return None
