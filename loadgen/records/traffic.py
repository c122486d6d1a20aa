"""Recorded traffic in a folder, the format `abserve.traffic/1`: written by `abserve record`, read by replays.

    FOLDER/traffic.json            TrafficRecording        how it was recorded, and what is missing
    FOLDER/requests/NNNNNN.jsonl   RecordedRequest  one per line, in the order in which their answers ended
    FOLDER/contents/ab/SHA256      bytes            a body of a request or of an answer; each content is there once

A file of requests holds those that arrived in its `STRETCH_S` seconds; its number counts from the beginning of the
recording. Files only grow, and a content is whole before a request names it, so the folder can be read at any time,
also after the recorder was killed: a line without its end is left out. `docs/traffic.md` describes every field.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from loadgen.base.documents import DocumentError, list_inside, one_line, read_inside, read_record, uncompressed
from loadgen.records.run import Record

SCHEMA = "abserve.traffic/1"
STRETCH_S = 10
"""Seconds of the requests in one file, which are kept or left out together."""
KEPT_HEADERS = (
    "accept", "content-encoding", "content-type", "grpc-encoding", "inference-header-content-length",
)  # fmt: skip
"""The headers that are stored, because an answer depends on them. None of them holds a credential, a cookie or an
address."""
MODEL_ROUTE = re.compile(
    r"(?:/.*)?/(?:v2/models/([^/]+)(?:/versions/([^/]+))?/(?:infer|generate|generate_stream)|completions)"
)
"""The paths of requests to a model, below any base path, with its quoted name and its version where they have them."""
MOST_CONTENT_BYTES = 2**28
_NS_PER_STRETCH = STRETCH_S * 10**9
_RECORDING = "traffic.json"
_MOST_LINES_BYTES = 2**28

Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class TrafficError(ValueError):
    """A folder of traffic cannot be read or written; the message says why."""


def kept_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Those that are stored, of headers with names in lower case."""
    return {name: headers[name] for name in KEPT_HEADERS if name in headers}


class RecordedTensor(Record, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """An input as the request describes it; its other fields are skipped."""

    name: str
    datatype: str
    shape: tuple[Count, ...]


class RequestBody(msgspec.Struct):
    """What a JSON body says of itself; its other fields are skipped."""

    inputs: tuple[RecordedTensor, ...] = ()
    model: str | None = None
    parameters: dict[str, Any] = {}
    priority: int | None = None


def plain(content: bytes, coding: str | None) -> bytes:
    """Content without its compression, if that is known."""
    plain = uncompressed(content, coding or "identity", MOST_CONTENT_BYTES)
    return content if plain is None else plain


def read_request(content: bytes, headers: Mapping[str, str]) -> RequestBody | None:
    """What a body without compression says of itself; None if it cannot be read. Tensors may follow the JSON."""
    length = headers.get("inference-header-content-length", "")
    try:
        return msgspec.json.decode(content[: int(length)] if length.isdecimal() else content, type=RequestBody)
    except (ValueError, RecursionError):
        return None


class RecordedRequest(Record, frozen=True, kw_only=True):
    """One request. Times are nanoseconds of one monotonic clock since the beginning of the recording; what is unknown
    is None."""

    at_ns: Count
    """When its first byte arrived."""
    transport: Literal["http", "grpc"]
    route: str
    """The path without its query, or the gRPC method."""
    model: str | None = None
    version: str | None = None
    tensors: tuple[RecordedTensor, ...] = ()
    """The inputs; empty for prompts."""
    priority: int | None = None
    content: Digest | None = None
    """SHA-256 of the body, or of the gRPC message, by which it is stored; None: it was not kept."""
    content_bytes: Count = 0
    headers: Mapping[str, str] = {}
    """Those of `KEPT_HEADERS` that it had, in lower case."""
    status: int | None = None
    """The HTTP status, or of gRPC its own (0 is OK); None: the connection ended before."""
    first_byte_ns: Count | None = None
    """When the first byte of the answer came back."""
    end_ns: Count | None = None
    """When the last one did; None: the answer is not whole."""
    answer: Digest | None = None
    answer_bytes: Count = 0
    answer_headers: Mapping[str, str] = {}
    """Of an answer that is kept, those of `KEPT_HEADERS` that it had."""

    @property
    def succeeded(self) -> bool:
        """Whether its answer is whole and no error."""
        return self.end_ns is not None and self.status == (200 if self.transport == "http" else 0)

    @property
    def shape(self) -> str:
        """Its inputs in words, or its route."""
        tensors = (f"{tensor.name} {tensor.datatype} {list(tensor.shape)}" for tensor in self.tensors)
        return ", ".join(tensors) or self.route

    @property
    def stretch(self) -> int:
        """The number of the file that holds it."""
        return self.at_ns // _NS_PER_STRETCH


class TrafficRecording(Record, frozen=True, kw_only=True):
    """How traffic was recorded."""

    schema: Literal["abserve.traffic/1"] = "abserve.traffic/1"
    started_at: str
    """UTC, ISO 8601."""
    abserve: str = ""
    """The version that recorded it."""
    share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    """The share of requests that was recorded, chosen at random."""
    contents: bool = True
    answers: bool = False
    max_bytes: int | None = None
    """The limit of the folder. Beyond it whole stretches of `STRETCH_S` seconds are left out, each with the same
    chance whenever it was."""
    left_out: tuple[int, ...] = ()
    """The numbers of those stretches."""
    requests: Count = 0
    """Requests in the folder."""
    lost: Count = 0
    """Requests that passed and were not recorded, because the recorder was too slow or its memory full."""
    seconds: float = 0.0
    """How long it recorded."""
    ended: str | None = None
    """Why the recording ended; None: it goes on, or its process was killed."""


class RecordedTraffic:
    """The traffic in a folder, in the order of its arrivals. Raises `TrafficError` if it cannot be read."""

    is_trace = False
    """Whether it is a trace, whose prompts have lengths and no contents."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        try:
            self.recording = read_record(read_inside(self.folder, _RECORDING), TrafficRecording)
        except FileNotFoundError:
            raise TrafficError(f"{folder} holds no recorded traffic; record it with abserve record") from None
        except (OSError, DocumentError) as exc:
            raise self._error(_RECORDING, exc) from exc

    @cached_property
    def requests(self) -> tuple[RecordedRequest, ...]:
        """All requests by their arrivals. Raises `TrafficError`."""
        requests: list[RecordedRequest] = []
        name = "requests"
        try:
            for name in list_inside(self.folder, "requests"):
                requests += self._lines(read_inside(self.folder, name, _MOST_LINES_BYTES))
        except (OSError, ValueError, RecursionError) as exc:
            raise self._error(name, exc) from exc
        return tuple(sorted(requests, key=lambda request: request.at_ns))

    @staticmethod
    def _lines(content: bytes) -> Iterator[RecordedRequest]:
        decoder = msgspec.json.Decoder(RecordedRequest)
        return map(decoder.decode, filter(None, content[: content.rfind(b"\n") + 1].split(b"\n")))

    def content(self, request: RecordedRequest) -> bytes | None:
        """The body of a request; None if it was not kept. Raises `TrafficError`."""
        return self._stored(request.content)

    def answer(self, request: RecordedRequest) -> bytes | None:
        """The body of its answer; None if it was not kept. Raises `TrafficError`."""
        return self._stored(request.answer)

    def _stored(self, digest: str | None) -> bytes | None:
        if digest is None:
            return None
        try:
            content = read_inside(self.folder, _place(digest), MOST_CONTENT_BYTES)
        except (OSError, DocumentError) as exc:
            raise self._error(_place(digest), exc) from exc
        if hashlib.sha256(content).hexdigest() != digest:
            raise TrafficError(f"{self.folder}: the content {digest} was changed after it was recorded")
        return content

    def _error(self, name: str, exc: Exception) -> TrafficError:
        reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
        return TrafficError(f"{self.folder}: {name} cannot be read: {one_line(reason)}")

    def save(self, folder: str | os.PathLike[str], requests: Sequence[RecordedRequest] | None = None) -> None:
        """Write these requests, or all of them, with their contents into a new folder. Raises `TrafficError`."""
        writer = TrafficWriter(Path(folder), self.recording)
        for request in self.requests if requests is None else requests:
            writer.add(request, self.content(request), self.answer(request))
        writer.flush(ended="saved")


def _place(digest: str) -> str:
    return f"contents/{digest[:2]}/{digest}"


def _lines_of(stretch: int) -> str:
    return f"requests/{stretch:06}.jsonl"


@dataclass(slots=True)
class _Stretch:
    """What the folder holds of one stretch."""

    rank: float
    """Random: where not all stretches fit, those with the smallest ranks are kept."""
    bytes: int = 0
    digests: set[str] = field(default_factory=set)
    requests: int = 0


class TrafficWriter:
    """Writes a new folder of traffic. Its methods raise `OSError`, as for a full disk; what was written stays
    readable. Raises `TrafficError` for a folder that holds something."""

    def __init__(self, folder: Path, recording: TrafficRecording) -> None:
        self.recording = recording
        self._folder = folder
        self._stretches: dict[int, _Stretch] = {}
        self._shared: dict[str, tuple[int, int]] = {}
        """Of each stored content its bytes, and how many stretches use it."""
        self._bytes = 0
        self._left_out: set[int] = set(recording.left_out)
        self._highest_rank = 1.0
        """A stretch of a higher rank does not fit, as one of that rank did not."""
        self._lines: dict[int, list[bytes]] = {}
        try:
            (folder / "requests").mkdir(parents=True)
            (folder / "contents").mkdir()
            self.flush()
        except FileExistsError:
            raise TrafficError(f"{folder} holds recorded traffic already; give another folder") from None
        except OSError as exc:
            raise TrafficError(f"{folder} cannot be written: {exc.strerror or exc}; give another folder") from exc

    def add(self, request: RecordedRequest, content: bytes | None = None, answer: bytes | None = None) -> None:
        """Store a request with its body and its answer's; its line is written by the next `flush`."""
        number = request.stretch
        if number in self._left_out:
            return
        stretch = self._stretches.setdefault(number, _Stretch(random.random()))
        if stretch.rank > self._highest_rank:
            self._leave_out(number)
            return
        request = msgspec.structs.replace(
            request, content=self._store(content, stretch), answer=self._store(answer, stretch)
        )
        line = msgspec.json.encode(request) + b"\n"
        self._lines.setdefault(number, []).append(line)
        stretch.bytes += len(line)
        stretch.requests += 1
        self._bytes += len(line)
        limit = self.recording.max_bytes
        while limit is not None and self._bytes > limit and self._stretches:
            self._leave_out(max(self._stretches, key=lambda other: self._stretches[other].rank))

    def _store(self, content: bytes | None, stretch: _Stretch) -> str | None:
        if content is None:
            return None
        digest = hashlib.sha256(content).hexdigest()
        size, users = self._shared.get(digest, (len(content), 0))
        if not users:
            path = self._folder / _place(digest)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
            self._bytes += size
        if digest not in stretch.digests:
            stretch.digests.add(digest)
            self._shared[digest] = size, users + 1
        return digest

    def _leave_out(self, number: int) -> None:
        """Remove a stretch, and the contents that no other one has."""
        stretch = self._stretches.pop(number)
        self._highest_rank = min(self._highest_rank, stretch.rank)
        self._left_out.add(number)
        self._lines.pop(number, None)
        (self._folder / _lines_of(number)).unlink(missing_ok=True)
        self._bytes -= stretch.bytes
        for digest in stretch.digests:
            size, users = self._shared.pop(digest)
            if users > 1:
                self._shared[digest] = size, users - 1
            else:
                self._bytes -= size
                (self._folder / _place(digest)).unlink(missing_ok=True)

    def flush(self, *, lost: int = 0, seconds: float | None = None, ended: str | None = None) -> None:
        """Write what was added, and the recording's state. Nothing that was flushed is lost with the process."""
        for number, lines in self._lines.items():
            with (self._folder / _lines_of(number)).open("ab", buffering=0) as file:
                file.write(b"".join(lines))
        self._lines = {}
        self.recording = msgspec.structs.replace(
            self.recording,
            left_out=tuple(sorted(self._left_out)),
            requests=sum(stretch.requests for stretch in self._stretches.values()),
            lost=lost or self.recording.lost,
            seconds=self.recording.seconds if seconds is None else seconds,
            ended=ended,
        )
        new = self._folder / f"{_RECORDING}.new"
        new.write_bytes(msgspec.json.format(msgspec.json.encode(self.recording)) + b"\n")
        new.replace(self._folder / _RECORDING)
