"""The folder of an engine matrix: every record on disk as soon as it is made, so that a run can be continued."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from loadgen.base.documents import DocumentError, read_record, read_stored, stored_path
from loadgen.engines.analyse import analyse
from loadgen.records.matrix import JudgedMatrix, Matrix, MatrixPlan, Visit
from loadgen.records.run import Environment, RunState
from loadgen.records.store import (
    RecordFolder,
    StorageError,
    StoredRunError,
    only_run,
    read_numbered,
    read_one,
    storage_sentence,
)


class MatrixStore(RecordFolder):
    """See `loadgen.records.matrix` for the names of the files."""

    @contextmanager
    def open(self) -> Iterator[None]:
        """Make the folder, and hold it alone. Raises `StorageError` if that fails or another process runs there."""
        try:
            for folder in (self.directory, self.directory / Visit.FILE, self.directory / "logs"):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise StorageError(storage_sentence(self.directory, exc.strerror or str(exc))) from exc
        with only_run(self.directory) as alone:
            if not alone:
                raise StorageError(f"another process runs in {self.directory}; wait for it or give another folder")
            yield

    def visits(self) -> tuple[Visit, ...]:
        """All stored visits. Raises `StoredRunError` for one that cannot be read."""
        return read_numbered(self.directory, Visit.FILE, Visit)

    def references_path(self, number: int) -> Path:
        """The file of a model's own answers."""
        return (self.directory / "references" / f"{number:02d}.npz").resolve()


def read_plan(directory: Path) -> tuple[MatrixPlan, Environment]:
    """The plan of a matrix, and the machine on which it was begun. Raises `StoredRunError`."""
    plan, environment = read_one(directory, MatrixPlan), read_one(directory, Environment)
    if plan is None or environment is None:
        missing = MatrixPlan.FILE if plan is None else Environment.FILE
        raise StoredRunError(
            f"{directory} holds no engine matrix: {missing} is missing; give the directory that `abserve engines` "
            "wrote to"
        )
    return plan, environment


def stored_matrix(directory: Path) -> Matrix:
    """The matrix of the stored visits, or the stored matrix.json of a folder without visits, such as a published one.
    Raises `StoredRunError`."""
    visits = read_numbered(directory, Visit.FILE, Visit)
    if not visits and stored_path(directory / Matrix.FILE).exists():
        return read_matrix(directory / Matrix.FILE)
    plan, environment = read_plan(directory)
    return analyse(plan, environment, visits, read_one(directory, RunState), read_one(directory, JudgedMatrix))


def read_matrix(path: Path) -> Matrix:
    """Read a `matrix.json`, also compressed. Raises `StoredRunError` for a missing file, another schema or an unknown
    field."""
    try:
        return cast("Matrix", read_record(read_stored(path), Matrix))
    except (OSError, DocumentError) as exc:
        raise StoredRunError(f"{path} is not an engine matrix of this version of abserve: {exc}") from exc
