"""Where a calibration is kept, and which one belongs to this machine as it is now."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import cast

import msgspec

from loadgen.documents import DocumentError, read_record
from loadgen.machine.environment import read_environment
from loadgen.machine.fingerprint import cache_folder, fingerprint
from loadgen.records.machine import Calibration
from loadgen.result.result_file import write_atomically

PACKAGES = ("abserve", "gevent", "greenlet", "grpcio", "locust", "msgspec", "numpy", "tritonclient")
"""Whose versions bear on the generator's speed."""


class CalibrationError(Exception):
    """A calibration cannot be made, stored or read; the message names the remedy."""


def read_machine() -> tuple[dict[str, str | int | float | None], dict[str, str]]:
    """The host, and the versions that bear on the generator."""
    packages = {}
    for name in PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    return read_environment({}, {}).host, packages


def default_path(digest: str) -> Path:
    """`$XDG_CACHE_HOME/abserve/calibration-FINGERPRINT.json`."""
    return cache_folder() / f"calibration-{digest}.json"


def write_calibration(calibration: Calibration, path: Path) -> None:
    """Raises `CalibrationError`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, msgspec.json.format(msgspec.json.encode(calibration), indent=1) + b"\n")
    except OSError as exc:
        raise CalibrationError(f"cannot store {path}: {exc.strerror or exc}; choose another --out") from exc


def read_calibration(path: Path) -> Calibration:
    """Raises `CalibrationError` for a missing or unreadable file."""
    try:
        return cast("Calibration", read_record(path.read_bytes(), Calibration))
    except (OSError, DocumentError) as exc:
        raise CalibrationError(f"{path} is no calibration: {exc}; make one with: abserve calibrate") from exc


def own_calibration() -> Calibration | None:
    """This machine's, with the versions that are installed now; None where there is none that can be read."""
    try:
        return read_calibration(default_path(fingerprint(*read_machine())))
    except CalibrationError:
        return None
