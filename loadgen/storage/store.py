"""Writes the stored records of one run, each as soon as it is known."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from loadgen.headers import HIDDEN, HeaderValue, secrets_in
from loadgen.probes.rate_search.records import Trial
from loadgen.records.run import BlockRecord, Experiment, Record


class StorageError(Exception):
    """A record cannot be stored; the message names the place and the reason."""


class RunStore:
    """The folder of one run. Every file is written under a temporary name and renamed, so it is never incomplete."""

    def __init__(self, directory: Path) -> None:
        """Raises `StorageError` if the folder already holds a run or cannot be created."""
        self.directory = directory
        self._secrets: tuple[str, ...] = ()
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
        self._write(record.FILE, record)

    def write_all(self, kind: type[Record], records: Sequence[Record]) -> None:
        """Write all records so far of a kind that shares a file."""
        self._write(kind.FILE, list(records))

    def block(self, record: BlockRecord) -> None:
        """Write one block, after its samples."""
        self._write(f"blocks/{record.index:04d}.json", record)

    def trial(self, record: Trial) -> None:
        """Write one trial of a search or a ramp, after its samples."""
        self._write(f"trials/{record.index:04d}.json", record)

    def next_trial(self) -> tuple[int, Path]:
        """The number of the next trial, and the file for its samples. Raises `StorageError`."""
        folder = self.directory / "trials"
        try:
            folder.mkdir(exist_ok=True)
        except OSError as exc:
            raise StorageError(storage_sentence(folder, exc.strerror or str(exc))) from exc
        index = len(list(folder.glob("*.json")))
        return index, (folder / f"{index:04d}.npy").resolve()

    def samples_path(self, index: int) -> Path:
        """The file into which the generator writes a block's samples."""
        return (self.directory / "samples" / f"{index:04d}.npy").resolve()

    def log_path(self, name: str) -> Path:
        """The log file of a process."""
        return self.directory / "logs" / f"{name}.log"

    def without_secrets(self, text: str) -> str:
        """A text in which a server may have repeated the value of a header."""
        for secret in self._secrets:
            text = text.replace(secret, HIDDEN)
        return text

    def _write(self, name: str, record: object) -> None:
        write_whole(self.directory / name, record, self._secrets)


def write_whole(path: Path, record: object, secrets: Sequence[str] = ()) -> None:
    """Write a record as JSON under a temporary name and rename it, without the secrets. Raises `StorageError`."""
    part = path.with_name(path.name + ".part")
    try:
        content = msgspec.json.format(msgspec.json.encode(record, enc_hook=_text), indent=1) + b"\n"
        for secret in secrets:
            content = content.replace(msgspec.json.encode(secret)[1:-1], HIDDEN.encode())
        with open(part, "wb", opener=_no_link) as file:
            file.write(content)
        os.replace(part, path)  # noqa: PTH105 (the rename is the point)
    except OSError as exc:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise StorageError(storage_sentence(path, exc.strerror or str(exc))) from exc


def _no_link(path: str, flags: int) -> int:
    """Opens a file to write, unless a link in its place leads elsewhere."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def _text(value: object) -> str:
    """The values of headers as they may be stored. Raises `NotImplementedError` for anything else."""
    if isinstance(value, HeaderValue):
        return str(value)
    raise NotImplementedError


def storage_sentence(path: Path, reason: str) -> str:
    """The message for a file that cannot be written."""
    return f"cannot store {path}: {reason}; free some space or choose another folder with --out"
