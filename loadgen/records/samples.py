"""One sample per request, and one `.npy` file per block, appended to while the block runs.

The file is written as `NAME.npy.part` and renamed when the block ends, so a file without `.part` is always complete. A
`.part` file of a killed run is readable: its records have a fixed size and are flushed every second.
"""

from __future__ import annotations

import math
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from struct import Struct
from tokenize import TokenError
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import psutil

from loadgen.base.documents import open_inside

NS_PER_MS = 1e6
NS_PER_S = 1e9

SAMPLE_DTYPE = np.dtype(
    [
        ("intended_ns", "<i8"),  # when the schedule wanted it sent; in a closed loop equal to send_ns
        ("send_ns", "<i8"),  # just before the first byte went out, or before connecting again for it
        ("first_byte_ns", "<i8"),  # first byte of the response read; 0 without a response
        ("end_ns", "<i8"),  # last byte of the response read, or the failure noticed
        ("request_bytes", "<i8"),  # on the wire, headers included
        ("response_bytes", "<i8"),  # on the wire, headers included
        ("batch", "<i4"),  # items in the request
        ("user", "<i4"),  # which concurrent user sent it
        ("body", "<i4"),  # which prepared body was sent
        ("status", "<i2"),  # HTTP status, or gRPC status + 1000; 0 without a response
        ("error", "<i2"),  # index into the block record's `error_messages`, -1 for a good response
    ]
)
"""All times are `time.perf_counter_ns()` of the generator's process."""

Samples = npt.NDArray[np.void]


def good(samples: Samples) -> Samples:
    """The samples without an error."""
    return samples[samples["error"] < 0]


def latencies_ms(samples: Samples) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Latencies of the given samples, from the intended start to the last byte."""
    return np.asarray((samples["end_ns"] - samples["intended_ns"]) / NS_PER_MS, dtype=np.float64)


MOST_MESSAGES = 200


def error_index(messages: list[str], message: str) -> int:
    """The index of `message` among the distinct ones, to which it is added; beyond a limit all count as "other
    errors"."""
    if message not in messages:
        message = message if len(messages) < MOST_MESSAGES - 1 else "other errors"
        if message not in messages:
            messages.append(message)
    return messages.index(message)


def with_errors_of(samples: Samples, texts: Sequence[str], messages: Sequence[str]) -> Samples:
    """A copy whose errors, so far numbered by `texts`, are numbered by `messages`, which include these. A number beyond
    `texts` becomes that of the last of them, or without any the number after the last of `messages`."""
    numbers = np.array([messages.index(text) for text in texts] or [len(messages)], dtype=np.int16)
    copied = samples.copy()
    failed = copied["error"] >= 0
    copied["error"][failed] = numbers[np.minimum(copied["error"][failed], len(numbers) - 1)]
    return copied


_RECORD = Struct("<6q3i2h")
_COUNT = re.compile(rb"'shape': \((\d{1,18}),\)\}")
_HEADER_BYTES = 1024
_BUFFER_RECORDS = 16_384
_PART_RECORDS = 64_000
_KEPT_BYTES = 64 << 20
"""Of the samples that were read last: an analysis asks several times for those of each block."""
_ENTRY_BYTES = 1024
"""What it takes to keep an array, however short."""


class KeptSamples:
    """The samples that were read last."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes, self._bytes = most_bytes, 0
        self._samples: OrderedDict[tuple[object, ...], Samples] = OrderedDict()

    def __contains__(self, key: tuple[object, ...]) -> bool:
        return key in self._samples

    def get(self, key: tuple[object, ...], read: Callable[[], Samples]) -> Samples:
        """What was read for this key, or what `read` reads now."""
        samples = self._samples.get(key)
        if samples is None:
            samples = self._samples[key] = read()
            self._bytes += samples.nbytes + _ENTRY_BYTES
        self._samples.move_to_end(key)
        while self._bytes > self._most_bytes:
            self._bytes -= self._samples.popitem(last=False)[1].nbytes + _ENTRY_BYTES
        return samples


_kept = KeptSamples(_KEPT_BYTES)

assert _RECORD.size == SAMPLE_DTYPE.itemsize


class SampleWriter:
    """Appends samples to NAME.npy.part; `close` writes the count into the header and renames to NAME.npy. `add` costs
    about a microsecond and does not touch the file; call `flush` at least every second. With `path` None samples are
    only counted."""

    def __init__(self, path: Path | None) -> None:
        self.count = 0
        self._path = path
        self._buffer = bytearray(_BUFFER_RECORDS * _RECORD.size)
        self._pending = 0
        self._lost: OSError | None = None
        self._file = -1
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(part_path(path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            _write_all(self._file, _header(0))

    def add(
        self, intended_ns: int, send_ns: int, first_byte_ns: int, end_ns: int, request_bytes: int,
        response_bytes: int, batch: int, user: int, body: int, status: int, error: int,
    ) -> None:  # fmt: skip
        """Add one sample, its fields in the order of `SAMPLE_DTYPE`."""
        self.count += 1
        if self._file < 0:
            return
        _RECORD.pack_into(
            self._buffer, self._pending, intended_ns, send_ns, first_byte_ns, end_ns, request_bytes,
            response_bytes, batch, user, body, status, error,
        )  # fmt: skip
        self._pending += _RECORD.size
        if self._pending == len(self._buffer):
            self.flush()

    def flush(self) -> None:
        """Write the buffer. Raises `OSError` (disk full)."""
        if self._file >= 0 and self._pending:
            pending, self._pending = self._pending, 0
            try:
                _write_all(self._file, memoryview(self._buffer)[:pending])
            except OSError as exc:
                self._lost = exc
                raise

    def close(self) -> None:
        """Finish the file: flush, count, rename. Idempotent. Raises `OSError`, also if an earlier flush failed: then
        the .part file stays, because it lacks samples."""
        if self._file < 0 or self._path is None:
            return
        file, path = self._file, self._path
        try:
            self.flush()
            if self._lost is not None:
                raise self._lost
            os.pwrite(file, _header(self.count), 0)
        finally:
            self._file = -1
            os.close(file)
        part_path(path).rename(path)

    def abandon(self) -> None:
        """Remove the unfinished file, for a block that never ran. Idempotent."""
        if self._file >= 0 and self._path is not None:
            os.close(self._file)
            self._file = -1
            part_path(self._path).unlink(missing_ok=True)


def part_path(path: Path) -> Path:
    """The name of a sample file while it is being written."""
    return path.with_name(path.name + ".part")


def store_samples(path: Path, parts: Iterable[Samples], dtype: np.dtype[np.void] = SAMPLE_DTYPE) -> None:
    """Write a whole file, its parts one after the other, under a temporary name. Raises `OSError`, and whatever reading
    the parts raises, and then leaves no file."""
    part_file = part_path(path)
    count = 0
    try:
        with part_file.open("wb") as file:
            file.write(_header(count, dtype))
            for samples in parts:
                file.write(np.ascontiguousarray(samples).view(np.uint8).data)
                count += len(samples)
            file.seek(0)
            file.write(_header(count, dtype))
        part_file.rename(path)
    except BaseException:
        part_file.unlink(missing_ok=True)
        raise


def read_samples(path: Path, dtype: np.dtype[np.void] = SAMPLE_DTYPE) -> Samples:
    """Read all whole records of NAME.npy, or of NAME.npy.part if only that exists. Raises `OSError`, `ValueError`."""
    path = part_path(path) if not path.exists() and part_path(path).exists() else path
    with path.open("rb") as file:
        return load_samples(file, path.name, dtype=dtype)


@dataclass(frozen=True, slots=True)
class SampleFile:
    """The samples of a stored block, read whenever they are asked for: a run has more of them than memory may hold."""

    folder: Path
    """It may have been made by another user."""
    name: str
    """The path of the file in it, without `.part`."""
    count: int
    """Whole records to read."""
    dtype: np.dtype[np.void] = SAMPLE_DTYPE
    """What a record is: a sample, or what `loadgen.records.tokens` stores beside the samples."""

    def read(self) -> Samples:
        """At most `count` records, which are read-only. Raises `OSError`, `ValueError`."""
        with suppress(OSError):  # to open a file that was read before, and cannot be another, takes a tenth of a ms
            if (key := self._key(os.lstat(f"{self.folder}/{self.name}"))) in _kept:
                return _kept.get(key, self.read)
        with _open_stored(self.folder, self.name) as file:
            key = self._key(os.fstat(file.fileno()))
            return _kept.get(key, lambda: load_samples(file, self.name, self.count, self.dtype))

    def _key(self, status: os.stat_result) -> tuple[object, ...]:
        """Of this file as it is, and what is read of it."""
        changes = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        return (*changes, self.count, self.dtype)

    def at_most(self, count: int) -> SampleFile:
        """The same file, of which no more may be read. Raises `ValueError` if the memory does not hold so many."""
        count, free = min(self.count, count), psutil.virtual_memory().available
        if count * self.dtype.itemsize > free:
            raise ValueError(f"{self.name} holds {count:,} records, too many for the {free:,} bytes of free memory")
        return replace(self, count=count)


def find_samples(folder: Path, name: str, dtype: np.dtype[np.void] = SAMPLE_DTYPE) -> SampleFile:
    """NAME.npy in a folder that another user may have made, or NAME.npy.part if only that exists, with the number of
    its whole records. Raises `OSError`, `ValueError`."""
    with _open_stored(folder, name) as file:
        counted = _read_header(file, name, dtype)  # 0 in an unfinished file
        stored = max(os.fstat(file.fileno()).st_size - file.tell(), 0) // dtype.itemsize
    if stored < counted:
        raise ValueError(f"{name} was cut short: it holds {stored:,} of {counted:,} records")
    return SampleFile(folder, name, stored, dtype)


def _open_stored(folder: Path, name: str) -> BinaryIO:
    try:
        return open_inside(folder, name)
    except FileNotFoundError:
        with suppress(FileNotFoundError):
            return open_inside(folder, f"{name}.part")
        raise FileNotFoundError(f"{name} is missing") from None


def load_samples(
    file: BinaryIO, name: str, most: int | None = None, dtype: np.dtype[np.void] = SAMPLE_DTYPE
) -> Samples:
    """Read all whole records of an open file, or the first `most`; `name` is for messages. Raises `ValueError`."""
    _read_header(file, name, dtype)
    content = file.read(-1 if most is None else most * dtype.itemsize)
    return np.frombuffer(content, dtype=dtype, count=len(content) // dtype.itemsize)


def read_in_parts(file: BinaryIO, name: str) -> Iterator[Samples]:
    """All whole records of an open file, 64,000 at a time. Raises `ValueError`."""
    _read_header(file, name, SAMPLE_DTYPE)
    while len(content := file.read(_PART_RECORDS * SAMPLE_DTYPE.itemsize)) >= SAMPLE_DTYPE.itemsize:
        yield np.frombuffer(content, dtype=SAMPLE_DTYPE, count=len(content) // SAMPLE_DTYPE.itemsize)


def _read_header(file: BinaryIO, name: str, expected: np.dtype[np.void]) -> int:
    """The number of records by the header. Raises `ValueError` unless such records follow."""
    start = file.read(_HEADER_BYTES)
    written = _COUNT.search(start)  # by this module: no need to parse it as Python, which takes 0.1 ms
    if written is not None and start == _header(int(written[1]), expected):
        return int(written[1])
    file.seek(0)
    try:
        np.lib.format.read_magic(file)
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    except (TokenError, SyntaxError, ValueError) as exc:  # numpy parses the header as Python
        raise ValueError(f"{name} has no readable header: {exc}") from exc
    if dtype != expected:
        wanted = "samples" if expected == SAMPLE_DTYPE else f"records of {expected}"
        raise ValueError(f"{name} holds no {wanted} but {dtype}")
    return int(math.prod(shape))


def _header(count: int, dtype: np.dtype[np.void] = SAMPLE_DTYPE) -> bytes:
    """A NumPy 1.0 header of fixed length, so that the final count overwrites the first one in place."""
    text = repr({"descr": dtype.descr, "fortran_order": False, "shape": (count,)}).encode("ascii")
    body_bytes = _HEADER_BYTES - 10
    if len(text) >= body_bytes:
        raise ValueError("the sample record has outgrown its file header")
    return b"\x93NUMPY\x01\x00" + body_bytes.to_bytes(2, "little") + text.ljust(body_bytes - 1) + b"\n"


def _write_all(file: int, content: bytes | memoryview) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(file, view) :]
