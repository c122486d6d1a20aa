"""Takes over what the relay has seen and writes it, in a thread of its own.

The relay never waits for it. A request goes into a queue of bounded size, and one that does not fit is counted as lost;
whatever is raised here ends the recording and not the traffic.
"""

from __future__ import annotations

import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from time import perf_counter_ns
from typing import Any, Literal
from urllib.parse import unquote

from loadgen.base.documents import one_line
from loadgen.client.grpc_messages import ModelInferRequest
from loadgen.records.traffic import (
    MODEL_ROUTE,
    RecordedRequest,
    RecordedTensor,
    TrafficWriter,
    kept_headers,
    plain,
    read_request,
)

MOST_HELD_BYTES = 2**28
"""Most bytes of bodies in memory, of requests under way and of those that wait to be written."""
FLUSH_S = 0.25
LAST_ANSWERS_S = 5.0
"""How long a recording that ends by itself waits for the answers to its last requests."""
BYTES_BESIDE = 2000
"""Memory of a request besides its bodies."""
_MOST_NAME = 200


class Observer(ABC):
    """Whom a tap tells of the requests that it sees. The memory of their bodies is bounded."""

    keeps_contents = keeps_answers = True
    """Whether the bodies of requests and those of answers are wanted."""

    def __init__(self) -> None:
        self.taken_bytes = self.freed_bytes = 0
        """Memory of requests that was taken by the relay, and freed by the thread that has worked on them."""

    @abstractmethod
    def begin(
        self, transport: Literal["http", "grpc"], route: str, headers: Mapping[str, str], at_ns: int, head: str = ""
    ) -> PassedRequest | None:
        """A request of which the head has come, over HTTP as the text `head`; None if it is not wanted."""

    def forwarded(self, request: PassedRequest) -> None:  # noqa: B027 (who only records has no use for it)
        """The whole request has passed."""

    @abstractmethod
    def take(self, request: PassedRequest) -> None:
        """The answer has ended, or the connection before it."""

    def holds(self, size: int) -> bool:
        """Whether so many more bytes have a place in memory, which is then taken."""
        if self.taken_bytes - self.freed_bytes + size > MOST_HELD_BYTES:
            return False
        self.taken_bytes += size
        return True


class Recorder(Observer):
    """Records into a folder until `minutes` or `requests` are reached, or `stop` is called."""

    def __init__(
        self, writer: TrafficWriter, *, minutes: float | None = None, requests: int | None = None,
        ended: Callable[[str], None] = lambda _: None,
    ) -> None:  # fmt: skip
        """`ended` is called with the reason when the recording ends by itself, from the recorder's thread."""
        super().__init__()
        self.started_ns = perf_counter_ns()
        self.lost = 0
        self._under_way = 0
        self.failed = False
        """Whether it ended because it could not go on."""
        self._writer = writer
        self._recording = writer.recording
        self.keeps_contents, self.keeps_answers = writer.recording.contents, writer.recording.answers
        self._until_ns = None if minutes is None else self.started_ns + int(minutes * 60e9)
        self._most = requests
        self._begun = 0
        self._why: str | None = None
        self._last_answers_s = LAST_ANSWERS_S
        self._on_end = ended
        self._queue: SimpleQueue[PassedRequest | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="recorder", daemon=True)
        self._thread.start()

    def begin(
        self,
        transport: Literal["http", "grpc"],
        route: str,
        headers: Mapping[str, str],
        at_ns: int,
        head: str = "",  # noqa: ARG002 (only the kept headers)
    ) -> PassedRequest | None:
        """A request of which the head has come; None if it is not recorded."""
        if self._why is not None or (self._recording.share < 1.0 and random.random() >= self._recording.share):
            return None
        if self._until_ns is not None and at_ns > self._until_ns:
            self._why = "its minutes were over"
            return None
        if self._most is not None and self._begun >= self._most:
            self._why = "its requests were recorded"
            return None
        if not self.holds(BYTES_BESIDE):
            self.lost += 1
            return None
        self._begun += 1
        self._under_way += 1
        return PassedRequest(self, transport, route, kept_headers(headers), at_ns, held_bytes=BYTES_BESIDE)

    def take(self, request: PassedRequest) -> None:
        """Record a request that has ended, unless its client left inside it, so that a part of it is all there is."""
        self._under_way -= 1
        if request.sent_ns is None or request.lost or not self._thread.is_alive():
            self.lost += request.sent_ns is not None or request.lost
            self.taken_bytes -= request.held_bytes
        else:
            self._queue.put(request)

    def stop(self, why: str, wait_s: float = 2.0) -> bool:
        """End the recording. Returns whether everything was written: a disk that hangs is not waited for."""
        self._last_answers_s = 0.0
        self._why = self._why or why
        self._queue.put(None)
        self._thread.join(wait_s)
        return not self._thread.is_alive()

    def _write(self) -> None:
        """Everything that the thread does."""
        try:
            until_ns = None
            while self._why is None or (self._under_way and perf_counter_ns() < (until_ns or 0)):
                self._write_waiting(FLUSH_S)
                until_ns = until_ns or (self._why and perf_counter_ns() + int(self._last_answers_s * 1e9))
            self._write_waiting(0.0)  # those that ended in this moment
            self._flush(self._why)
        except Exception as exc:  # noqa: BLE001 (the traffic goes on)
            reason = (isinstance(exc, OSError) and exc.strerror) or str(exc) or repr(exc)
            self.failed = True
            self._why = f"it could not be written: {one_line(reason)}"
        self._on_end(self._why)

    def _write_waiting(self, wait_s: float) -> None:
        """Write what waits, or comes within `wait_s`."""
        until_ns = perf_counter_ns() + int(wait_s * 1e9)
        while True:
            left_s = (until_ns - perf_counter_ns()) / 1e9
            try:
                passed = self._queue.get(timeout=left_s) if left_s > 0 else self._queue.get_nowait()
            except Empty:
                break
            if passed is None:  # it is to stop
                break
            self._writer.add(*passed.recorded(self.started_ns))
            self.freed_bytes += passed.held_bytes
            if left_s < -1.0:  # more comes than is written: what was written must be found on the disk
                break
        if self._why is None:
            self._flush(None)

    def _flush(self, ended: str | None) -> None:
        seconds = (perf_counter_ns() - self.started_ns) / 1e9
        self._writer.flush(lost=self.lost, seconds=round(seconds, 3), ended=ended)


@dataclass(slots=True)
class PassedRequest:
    """One request on its way, seen from its head to the end of its answer."""

    recorder: Observer
    transport: Literal["http", "grpc"]
    route: str
    headers: dict[str, str]
    at_ns: int
    content: list[bytes] = field(default_factory=list)
    content_bytes: int = 0
    sent_ns: int | None = None
    """When its last byte was passed on."""
    first_byte_ns: int | None = None
    answer_headers: Mapping[str, str] = field(default_factory=dict)
    answer: list[bytes] = field(default_factory=list)
    answer_bytes: int = 0
    end_ns: int | None = None
    status: int | None = None
    held_bytes: int = 0
    lost: bool = False
    """Whether its bodies found no place in memory."""
    is_cut_off: bool = False
    """Whether the server broke off before the end of the answer."""

    @property
    def answered(self) -> bool:
        """Whether a part of the answer has come."""
        return self.first_byte_ns is not None

    def add_content(self, piece: bytes) -> None:
        """A part of the body has passed."""
        self.content_bytes += len(piece)
        self._keep(piece, self.content)

    def forwarded(self, now_ns: int) -> None:
        """The whole request has passed."""
        self.sent_ns = now_ns
        self.recorder.forwarded(self)

    def add_answer(self, piece: bytes, now_ns: int) -> None:
        """A part of the answer has passed; empty: its head."""
        if self.first_byte_ns is None:
            self.first_byte_ns = now_ns
        self.answer_bytes += len(piece)
        if self.recorder.keeps_answers:
            self._keep(piece, self.answer)

    def _keep(self, piece: bytes, pieces: list[bytes]) -> None:
        self.lost = self.lost or not self.recorder.holds(len(piece))
        if not self.lost:
            self.held_bytes += len(piece)
            pieces.append(piece)

    def end(self, status: int | None, now_ns: int, *, whole: bool = True) -> None:
        """The answer has ended, or the connection before it."""
        self.status = status
        self.end_ns = now_ns if whole and self.answered else None
        self.recorder.take(self)

    def recorded(self, started_ns: int) -> tuple[RecordedRequest, bytes | None, bytes | None]:
        """As it is stored, with its body and its answer's, if they are. Called in the recorder's thread."""
        content = b"".join(self.content)
        if self.transport == "grpc":
            content = plain(content, self.headers.get("grpc-encoding"))
        answer = b"".join(self.answer) if self.recorder.keeps_answers and self.end_ns is not None else None
        if self.transport == "grpc" and answer is not None:
            answer = plain(answer, self.answer_headers.get("grpc-encoding"))
        first_ns, end_ns = self.first_byte_ns, self.end_ns
        return (
            RecordedRequest(
                at_ns=max(0, self.at_ns - started_ns), transport=self.transport, route=self.route,
                content_bytes=self.content_bytes, headers=self.headers, status=self.status,
                first_byte_ns=None if first_ns is None else max(0, first_ns - started_ns),
                end_ns=None if end_ns is None else max(0, end_ns - started_ns), answer_bytes=self.answer_bytes,
                answer_headers={} if answer is None else kept_headers(self.answer_headers),
                **described(self.transport, self.route, self.headers, content),
            ),
            content if self.recorder.keeps_contents else None,
            answer,
        )  # fmt: skip


# What a request says of itself


def described(
    transport: Literal["http", "grpc"], route: str, headers: Mapping[str, str], content: bytes
) -> dict[str, Any]:
    """Model, version, inputs and priority; without those that cannot be read."""
    try:
        return _of_message(content) if transport == "grpc" else _of_body(route, headers, content)
    except Exception:  # noqa: BLE001 (the request was passed on; what it says is for the server to judge)
        return {}


def _of_body(route: str, headers: Mapping[str, str], content: bytes) -> dict[str, Any]:
    body = read_request(plain(content, headers.get("content-encoding")), headers)
    to_model = MODEL_ROUTE.fullmatch(route)
    named, version = (None, None) if to_model is None else to_model.groups()
    described: dict[str, Any] = {"model": named and unquote(named), "version": version}
    if body is None:
        return described
    priority = body.parameters.get("priority", body.priority)
    return described | {
        "model": described["model"] or (None if body.model is None else one_line(body.model, _MOST_NAME)),
        "tensors": _tensors(body.inputs),
        "priority": priority if isinstance(priority, int) else None,
    }


def _of_message(content: bytes) -> dict[str, Any]:
    message = ModelInferRequest.FromString(content)
    return {
        "model": one_line(message.model_name, _MOST_NAME) or None,
        "version": one_line(message.model_version, _MOST_NAME) or None,
        "tensors": _tensors(message.inputs),
        "priority": next(
            (
                entry.value.int64_param or entry.value.uint64_param
                for entry in message.parameters
                if entry.key == "priority"
            ),
            None,
        ),
    }


def _tensors(inputs: Any) -> tuple[RecordedTensor, ...]:
    return tuple(
        RecordedTensor(
            name=one_line(each.name, _MOST_NAME), datatype=one_line(each.datatype, 20), shape=tuple(each.shape)
        )
        for each in inputs
    )
