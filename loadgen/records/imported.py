"""Traffic that other tools have recorded, read as if it were a folder of `abserve record`.

**HAR** (browsers, proxies): the requests of an archive to routes of models, with their answers. **AIPerf** with
prompts: a JSON object per line with `timestamp` in ms, `text_input` or `messages`, and `output_length`. Traces of
lengths alone, as **Mooncake**'s: a `TraceLine` per line, which is the content of the request.

**perf_analyzer**: its `--input-data`, FILE, and its `--request-intervals`, FILE.intervals: µs, one per line. Both begin
again until the longer one is used up. Datatypes are not in it, and shapes need not be: those are the replaying model's.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import unquote, urlsplit

import msgspec

from loadgen.base.documents import DocumentError, one_line, open_named
from loadgen.records.tokens import MOST_TOKENS
from loadgen.records.traffic import (
    MODEL_ROUTE,
    RecordedRequest,
    RecordedTensor,
    RecordedTraffic,
    TrafficError,
    TrafficRecording,
    kept_headers,
    read_request,
)

MOST_BYTES = 2**30
_MOST_NS = 100 * 366 * 24 * 3600 * 10**9
_MOST_DIGITS = 15
Milliseconds = Annotated[float, msgspec.Meta(ge=-1e13, le=1e13)]
"""From any moment on, such as the year 1970."""
UNTYPED = ""
"""The datatype of inputs that have that of the model which gets them; their content is perf_analyzer's."""
_UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)
Parts = tuple[RecordedRequest, bytes, bytes | None]
"""A request, its body and its answer's, if that is known."""


def read_traffic(path: str) -> RecordedTraffic:
    """The traffic in a folder of `abserve record`, or in a file of another tool. Raises `TrafficError`."""
    return RecordedTraffic(path) if not Path(path).is_file() else ImportedTraffic(path)


class ImportedTraffic(RecordedTraffic):
    """The traffic in a file of another tool. Raises `TrafficError`, which names the line or the entry."""

    def __init__(self, path: str) -> None:
        self.folder = Path(path)
        self._contents: dict[str, bytes] = {}
        content = _read(path)
        self.is_trace = _is_trace(content)
        requests = [self._with_contents(*parts) for parts in _parts(path, content, is_trace=self.is_trace)]
        if not requests:
            raise TrafficError(f"{path} has no requests to a model")
        first_ns = min(request.at_ns for request in requests)
        moved = (_from(request, first_ns) for request in requests)
        self.requests = tuple(sorted(moved, key=lambda request: request.at_ns))
        if self.requests[-1].at_ns > _MOST_NS:
            raise TrafficError(f"{path} has requests that are more than 100 years apart; correct their times")
        self.recording = TrafficRecording(
            started_at="", requests=len(requests), answers=any(request.answer for request in requests),
            ended=f"imported from {self.folder.name}",
        )  # fmt: skip

    def _with_contents(self, request: RecordedRequest, content: bytes, answer: bytes | None) -> RecordedRequest:
        kept = self._keep(answer) if answer else None
        return msgspec.structs.replace(
            request, content=self._keep(content), content_bytes=len(content), answer=kept,
            answer_bytes=len(answer or b""),
        )  # fmt: skip

    def _keep(self, content: bytes) -> str:
        digest = hashlib.sha256(content).hexdigest()
        self._contents[digest] = content
        return digest

    def _stored(self, digest: str | None) -> bytes | None:
        return None if digest is None else self._contents[digest]


def _from(request: RecordedRequest, first_ns: int) -> RecordedRequest:
    """The request on a clock that begins with the first one."""
    times = {name: getattr(request, name) for name in ("at_ns", "first_byte_ns", "end_ns")}
    return msgspec.structs.replace(
        request, **{name: at_ns - first_ns for name, at_ns in times.items() if at_ns is not None}
    )


def _is_trace(content: bytes) -> bool:
    """Whether the first line has lengths and no prompt."""
    first = content[: content.find(b"\n") + 1] or content
    try:
        line = msgspec.json.decode(first) if b"input_length" in first else None
    except _UNREADABLE:
        return False
    return isinstance(line, dict) and "input_length" in line and not {"text_input", "messages"} & line.keys()


def _read(path: str) -> bytes:
    """A file without its byte order mark. Raises `TrafficError`."""
    try:
        with open_named(Path(path)) as file:
            content: bytes = file.read(MOST_BYTES + 1)
    except (OSError, DocumentError) as exc:
        raise TrafficError(f"{path} cannot be read: {exc}") from exc
    if len(content) > MOST_BYTES:
        raise TrafficError(f"{path} is larger than {MOST_BYTES >> 20:,} MiB; give a part of it")
    return content.removeprefix(b"\xef\xbb\xbf")


def _parts(path: str, content: bytes, *, is_trace: bool) -> Iterator[Parts]:
    """The requests of a file, by its kind."""
    try:
        document = None if is_trace else msgspec.json.decode(content)
    except _UNREADABLE:
        document = None
    log = document.get("log") if isinstance(document, dict) else None
    entries = log.get("entries") if isinstance(log, dict) else None
    if isinstance(document, dict) and "data" in document:
        yield from _of_perf_analyzer(path, document["data"])
        return
    if isinstance(entries, list):
        for number, entry in enumerate(entries, 1):
            try:
                yield from _of_har(msgspec.convert(entry, _Entry))
            except (*_UNREADABLE, binascii.Error) as exc:
                raise TrafficError(f"{path}, entry {number:,}: {one_line(str(exc), 100)}") from exc
        return
    read = _of_mooncake if is_trace else _of_aiperf
    for number, line in enumerate(content.splitlines(), 1):
        if line.strip():
            try:
                yield read(line)
            except _UNREADABLE as exc:
                raise TrafficError(
                    f"{path}, line {number:,}: {one_line(str(exc), 100)}; give a HAR file, or lines of a trace with "
                    "timestamp and text_input, or with timestamp, input_length and output_length"
                ) from exc


# HAR 1.2


class _Named(msgspec.Struct):
    name: str
    value: str


class _Text(msgspec.Struct):
    text: str = ""
    encoding: str = ""

    def bytes(self) -> bytes:
        return base64.b64decode(self.text, validate=True) if self.encoding == "base64" else self.text.encode()


class _HarRequest(msgspec.Struct):
    method: str
    url: str
    headers: list[_Named] = []
    postData: _Text | None = None  # noqa: N815 (the format's name)


class _HarResponse(msgspec.Struct):
    status: int = 0
    headers: list[_Named] = []
    content: _Text | None = None


class _Entry(msgspec.Struct):
    startedDateTime: datetime  # noqa: N815
    request: _HarRequest
    response: _HarResponse = msgspec.field(default_factory=_HarResponse)
    time: Milliseconds = 0.0


def _of_har(entry: _Entry) -> Iterator[Parts]:
    """The request of an entry, if it is one to a model. Bodies in an archive have no compression any more."""
    request, response = entry.request, entry.response
    route = urlsplit(request.url).path
    model_route = MODEL_ROUTE.fullmatch(route)
    if request.method != "POST" or model_route is None or request.postData is None:
        return
    content, headers = request.postData.bytes(), _kept(request.headers)
    body = read_request(content, headers)
    at_ns = int(entry.startedDateTime.timestamp() * 1e6) * 1000
    answer = None if response.content is None or response.status != 200 else response.content.bytes()
    end_ns = at_ns + int(max(entry.time, 0.0) * 1e6) if response.status else None
    named, version = model_route.groups()
    yield (
        RecordedRequest(
            at_ns=at_ns, transport="http", route=route, model=unquote(named) if named else None, version=version,
            tensors=() if body is None else body.inputs, headers=headers, status=response.status or None, end_ns=end_ns,
            first_byte_ns=end_ns, answer_headers=_kept(response.headers),
        ),
        content,
        answer,
    )  # fmt: skip


def _kept(headers: list[_Named]) -> dict[str, str]:
    kept = kept_headers({header.name.lower(): header.value for header in headers})
    return {name: value for name, value in kept.items() if not name.endswith("-encoding")}


# perf_analyzer


def _of_perf_analyzer(path: str, data: object) -> Iterator[Parts]:
    entries: list[object] = []
    for entry in data if isinstance(data, list) else ():
        entries += entry if isinstance(entry, list) else [entry]  # of a stream
    gaps_us, at_ns = _intervals_us(f"{path}.intervals"), 0
    for number in range(max(len(entries), len(gaps_us)) if entries else 0):
        place, entry = number % len(entries), entries[number % len(entries)]
        if not isinstance(entry, dict):
            raise TrafficError(f"{path}, entry {place + 1:,} of data: it is not an object of inputs")
        tensors = tuple(RecordedTensor(name=name, datatype=UNTYPED, shape=()) for name in sorted(entry))
        request = RecordedRequest(at_ns=at_ns, transport="http", route="/v2/models/-/infer", tensors=tensors)
        yield request, msgspec.json.encode(entry), None
        at_ns += 1000 * gaps_us[number % len(gaps_us)]


def _intervals_us(path: str) -> list[int]:
    """The gaps between requests. Raises `TrafficError`."""
    if not Path(path).is_file():
        raise TrafficError(f"the data has no times; put the file of --request-intervals beside it, as {path}")
    gaps_us = []
    for number, line in enumerate(_read(path).splitlines(), 1):
        if line.strip():
            if not line.strip().isdigit() or len(line.strip()) > _MOST_DIGITS:
                raise TrafficError(f"{path}, line {number:,}: it is not a whole number of µs")
            gaps_us.append(int(line))
    if not gaps_us:
        raise TrafficError(f"{path} has no intervals")
    return gaps_us


# Traces


class TraceLine(msgspec.Struct):
    """A line of a trace in Mooncake's format. Its requests keep their times and lengths."""

    timestamp: Milliseconds
    input_length: Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKENS)]
    output_length: Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKENS)]
    hash_ids: tuple[Annotated[int, msgspec.Meta(ge=0)], ...] = ()
    """One for each 512 tokens: prompts share those that have the same."""


def _of_mooncake(content: bytes) -> Parts:
    line = msgspec.json.decode(content, type=TraceLine)
    request = RecordedRequest(at_ns=int(line.timestamp * 1e6), transport="http", route="/v1/completions")
    return request, msgspec.json.encode(line), None


class _PromptLine(msgspec.Struct):
    timestamp: Milliseconds
    text_input: str | None = None
    messages: list[dict[str, Any]] | None = None
    output_length: int | None = None


def _of_aiperf(content: bytes) -> Parts:
    line = msgspec.json.decode(content, type=_PromptLine)
    if not line.text_input and not line.messages:
        raise ValueError("it has neither text_input nor messages")
    fields: dict[str, Any] = {"model": "", **({} if line.output_length is None else {"max_tokens": line.output_length})}
    fields |= {"messages": line.messages} if line.messages else {"prompt": line.text_input}
    route = "/v1/chat/completions" if line.messages else "/v1/completions"
    headers = {"content-type": "application/json"}
    request = RecordedRequest(at_ns=int(line.timestamp * 1e6), transport="http", route=route, headers=headers)
    return request, msgspec.json.encode(fields), None
