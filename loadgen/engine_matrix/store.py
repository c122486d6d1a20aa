"""The folder of one matrix of engines: every visit on disk as soon as it is made, so that a run can be continued."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any

from loadgen.documents import DocumentError, list_inside, read_inside, read_record
from loadgen.engine_matrix.records import Plan, Visit
from loadgen.records.run import Environment, Record, RunState
from loadgen.run.storage import StorageError, only_run, storage_sentence, write_whole

VISITS = "visits"


class MatrixStore:
    """Files appear whole or not at all; see `loadgen.engine_matrix.records` for their names."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @contextmanager
    def open(self) -> Iterator[None]:
        """Make the folder, and hold it alone. Raises `StorageError` if that fails or another process runs there."""
        try:
            for folder in (self.directory, self.directory / VISITS, self.directory / "logs"):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise StorageError(storage_sentence(self.directory, exc.strerror or str(exc))) from exc
        with only_run(self.directory) as alone:
            if not alone:
                raise StorageError(f"another process runs in {self.directory}; wait for it or give another folder")
            yield

    def write(self, record: Record) -> None:
        """Write one record with its own file. Raises `StorageError`."""
        write_whole(self.directory / record.FILE, record)

    def write_visit(self, number: int, visit: Visit) -> None:
        """Write one visit. Raises `StorageError`."""
        write_whole(self.directory / VISITS / f"{number:04d}.json", visit)

    def plan(self) -> Plan:
        """The stored plan. Raises `StorageError`."""
        plan: Plan = self._read(Plan.FILE, Plan)
        return plan

    def environment(self) -> Environment:
        """The stored environment. Raises `StorageError`."""
        environment: Environment = self._read(Environment.FILE, Environment)
        return environment

    def state(self) -> RunState:
        """The stored state. Raises `StorageError`."""
        state: RunState = self._read(RunState.FILE, RunState)
        return state

    def visits(self) -> tuple[Visit, ...]:
        """All visits by number. Raises `StorageError` for one that cannot be read."""
        try:
            names = [name for name in list_inside(self.directory, VISITS) if name.endswith(".json")]
        except (OSError, DocumentError) as exc:
            raise StorageError(f"{self.directory / VISITS} cannot be read: {exc}; start again with --out") from exc
        return tuple(self._read(name, Visit) for name in sorted(names, key=_number))

    def log_path(self, name: str) -> Path:
        """The log of a process."""
        return self.directory / "logs" / f"{name}.log"

    def references_path(self, number: int) -> Path:
        """The file of a model's own answers."""
        return (self.directory / "references" / f"{number:02d}.npz").resolve()

    def _read(self, name: str, kind: Any) -> Any:
        path = self.directory / name
        try:
            return read_record(read_inside(self.directory, name), kind)
        except OSError as exc:
            raise StorageError(f"cannot read {path}: {exc.strerror or exc}; give the folder of a matrix") from exc
        except DocumentError as exc:
            raise StorageError(f"{path} cannot be read: {exc}; remove it, or start again with --out") from exc


def _number(name: str) -> int:
    stem = PurePath(name).stem
    return int(stem) if stem.isdecimal() else -1
