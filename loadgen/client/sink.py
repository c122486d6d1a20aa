"""The server of a calibration: `python -m loadgen.client.sink` reads requests whole and answers 2 KB, or tokens.

It speaks as much HTTP and gRPC as the load generator needs and ignores the content: no model, no decoding, no queue, so
it costs less than any server. Over gRPC it does without the gRPC library, which costs several times what the client
does. Requests that refer to shared memory are answered without reading the memory. It can delay its answers, and
measures how long it kept each request, from its last byte read to just before its answer is written.

A request for tokens is answered by a stream of as many chunks as it asks for. All streams get one at the same moments,
as from an engine that decodes them in one batch, and slowly enough for the client to read each alone.

    argument                 {"port": …, "grpc_port": …}; 0: free ports. Several processes may share them (SO_REUSEPORT)
    first line of output     the same with the ports in use
    delay MS  on input       delay all answers from now on                            → {}
    held      on input       ns for which it kept each request since the last `held`  → {"held_ns": […]}
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

from loadgen.client.grpc import (
    ACK,
    DATA,
    DEFAULT_WINDOW,
    END_HEADERS,
    END_STREAM,
    FRAME,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    MAX_FRAME_SIZE,
    MOST_WINDOW,
    NUMBER,
    PREFIX,
    SETTING,
    SETTINGS,
    WINDOW_UPDATE,
    frame_head,
    header_block,
)
from loadgen.client.grpc_messages import ModelInferResponse

MODEL = "sink"
INPUT, OUTPUT = "pixel_values", "embedding"
ITEM_SHAPE = (3, 224, 224)
ANSWER_BYTES = 2048

_RECEIVE_BYTES = 1 << 20
_PREFACE_BYTES = 24
_STEP_S = 0.002
"""From one token of a stream to the next."""
_GRPC_HEAD = header_block([(b":status", b"200"), (b"content-type", b"application/grpc")])
_GRPC_TRAILER = header_block([(b"grpc-status", b"0")])


class Sink:
    """The delay and the measured times, for all connections of a process."""

    def __init__(self) -> None:
        self.delay_s = 0.0
        self.held_ns: list[int] = []
        self._streams: list[Callable[[], bool]] = []

    def stream(self, send_next: Callable[[], bool]) -> None:
        """Call it at every step from the next one on, until it returns False."""
        self._streams.append(send_next)
        if len(self._streams) == 1:
            asyncio.get_running_loop().call_later(_STEP_S, self._step)

    def _step(self) -> None:
        self._streams = [send_next for send_next in self._streams if send_next()]
        if self._streams:
            asyncio.get_running_loop().call_later(_STEP_S, self._step)

    def respond(self, send: Callable[[], None]) -> None:
        """Answer a complete request, after the delay if there is one."""
        since_ns = perf_counter_ns()
        if self.delay_s:
            asyncio.get_running_loop().call_later(self.delay_s, self._answer, since_ns, send)
        else:
            self._answer(since_ns, send)

    def _answer(self, since_ns: int, send: Callable[[], None]) -> None:
        self.held_ns.append(perf_counter_ns() - since_ns)
        send()

    def command(self, line: str) -> dict[str, object]:
        """Carry out one line of the standard input. Raises `ValueError` for an unknown one."""
        word, _, value = line.strip().partition(" ")
        if word == "delay":
            self.delay_s = float(value) / 1000.0
            return {}
        if word == "held":
            held, self.held_ns = self.held_ns, []
            return {"held_ns": held}
        raise ValueError(f"unknown command: {line!r}")


def http_answer(document: object, binary: bytes = b"") -> bytes:
    text = json.dumps(document).encode()
    extra = f"Inference-Header-Content-Length: {len(text)}\r\n" if binary else ""
    kind = "application/octet-stream" if binary else "application/json"
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\n{extra}Content-Length: {len(text) + len(binary)}\r\n\r\n"
    return head.encode() + text + binary


_TENSOR = {"name": OUTPUT, "datatype": "FP32", "shape": [1, ANSWER_BYTES // 4]}
_BINARY_ANSWER = http_answer(
    {"model_name": MODEL, "outputs": [{**_TENSOR, "parameters": {"binary_data_size": ANSWER_BYTES}}]},
    bytes(ANSWER_BYTES),
)
_MEMORY_ANSWER = http_answer({"model_name": MODEL, "outputs": [_TENSOR]})
_EMPTY = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"


def _chunk(data: str) -> bytes:
    event = f"data: {data}\n\n"
    return f"{len(event):x}\r\n{event}\r\n".encode()


_STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_STREAM_END = b"0\r\n\r\n"
_USAGE = '"usage":{"prompt_tokens":32,"completion_tokens":64,"total_tokens":96}'
_COMPLETION = f'{{"id":"cmpl-0","object":"text_completion","created":0,"model":"{MODEL}","choices":'
_COMPLETION_CHUNK = _chunk(
    f'{_COMPLETION}[{{"index":0,"text":" t1234","token_ids":[1234],"logprobs":null,"finish_reason":null}}],{_USAGE}}}'
)
_COMPLETION_END = _chunk(f"{_COMPLETION}[],{_USAGE}}}") + _chunk("[DONE]") + _STREAM_END
_GENERATE_CHUNK = _chunk(f'{{"model_name":"{MODEL}","model_version":"1","token_ids":1234}}')
_MAX_TOKENS = b'"max_tokens":'


class _SinkProtocol(asyncio.BufferedProtocol):
    """One connection with one receive buffer."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._buffer = bytearray(_RECEIVE_BYTES)
        self._head = bytearray()
        self._left = 0
        """Bytes of the current body or frame that are still to come."""
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def get_buffer(self, _sizehint: int) -> bytearray:
        return self._buffer

    def _write(self, content: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(content)


class HttpSink(_SinkProtocol):
    """HTTP without pipelining. Requests other than inference get an empty answer."""

    _answer = _EMPTY
    _is_inference = False
    _streams = False
    _chunk = _end = b""
    _tokens_left = 0
    _body = b""
    """The last bytes of a request for tokens."""

    def buffer_updated(self, nbytes: int) -> None:
        if self._streams:
            self._body += bytes(memoryview(self._buffer)[:nbytes])
        if self._left:
            self._left -= nbytes
        else:
            self._head += memoryview(self._buffer)[:nbytes]
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return
            self._begin(bytes(self._head[:end]), len(self._head) - end - 4)
            self._head.clear()
        if self._left:
            return
        if self._streams:
            body, self._body = self._body, b""
            place = body.rfind(_MAX_TOKENS) + len(_MAX_TOKENS)
            tokens = int(body[place:].split(b",", 1)[0])
            self._sink.respond(lambda: self._begin_stream(tokens))
        elif self._is_inference:
            self._sink.respond(lambda: self._write(self._answer))
        else:
            self._write(self._answer)

    def _begin(self, head: bytes, body_bytes: int) -> None:
        path = head.split(b" ", 2)[1].decode("latin-1")
        fields = head.lower()
        self._is_inference = path.endswith("/infer")
        self._streams = path.endswith(("/completions", "/generate_stream"))
        if self._streams:
            self._chunk, self._end = (
                (_COMPLETION_CHUNK, _COMPLETION_END) if path.endswith("s") else (_GENERATE_CHUNK, _STREAM_END)
            )
            self._body = bytes(self._head[len(head) + 4 :])
        elif self._is_inference:
            self._answer = _BINARY_ANSWER if b"\r\ninference-header-content-length:" in fields else _MEMORY_ANSWER
        else:
            self._answer = self.document(path)
        start = fields.find(b"\r\ncontent-length:")
        length = 0 if start < 0 else int(fields[start + 17 :].split(b"\r\n", 1)[0])
        self._left = length - body_bytes

    def _begin_stream(self, tokens: int) -> None:
        self._write(_STREAM_HEAD)
        self._tokens_left = tokens
        self._sink.stream(self._next_token)

    def _next_token(self) -> bool:
        """Send a chunk; False after the last one."""
        self._tokens_left -= 1
        self._write(self._chunk if self._tokens_left else self._chunk + self._end)
        return self._tokens_left > 0 and not self._transport.is_closing()

    def document(self, _path: str) -> bytes:
        """The answer to a request that is not inference."""
        return _EMPTY


class GrpcSink(_SinkProtocol):
    """gRPC for abserve's client only: it reads no headers and answers the end of each stream with the same message."""

    def __init__(self, sink: Sink, answer: bytes) -> None:
        super().__init__(sink)
        self._message = PREFIX.pack(0, len(answer)) + answer
        self._left = _PREFACE_BYTES
        self._kind, self._flags, self._stream = -1, 0, 0
        self._unacknowledged = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        settings = SETTING.pack(INITIAL_WINDOW_SIZE, MOST_WINDOW) + SETTING.pack(MAX_FRAME_SIZE, 2**24 - 1)
        self._transport.write(
            frame_head(SETTINGS, 0, 0, len(settings)) + settings
            + frame_head(WINDOW_UPDATE, 0, 0, 4) + NUMBER.pack(MOST_WINDOW - DEFAULT_WINDOW)
        )  # fmt: skip

    def buffer_updated(self, nbytes: int) -> None:
        place = 0
        while place < nbytes:
            if self._left:
                taken = min(self._left, nbytes - place)
                self._left -= taken
                place += taken
                if self._left:
                    return
                self._frame_ended()
                continue
            taken = min(9 - len(self._head), nbytes - place)
            self._head += memoryview(self._buffer)[place : place + taken]
            place += taken
            if len(self._head) == 9:
                high, low, self._kind, self._flags, self._stream = FRAME.unpack(self._head)
                self._head.clear()
                self._left = high << 8 | low
                if self._kind == DATA:
                    self._unacknowledged += self._left
                if not self._left:
                    self._frame_ended()

    def _frame_ended(self) -> None:
        if self._kind == SETTINGS and not self._flags & ACK:
            self._transport.write(frame_head(SETTINGS, ACK, 0, 0))
        elif self._kind in (DATA, HEADERS) and self._flags & END_STREAM:
            stream = self._stream
            self._sink.respond(lambda: self._answer(stream))

    def _answer(self, stream: int) -> None:
        parts = [
            frame_head(HEADERS, END_HEADERS, stream, len(_GRPC_HEAD)),
            _GRPC_HEAD,
            frame_head(DATA, 0, stream, len(self._message)),
            self._message,
            frame_head(HEADERS, END_HEADERS | END_STREAM, stream, len(_GRPC_TRAILER)),
            _GRPC_TRAILER,
        ]
        if self._unacknowledged > MOST_WINDOW // 4:
            parts += [frame_head(WINDOW_UPDATE, 0, 0, 4), NUMBER.pack(self._unacknowledged)]
            self._unacknowledged = 0
        self._write(b"".join(parts))


def infer_answer() -> bytes:
    """The serialised `ModelInferResponse` of every request."""
    answer = ModelInferResponse(model_name=MODEL, model_version="1")
    answer.outputs.add(name=OUTPUT, datatype="FP32", shape=(1, ANSWER_BYTES // 4))
    answer.raw_output_contents.append(bytes(ANSWER_BYTES))
    content: bytes = answer.SerializeToString()
    return content


async def _serve(port: int, grpc_port: int) -> None:
    loop = asyncio.get_running_loop()
    sink, message = Sink(), infer_answer()
    http = await loop.create_server(lambda: HttpSink(sink), "127.0.0.1", port, reuse_port=True, backlog=1024)
    grpc = await loop.create_server(
        lambda: GrpcSink(sink, message), "127.0.0.1", grpc_port, reuse_port=True, backlog=1024
    )
    _say({"port": http.sockets[0].getsockname()[1], "grpc_port": grpc.sockets[0].getsockname()[1]})
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        _say(sink.command(line.decode()))
    http.close()
    grpc.close()


def _say(document: object) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


def main() -> None:
    asyncio.run(_serve(**json.loads(sys.argv[1])))


if __name__ == "__main__":
    main()
