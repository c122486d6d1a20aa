"""A small server of the Open Inference Protocol that answers invalid input correctly, unless started with a fault.

Its one model doubles FP32 rows of four. `serve KIND … --print-launch` makes it stand in for `abserve`. Each `--fault`
breaks one rule, so that a test can check that the conformance tool reports exactly that.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import sys
import time
from typing import Any

import numpy as np
from toy_options import parser  # type: ignore[import-not-found]
from toy_requests import (  # type: ignore[import-not-found]
    MAX_BATCH,
    MAX_HEAD_BYTES,
    MODEL,
    WIDTH,
    RefusalError,
    check_request,
    parse_head,
    read_chunks,
    read_head,
    render,
)  # beside this file: it is run as a program

MAX_DEPTH = 100
LEAK_BYTES = 256 * 1024


class Toy:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.faults = set(options.fault)
        self.ready_at = time.monotonic() + options.startup_ms / 1e3
        self.engine = asyncio.Lock()
        self.waiting = self.executed = self.executions = self.failed = self.left = 0
        self.refusals = 0
        self.kept: list[bytes] = []
        self.busy: set[asyncio.Task[None]] = set()

    @property
    def ready(self) -> bool:
        return time.monotonic() >= self.ready_at

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self.exchange(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, TimeoutError):
            pass
        finally:
            writer.close()

    async def exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request; whether the connection stays open."""
        deadline = self.options.read_timeout_s
        method = "GET"
        try:
            try:
                async with asyncio.timeout(deadline if "no-deadline" not in self.faults else None):
                    head = await read_head(reader)
            except asyncio.LimitOverrunError:
                raise RefusalError(431, "the request's head is larger than this server takes") from None
            method, path, headers = parse_head(head)
            body = await self.body(reader, headers)
            task = asyncio.current_task()
            assert task is not None
            self.busy.add(task)
            try:
                status, answer, extra = await self.answer(method, path, headers, body, reader)
            finally:
                self.busy.discard(task)
        except RefusalError as refusal:
            self.refusals += 1
            status, extra = refusal.status, {"Retry-After": "1"} if refusal.status == 503 else {}
            if "no-retry-after" in self.faults:
                extra = {}
            answer = self.error(str(refusal))
            kind = "text/plain" if "plain-errors" in self.faults else "application/json"
            writer.write(render(status, answer, {**extra, "Content-Type": kind, "Connection": "close"}, method))
            await writer.drain()
            return False
        if status == 0:  # nobody is left to answer
            return False
        writer.write(render(status, answer, extra, method))
        await writer.drain()
        return True

    def error(self, text: str) -> bytes:
        if "plain-errors" in self.faults:
            return text.encode()
        if "traceback" in self.faults:
            text = f'Traceback (most recent call last): File "/srv/toy/app.py", line 3: {text}'
        return json.dumps({"error": text}).encode()

    async def body(self, reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
        limit = self.options.max_body_bytes
        length, chunked = headers.get("content-length"), "chunked" in headers.get("transfer-encoding", "")
        if length is not None and chunked:
            raise RefusalError(400, "Content-Length and Transfer-Encoding exclude each other")
        try:
            async with asyncio.timeout(self.options.read_timeout_s if "no-deadline" not in self.faults else None):
                if chunked:
                    return await read_chunks(reader, limit)
                if length is None:
                    return b""
                if not length.isascii() or not length.isdigit():
                    raise RefusalError(400, "Content-Length is not a number")
                if int(length) > limit:
                    raise RefusalError(413, f"a body of {length} bytes exceeds the limit of {limit} bytes")
                return await reader.readexactly(int(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            self.left += 1
            if "count-departures-as-failures" in self.faults:
                self.failed += 1
            raise

    async def answer(
        self, method: str, path: str, headers: dict[str, str], body: bytes, reader: asyncio.StreamReader
    ) -> tuple[int, bytes, dict[str, str]]:
        for pattern, verb, handler in self.routes():
            match = re.fullmatch(pattern, path)
            if match is None:
                continue
            if method != verb:
                raise RefusalError(405, f"{method} is not allowed here, {verb} is")
            names = match.groupdict()
            if names.get("model", MODEL) != MODEL or names.get("version") not in (None, "1"):
                raise RefusalError(404, "no such model or version is served here")
            if handler == "infer":
                return await self.infer(headers, body, reader)
            status, document = handler()
            text = document if isinstance(document, str) else json.dumps(document)
            return status, text.encode(), {"Content-Type": "application/json"}
        raise RefusalError(404, "there is no such route")

    def routes(self) -> list[tuple[str, str, Any]]:
        model = r"/v2/models/(?P<model>[^/]+)(?:/versions/(?P<version>[^/]+))?"
        tensor = [{"datatype": "FP32", "shape": [-1, WIDTH]}]
        metadata = {
            "name": MODEL,
            "versions": ["1"],
            "platform": "toy",
            "inputs": [{"name": "x", **tensor[0]}],
            "outputs": [{"name": "y", **tensor[0]}],
        }
        count = {"count": self.executed, "ns": 0}
        stats = {
            "inference_count": self.executed,
            "execution_count": self.executions,
            "inference_stats": {"success": count, "fail": {"count": self.failed, "ns": 0}},
        }
        metrics = f"toy_client_disconnects_total {self.left}\ntoy_requests_failure_total {self.failed}\n"
        ready = (200 if self.ready else 503, {} if self.ready else {"error": "loading"})
        return [
            (r"/v2/?", "GET", lambda: (200, {"name": "toy", "version": "1", "extensions": []})),
            (r"/v2/health/live", "GET", lambda: (200, {})),
            (r"/v2/health/ready", "GET", lambda: ready),
            (model, "GET", lambda: (200, metadata)),
            (model + "/ready", "GET", lambda: ready),
            (model + "/config", "GET", lambda: (200, {"max_batch_size": MAX_BATCH})),
            (model + "/stats", "GET", lambda: (200, {"model_stats": [stats]})),
            (r"/metrics", "GET", lambda: (200, metrics)),
            (model + "/infer", "POST", "infer"),
            (r"/v2/systemsharedmemory/region/.*/register", "POST", self.register),
            (r"/v2/repository/models/[^/]*/(?:un)?load", "POST", lambda: (400, {"error": "model control is off"})),
        ]

    def register(self) -> tuple[int, Any]:
        return 400, {"error": "shared memory is off"}

    async def infer(
        self, headers: dict[str, str], body: bytes, reader: asyncio.StreamReader
    ) -> tuple[int, bytes, dict[str, str]]:
        if not self.ready:
            raise RefusalError(503, "the model is not ready yet")
        if "content-encoding" in headers:
            raise RefusalError(415, "compressed bodies are not taken")
        rows, document = self.parse(headers, body)
        timeout_us = document.get("parameters", {}).get("timeout") if isinstance(document, dict) else None
        if self.waiting >= self.options.queue_size:
            raise RefusalError(503, "Exceeds maximum queue size")
        self.waiting += 1
        try:
            async with asyncio.timeout(timeout_us / 1e6 if timeout_us and "late-timeout" not in self.faults else None):
                await self.engine.acquire()
        except TimeoutError:
            raise RefusalError(503, "Request timeout expired") from None
        finally:
            self.waiting -= 1
        try:
            if (reader.at_eof() or reader.exception()) and "execute-for-nobody" not in self.faults:
                self.left += 1
                return 0, b"", {}
            await asyncio.sleep(self.options.row_ms / 1e3 * len(rows))
        finally:
            self.engine.release()
        self.executed += len(rows)
        self.executions += 1
        if "leak" in self.faults:
            self.kept.append(os.urandom(LEAK_BYTES))
        drift = self.refusals if "drift" in self.faults else 0
        return self.result(rows * 2 + drift, document)

    def parse(self, headers: dict[str, str], body: bytes) -> tuple[Any, Any]:
        text, binary = body, b""
        length = headers.get("inference-header-content-length")
        if length is not None:
            if not length.isdigit() or int(length) > len(body):
                raise RefusalError(400, "Inference-Header-Content-Length is not a number up to the body's length")
            if int(length) == 0:
                if len(body) != WIDTH * 4:
                    raise RefusalError(400, f"a raw request has {WIDTH * 4} bytes, got {len(body)}")
                return np.frombuffer(body, "<f4").reshape(1, WIDTH), {"parameters": {"binary_data_output": True}}
            text, binary = body[: int(length)], body[int(length) :]
        document = self.load(text)
        try:
            return check_request(document, binary, "accept-any-output" in self.faults), document
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as exc:
            raise RefusalError(400, f"the request is not valid: {type(exc).__name__}") from exc

    def load(self, text: bytes) -> Any:
        depth = deepest = 0
        for byte in text if text.count(b"[") + text.count(b"{") > MAX_DEPTH else b"":
            depth += (byte in b"[{") - (byte in b"]}")
            deepest = max(deepest, depth)
        if deepest > MAX_DEPTH:
            if "die-on-deep-json" in self.faults:
                os.kill(os.getpid(), signal.SIGSEGV)
            if "hang-on-deep-json" in self.faults:
                time.sleep(6)  # the event loop with it: nobody is answered
            raise RefusalError(400, f"JSON is nested deeper than {MAX_DEPTH}")
        try:
            return json.loads(text)
        except ValueError:
            raise RefusalError(500 if "500-for-bad-json" in self.faults else 400, "the body is not JSON") from None

    def result(self, rows: Any, document: Any) -> tuple[int, bytes, dict[str, str]]:
        output: dict[str, Any] = {"name": "y", "datatype": "FP32", "shape": list(rows.shape)}
        answer = {"model_name": MODEL, "model_version": "1", "outputs": [output]}
        if document.get("id"):
            answer["id"] = document["id"]
        if not document.get("parameters", {}).get("binary_data_output"):
            output["data"] = rows.ravel().tolist()
            return 200, json.dumps(answer).encode(), {"Content-Type": "application/json"}
        blob = rows.astype("<f4").tobytes()
        output["parameters"] = {"binary_data_size": len(blob)}
        text = json.dumps(answer).encode()
        return 200, text + blob, {"Inference-Header-Content-Length": str(len(text))}


async def serve(options: argparse.Namespace) -> None:
    toy = Toy(options)
    server = await asyncio.start_server(toy.connection, "127.0.0.1", options.http_port, limit=MAX_HEAD_BYTES)
    stop = asyncio.Event()
    if "ignore-sigterm" not in toy.faults:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    else:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    await stop.wait()
    server.close()
    if "drop-work" not in toy.faults:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(20):
                while toy.busy:
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.05)
    os._exit(0)


def main() -> None:
    options = parser().parse_args()
    options.fault = [fault for text in options.fault for fault in text.split(",")]
    if options.print_launch:
        url = f"http://127.0.0.1:{options.http_port}"
        argv = [sys.executable, __file__, *(part for part in sys.argv[1:] if part != "--print-launch")]
        plan = {"argv": argv, "env": {}, "http_url": url, "metrics_url": f"{url}/metrics", "model": MODEL}
        print(json.dumps({**plan, "title": "toy"}))  # noqa: T201 - the plan is its output
        return
    asyncio.run(serve(options))


if __name__ == "__main__":
    main()
