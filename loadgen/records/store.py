"""A run's folder: every record is written as it happens, and read back from a complete or a partial run.

A killed run may lack everything but `experiment.json`. What is missing is None or empty; what exists and cannot be read
is an error.

A running process holds a lock in the folder, which the kernel releases when it ends: this separates a killed run from a
running one on the same machine. On another machine, or on network folders without locks, every run looks ended.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO, TypeVar, cast

import msgspec
import numpy as np

from loadgen.base.documents import DocumentError, list_inside, open_inside, read_inside, read_record, write_atomically
from loadgen.base.headers import HIDDEN, HeaderValue, secrets_in
from loadgen.records.machine import Calibration, NoiseFloor
from loadgen.records.run import (
    ArmRecord,
    BlockRecord,
    Environment,
    Experiment,
    ParityRecord,
    Record,
    RunState,
    Workload,
)
from loadgen.records.samples import SampleFile, Samples, find_samples, store_samples
from loadgen.records.targets import Kind
from loadgen.records.tokens import (
    ANSWER_DTYPE,
    EVENT_DTYPE,
    TokenRows,
    answers_name,
    events_name,
    is_beside_samples,
    store_tokens,
)

LOCK_NAME = ".running"
_BLOCK_BYTES = 4096
"""What the smallest file has on the disk."""
R = TypeVar("R", bound=Record)
T = TypeVar("T")


class StorageError(Exception):
    """A record cannot be stored; the message names the place and the reason."""


class RecordFolder:
    """A folder of records. A file in it is never incomplete. Methods that write raise `StorageError`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._secrets: tuple[str, ...] = ()

    def write(self, record: Record) -> None:
        """Write one record with its own file."""
        self._write(record.FILE, record)

    def write_numbered(self, record: Record, index: int) -> None:
        """Write one record of a kind that has a folder, after its samples."""
        self._write(f"{record.FILE}/{index:04d}.json", record)

    def log_path(self, name: str) -> Path:
        """The log file of a process."""
        return self.directory / "logs" / f"{name}.log"

    def _write(self, name: str, record: object) -> None:
        write_record(self.directory / name, record, self._secrets)


class RunStore(RecordFolder):
    """The folder of one run."""

    def __init__(self, directory: Path) -> None:
        """Raises `StorageError` if the folder already holds a run or cannot be created."""
        super().__init__(directory)
        try:
            str(directory.absolute()).encode()
        except UnicodeEncodeError:  # paths travel to the generator in JSON
            raise StorageError(f"{str(directory)!a} is not UTF-8; choose another folder with --out") from None
        if (directory / "experiment.json").exists():
            raise StorageError(f"{directory} already holds a run; choose another folder with --out")
        try:
            for folder in (directory, directory / "blocks", directory / "samples", directory / "logs"):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise StorageError(f"cannot write to {directory}: {exc.strerror or exc}; choose another --out") from exc

    def write(self, record: Record) -> None:
        """Write one record with its own file. No later record holds the values of this experiment's headers."""
        if isinstance(record, Experiment):
            self._secrets = secrets_in(value for arm in record.arms for value in arm.access.header.values())
        super().write(record)

    def write_last(self, state: RunState) -> None:
        """Write how the run ended. On a full disk it replaces the last state in its own place on the disk, which takes
        no room. Raises `StorageError`."""
        try:
            self.write(state)
        except StorageError:
            content = _encoded(state, self._secrets)
            if len(content) > _BLOCK_BYTES:
                raise
            with suppress(OSError), (self.directory / state.FILE).open("r+b") as file:
                file.write(content)
                file.truncate()
                return
            raise

    def write_all(self, kind: type[Record], records: Sequence[Record]) -> None:
        """Write all records so far of a kind that shares a file."""
        self._write(kind.FILE, list(records))

    def block(self, record: BlockRecord) -> None:
        """Write one block, after its samples."""
        self._write(f"blocks/{record.index:04d}.json", record)

    def next_numbered(self, kind: type[Record]) -> tuple[int, Path]:
        """The number of the next record of a kind that has a folder, and the file for its samples. Raises
        `StorageError`."""
        folder = self.directory / kind.FILE
        try:
            folder.mkdir(exist_ok=True)
        except OSError as exc:
            raise StorageError(storage_sentence(folder, exc.strerror or str(exc))) from exc
        index = len(list(folder.glob("*.json")))
        return index, (folder / f"{index:04d}.npy").resolve()

    def samples_path(self, index: int) -> Path:
        """The file into which the generator writes a block's samples."""
        return (self.directory / "samples" / f"{index:04d}.npy").resolve()

    def without_secrets(self, text: str) -> str:
        """A text in which a server may have repeated the value of a header."""
        for secret in self._secrets:
            text = text.replace(secret, HIDDEN)
        return text


def write_record(path: Path, record: object, secrets: Sequence[str] = ()) -> None:
    """Write a record as indented JSON, without the secrets. Raises `StorageError`."""
    try:
        write_atomically(path, _encoded(record, secrets))
    except OSError as exc:
        raise StorageError(storage_sentence(path, exc.strerror or str(exc))) from exc


def _encoded(record: object, secrets: Sequence[str] = ()) -> bytes:
    """A record as indented JSON, without the secrets."""
    content = msgspec.json.format(msgspec.json.encode(record, enc_hook=_text), indent=1) + b"\n"
    for secret in secrets:
        content = content.replace(msgspec.json.encode(secret)[1:-1], HIDDEN.encode())
    return content


def _text(value: object) -> str:
    """The values of headers as they may be stored. Raises `NotImplementedError` for anything else."""
    if isinstance(value, HeaderValue):
        return str(value)
    raise NotImplementedError


def storage_sentence(path: Path, reason: str) -> str:
    """The message for a file that cannot be written."""
    return f"cannot store {path}: {reason}; free some space or choose another folder with --out"


class StoredRunError(Exception):
    """A directory holds no run, or a record in it cannot be read; the message names the file."""


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A block's record and its samples, which stay on disk; `stored` is None if the file is missing or broken, see
    `problem`."""

    record: BlockRecord
    workload: Workload
    stored: SampleFile | Samples | None
    problem: str | None = None
    stored_events: SampleFile | Samples | None = None
    """The chunks with tokens of a language model's block; None for other models, and where `problem` says so."""
    stored_answers: SampleFile | Samples | None = None
    """One row per sample of such a block."""

    @property
    def samples(self) -> Samples | None:
        """The samples: keep them no longer than you need them, since only those that were read last stay in memory.
        Raises `StoredRunError` if they can no longer be read."""
        return self._read(self.stored)

    @property
    def events(self) -> Samples | None:
        """The chunks with tokens, `EVENT_DTYPE`, read like `samples`; None without streamed tokens."""
        events = self._read(self.stored_events)
        if events is not None and len(events) and int(events["sample"].max()) >= self.record.requests:
            raise StoredRunError(
                f"samples of block {self.record.index}: a chunk belongs to a request that is not there"
            )
        return events

    @property
    def answers(self) -> Samples | None:
        """What each streamed answer was, `ANSWER_DTYPE`, one row per sample; None without streamed tokens."""
        return self._read(self.stored_answers)

    def _read(self, stored: SampleFile | Samples | None) -> Samples | None:
        if not isinstance(stored, SampleFile):
            return stored
        try:
            return stored.read()
        except (OSError, ValueError) as exc:
            raise StoredRunError(f"samples of block {self.record.index}: {exc}") from exc

    @property
    def has_samples(self) -> bool:
        """Whether there is at least one sample."""
        if self.stored is None:
            return False
        return (self.stored.count if isinstance(self.stored, SampleFile) else len(self.stored)) > 0


@dataclass(frozen=True, slots=True)
class StoredRun:
    """The records of a run's folder. Those of the probes are read when somebody asks for them, once."""

    directory: Path
    experiment: Experiment
    environment: Environment | None = None
    arms: tuple[ArmRecord, ...] = ()
    parity: ParityRecord | None = None
    blocks: tuple[StoredBlock, ...] = ()
    partial_blocks: Mapping[str, int] = field(default_factory=dict)
    """The sample files of unfinished blocks in a killed run, and the requests in each."""
    state: RunState | None = None
    running: bool = False
    """Whether a process of this machine ran it when the records were read."""
    calibration: Calibration | None = None
    """Calibration of the load generator on the machine of the run, if there is one."""
    noise_floors: tuple[NoiseFloor, ...] = ()
    """Noise floors of the machine, as known when the run began."""
    records: dict[type[Record], tuple[Record, ...] | None] = field(default_factory=dict)
    """The probes' records that have been read, by type; None: there is no file of them."""
    problems: tuple[str, ...] = ()
    """The files of the run that cannot be read, each with the reason; the rest of the run is read all the same."""

    def record_of(self, kind: type[R]) -> R | None:
        """The record of a type that has one per run. Raises `StoredRunError` if it cannot be read."""
        if kind not in self.records:
            record = read_one(self.directory, kind)
            self.records[kind] = None if record is None else (record,)
        records = self.records[kind]
        return None if records is None else cast("R", records[0])

    def records_of(self, kind: type[R]) -> tuple[R, ...]:
        """The records of a type that has several, in order. Raises `StoredRunError` if they cannot be read."""
        return self._read_several(kind) or ()

    def has_records_of(self, kind: type[Record]) -> bool:
        """Whether the run stored a file of such records, which may be empty. Raises `StoredRunError`."""
        return self._read_several(kind) is not None

    def _read_several(self, kind: type[R]) -> tuple[R, ...] | None:
        if kind not in self.records:
            has_own_file = kind.FILE.endswith(".json")
            read = _read_all(self.directory, kind) if has_own_file else read_numbered(self.directory, kind.FILE, kind)
            self.records[kind] = read
        return cast("tuple[R, ...] | None", self.records[kind])

    def blocks_in(self, folder: str, workloads: Sequence[Workload]) -> tuple[StoredBlock, ...]:
        """Read the blocks that a probe stored below a folder, in the order in which they ran. Raises
        `StoredRunError`."""
        named = {workload.name: workload for workload in workloads}
        records = sorted(
            read_numbered(self.directory, f"{folder}/blocks", BlockRecord), key=lambda record: record.index
        )
        return tuple(read_block(self.directory, record, named, folder) for record in records)


def read_run(directory: Path) -> StoredRun:
    """Read DIR. A record that cannot be read is missing, see `StoredRun.problems`. Raises `StoredRunError` if there is
    no experiment to read."""
    experiment = read_one(directory, Experiment)
    if experiment is None:
        raise StoredRunError(
            f"{directory} holds no run: experiment.json is missing; give the directory that `abserve compare` wrote to"
        )
    problems: list[str] = []

    def readable(read: Callable[..., T | None], *arguments: object) -> T | None:
        try:
            return read(directory, *arguments)
        except StoredRunError as exc:
            problems.append(str(exc))
            return None

    named = experiment.by_name
    names = [name for name in readable(_files, "blocks") or () if name.endswith(".json")]
    records = [record for name in names if (record := readable(_read, name, BlockRecord)) is not None]
    ran = sorted(cast("list[BlockRecord]", records), key=lambda record: record.index)
    blocks = tuple(block for record in ran if (block := readable(read_block, record, named)) is not None)
    environment, arms = readable(read_one, Environment), readable(_read_all, ArmRecord)
    strangers = {record.label for record in (*ran, *(arms or ()))} - {*experiment.labels, *experiment.failed_arms}
    if strangers:
        problems.append(
            f"{directory} has records of arms that its experiment does not have: {', '.join(sorted(strangers))}"
        )
    state = readable(read_one, RunState)
    if state is not None and state.state == "finished" and not problems:
        written = {Environment.FILE: environment, ArmRecord.FILE: arms}
        problems += [f"{directory / name} is missing" for name, record in written.items() if record is None]
    return StoredRun(
        directory=directory,
        experiment=experiment,
        environment=environment,
        arms=arms or (),
        parity=readable(read_one, ParityRecord),
        blocks=blocks,
        partial_blocks=readable(_read_partial, {block.record.samples for block in blocks}) or {},
        state=state,
        running=is_running(directory),
        calibration=readable(read_one, Calibration),
        noise_floors=readable(_read_all, NoiseFloor) or (),
        problems=tuple(problems),
    )


def read_one(directory: Path, kind: type[R]) -> R | None:
    """The record with its own file, or None without it. Raises `StoredRunError`."""
    return cast("R | None", _read(directory, kind.FILE, kind))


def _read_all(directory: Path, kind: type[R]) -> tuple[R, ...] | None:
    return cast("tuple[R, ...] | None", _read(directory, kind.FILE, tuple[kind, ...]))  # type: ignore[valid-type]


def read_numbered(directory: Path, folder: str, kind: type[R]) -> tuple[R, ...]:
    """The records of a folder with a file for each. Raises `StoredRunError`."""
    records = (_read(directory, name, kind) for name in _files(directory, folder) if name.endswith(".json"))
    return tuple(cast("R", record) for record in records if record is not None)


def _files(directory: Path, folder: str) -> list[str]:
    try:
        return list_inside(directory, folder)
    except (OSError, DocumentError) as exc:
        raise StoredRunError(f"{directory / folder} cannot be read: {exc}") from exc


def _read(directory: Path, name: str, kind: object) -> object | None:
    """Read a file; None if it does not exist."""
    try:
        return cast("object", read_record(read_inside(directory, name), kind))
    except FileNotFoundError:
        return None
    except (OSError, DocumentError) as exc:
        raise StoredRunError(f"{directory / name} cannot be read: {exc}") from exc


def read_block(
    directory: Path, record: BlockRecord, workloads: Mapping[str, Workload], folder: str = "."
) -> StoredBlock:
    """Read a block of a folder in `directory` and find its samples. Raises `StoredRunError` for an unknown workload."""
    if record.workload not in workloads:
        raise StoredRunError(
            f"block {record.index} belongs to the workload {record.workload}, which the experiment does not have"
        )
    workload = workloads[record.workload]
    events: SampleFile | None = None
    answers: SampleFile | None = None
    samples = record.samples if folder == "." else f"{folder}/{record.samples}"
    try:
        file = find_samples(directory, samples)
        stored = file.at_most(max(0, record.requests) + 1)
        if record.kind is Kind.TOKENS:
            events = find_samples(directory, events_name(samples), EVENT_DTYPE)
            events = events.at_most(events.count)
            answers = find_samples(directory, answers_name(samples), ANSWER_DTYPE)
            answers = answers.at_most(max(0, record.requests) + 1)
    except (OSError, ValueError) as exc:
        return StoredBlock(record, workload, None, f"samples of block {record.index}: {exc}")
    problem = None
    if file.count != record.requests:
        problem = f"block {record.index} counted {record.requests} requests, its file holds {file.count}"
    elif answers is not None and answers.count != record.requests:
        problem = f"block {record.index} counted {record.requests} requests, {answers.count} answers are described"
    return StoredBlock(record, workload, stored, problem, events, answers)


def store_empty(samples: Path, record: BlockRecord) -> None:
    """Write the files of a block in which nothing was sent. Raises `StorageError`."""
    try:
        store_samples(samples, ())
        if record.kind is Kind.TOKENS:
            store_tokens(samples, TokenRows(np.empty(0, EVENT_DTYPE), np.empty(0, ANSWER_DTYPE)))
    except OSError as exc:
        raise StorageError(storage_sentence(samples, exc.strerror or str(exc))) from exc


def _read_partial(directory: Path, complete: set[str]) -> dict[str, int]:
    """The sample files that belong to none of the complete blocks; a broken one has no requests."""
    partial = {}
    for name in _files(directory, "samples"):
        if name not in complete and name.endswith((".npy", ".npy.part")) and not is_beside_samples(name):
            partial[name] = 0
            with suppress(OSError, ValueError):
                partial[name] = find_samples(directory, name).count
    return partial


@contextmanager
def running(directory: Path) -> Iterator[None]:
    """Hold the lock, and remove its file at the end."""
    with only_run(directory):
        try:
            yield
        finally:
            with suppress(OSError):
                (directory / LOCK_NAME).unlink()


@contextmanager
def only_run(directory: Path) -> Iterator[bool]:
    """Hold the lock, which child processes do not inherit; false if another process holds it. The file stays, so that
    all processes lock the same one."""
    try:
        file = _lock_file(directory)
    except OSError:  # writing the first record reports it
        yield True
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError:  # a network folder without locks
            pass
        yield True


def is_running(directory: Path) -> bool:
    """Whether a process of this machine runs the run in `directory` now."""
    try:
        with open_inside(directory, LOCK_NAME) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (OSError, DocumentError):
        return False
    return False


def _lock_file(directory: Path) -> TextIO:
    """Open or make the lock's file; a link is not followed, and a pipe is not waited for."""

    def opener(path: str, flags: int) -> int:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)

    return open(directory / LOCK_NAME, "w", opener=opener)
