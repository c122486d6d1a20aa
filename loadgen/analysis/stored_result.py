"""The result of a run's folder: from its records, or as its result.json says where the raw samples are not kept."""

from __future__ import annotations

from pathlib import Path

from loadgen.analysis.analysis import analyse
from loadgen.analysis.result import FILE_NAME, Result, read_result
from loadgen.storage.stored_run import StoredRunError


def stored_result(directory: Path) -> Result:
    """What the records say today; of a folder with a result.json and without samples, as a published one, that file.

    Such a folder must not be analysed: a run without samples is an invalid one. Raises `StoredRunError` and
    `ResultError`.
    """
    if (directory / FILE_NAME).exists() and not _records_are_kept(directory):
        return read_result(directory / FILE_NAME)
    runs = sorted(path.parent.name for path in directory.glob("*/experiment.json"))
    if runs and not (directory / "experiment.json").exists():
        raise StoredRunError(f"{directory} holds several runs; give one of its folders: {', '.join(runs)}")
    return analyse(directory)


def _records_are_kept(directory: Path) -> bool:
    if not (directory / "run.json").exists():
        return False
    return any(directory.glob("samples/*")) or not any(directory.glob("blocks/*.json"))
