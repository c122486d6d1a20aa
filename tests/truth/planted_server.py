"""A real HTTP and gRPC server of the Open Inference Protocol with no model, whose time is planted.

Run as a program it prints one line, `HTTP_PORT GRPC_PORT`, and serves until it is told to end. Every fault is an option
of its own; all of them together make the time of a request. Times are kept to some hundredths of a millisecond: a
coroutine sleeps until shortly before the moment and spins for the rest, unless `--no-spin` says that many requests are
under way at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import signal
import sys
import time
from collections import Counter

import grpc
import numpy as np
from tritonclient.grpc import service_pb2

MODEL, FEATURES, OUTPUTS, LARGEST = "planted", 64, 8, 32
SPIN_NS = 2_500_000
FAULTS = ("wrong", "zeros", "nan")
MATRIX = np.random.default_rng(0).standard_normal((FEATURES, OUTPUTS)).astype("<f4")
METADATA = {
    "name": MODEL,
    "versions": ["1"],
    "platform": "planted",
    "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, FEATURES]}],
    "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, OUTPUTS]}],
}
SEQUENCES = METADATA | {
    "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, -1]}],
    "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, -1, OUTPUTS]}],
}


def options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--delay-ms", type=float, default=0.0, help="of every request")
    parser.add_argument("--queue-delay-ms", type=float, default=0.0, help="more, and reported as the batcher's")
    parser.add_argument("--cv", type=float, default=0.0, help="of a gamma distributed delay with that mean; 0: fixed")
    parser.add_argument("--tail-share", type=float, default=0.0, help="of requests that take --tail-factor as long")
    parser.add_argument("--tail-factor", type=float, default=1.0)
    parser.add_argument("--crowded-factor", type=float, default=1.0, help="a request takes so many times as long …")
    parser.add_argument("--crowded-from", type=int, default=1, help="… if so many are under way when it comes")
    parser.add_argument("--stall-ms", type=float, default=0.0, help="nothing is answered for so long …")
    parser.add_argument("--stall-every-s", type=float, default=10.0, help="… once in so many seconds")
    parser.add_argument("--rate", type=float, default=0.0, help="requests a second at most, one after the other")
    parser.add_argument("--slow-body-ms", type=float, default=0.0, help="from the first byte of an answer to the last")
    parser.add_argument("--drift", type=float, default=0.0, help="share by which delays grow in a minute since …")
    parser.add_argument("--drift-from-ns", type=int, default=0, help="… this moment of the monotonic clock")
    parser.add_argument("--first-ms", type=float, default=0.0, help="more, for the first answer of an HTTP connection")
    parser.add_argument("--wrong-batches", action="store_true", help="rows of a batch are mixed up")
    parser.add_argument("--wrong-batch", type=int, default=0, help="rows of a batch of this size are mixed up")
    parser.add_argument("--scale", type=float, default=1.0, help="of every output")
    parser.add_argument("--fault", choices=FAULTS, help="of outputs …")
    parser.add_argument("--fault-from", type=int, default=1, help="… while so many requests are under way")
    parser.add_argument("--fault-from-merged", type=int, default=0, help="… or of so many items executed together")
    parser.add_argument("--fault-from-length", type=int, default=0, help="… or of items at least so long")
    parser.add_argument("--merge", action="store_true", help="requests that wait together are executed together")
    parser.add_argument("--sequences", action="store_true", help="items have a length, and an output at each place")
    parser.add_argument(
        "--short-every", type=int, default=0, help="a quarter of the outputs missing, every Nth request"
    )
    parser.add_argument("--hollow-share", type=float, default=0.0, help="of requests get 200 and {} at once")
    parser.add_argument("--good-first", type=int, default=0, help="requests before any error, short or hollow answer")
    parser.add_argument("--error-every", type=int, default=0, help="503, every Nth request")
    parser.add_argument("--cache-from", type=int, default=0, help="a body that comes for the Nth time is answered …")
    parser.add_argument("--cache-saves", type=float, default=1.0, help="… so much sooner, as a share of the time")
    parser.add_argument("--no-spin", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


class PlantedError(Exception):
    """The planted failure of a request."""


class Planted:
    """What both doors share: when a request is done, and its answer."""

    def __init__(self, settings: argparse.Namespace) -> None:
        self.settings = settings
        self.random = random.Random(settings.seed)
        self.requests = 0
        self.served_ns = 0
        self.free_ns = 0
        self.under_way = 0
        self.known: Counter[bytes] = Counter()
        self.waiting: list[tuple[int, asyncio.Future[int]]] = []
        self.executing: asyncio.Task[None] | None = None

    async def infer(self, tensor: bytes, items: int) -> np.ndarray | None:
        """The outputs, not before the planted time is over; None for an answer without any. Raises `PlantedError`."""
        settings, now_ns = self.settings, time.monotonic_ns()
        self.requests += 1
        self.under_way += 1
        most, merged = self.under_way, items
        counted = self.requests - settings.good_first
        try:
            if counted > 0 and self.random.random() < settings.hollow_share:
                return None
            done_ns = self.done_ns(now_ns)
            if settings.cache_from:
                self.known[tensor] += 1
                if self.known[tensor] >= settings.cache_from:
                    done_ns -= int((done_ns - now_ns) * settings.cache_saves)
            if settings.merge:
                merged = await self.merged(items)
            else:
                await self.until(done_ns)
            most = max(most, self.under_way)
            self.served_ns += time.monotonic_ns() - now_ns
        finally:
            self.under_way -= 1
        if settings.error_every and counted > 0 and counted % settings.error_every == 0:
            raise PlantedError("the queue is full")
        rows = np.frombuffer(tensor, dtype="<f4").reshape(items, -1)
        answer = rows[:, :, None] * MATRIX[0] if settings.sequences else rows @ MATRIX
        answer = answer * np.float32(settings.scale)
        if (settings.wrong_batches and items > 1) or (items == settings.wrong_batch and counted > 0):
            answer = answer[::-1]
        length, longest = settings.fault_from_length, rows.shape[1]
        wrong = counted > 0 and most >= settings.fault_from and merged >= settings.fault_from_merged
        if settings.fault and wrong and longest >= length:
            answer = {"wrong": -answer, "zeros": 0 * answer, "nan": np.nan * answer}[settings.fault]
        if settings.short_every and counted > 0 and counted % settings.short_every == 0:
            answer = answer[..., : OUTPUTS * 3 // 4]
        return np.ascontiguousarray(answer, dtype="<f4")

    def batching(self) -> dict[str, object]:
        """The dynamic batcher in the configuration, where a queue delay is planted."""
        delay_us = int(self.settings.queue_delay_ms * 1000)
        return {"dynamic_batching": {"max_queue_delay_microseconds": delay_us}} if delay_us else {}

    def statistics(self) -> dict[str, object]:
        """Of requests that each wait in the queue for the whole delay and are executed for the rest."""
        queue_ns = int(self.requests * self.settings.queue_delay_ms * 1e6)
        times_ns = {"success": self.served_ns, "queue": queue_ns, "compute_infer": self.served_ns - queue_ns}
        counts = {name: {"count": self.requests, "ns": ns} for name, ns in times_ns.items()}
        model = {"name": MODEL, "version": "1", "inference_count": self.requests, "execution_count": self.requests}
        return {"model_stats": [{**model, "inference_stats": counts, "batch_stats": []}]}

    async def merged(self, items: int) -> int:
        """Wait for an execution together with the requests that wait by then; how many items it had."""
        executed: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.waiting.append((items, executed))
        if self.executing is None:
            self.executing = asyncio.ensure_future(self.execute())
        return await executed

    async def execute(self) -> None:
        """Execute what waits, up to `LARGEST` items at a time."""
        while self.waiting:
            together: list[tuple[int, asyncio.Future[int]]] = []
            size = 0
            while self.waiting and (not together or size + self.waiting[0][0] <= LARGEST):
                together.append(self.waiting.pop(0))
                size += together[-1][0]
            await self.until(self.done_ns(time.monotonic_ns()))
            for _, executed in together:
                executed.set_result(size)
        self.executing = None

    def done_ns(self, now_ns: int) -> int:
        """When a request that arrives now is done."""
        settings = self.settings
        delay_ms = settings.delay_ms + settings.queue_delay_ms
        if settings.cv:
            delay_ms = self.random.gammavariate(1 / settings.cv**2, delay_ms * settings.cv**2)
        if settings.tail_share and self.random.random() < settings.tail_share:
            delay_ms *= settings.tail_factor
        if self.under_way >= settings.crowded_from:
            delay_ms *= settings.crowded_factor
        if settings.drift:
            delay_ms *= 1.0 + settings.drift * (now_ns - settings.drift_from_ns) / 60e9
        done_ns = now_ns + int(delay_ms * 1e6)
        if settings.rate:
            self.free_ns = max(self.free_ns, now_ns) + int(1e9 / settings.rate)
            done_ns = max(done_ns, self.free_ns)
        if settings.stall_ms:
            every_ns, stall_ns = int(settings.stall_every_s * 1e9), int(settings.stall_ms * 1e6)
            into_ns = done_ns % every_ns
            if into_ns < stall_ns:
                done_ns += stall_ns - into_ns
        return done_ns

    async def until(self, moment_ns: int) -> None:
        """Return at the moment, not before."""
        spin_ns = 0 if self.settings.no_spin else SPIN_NS
        left_ns = moment_ns - time.monotonic_ns()
        if left_ns > spin_ns:
            await asyncio.sleep((left_ns - spin_ns) / 1e9)
        while not self.settings.no_spin and time.monotonic_ns() < moment_ns:
            pass


class HttpDoor(asyncio.Protocol):
    """HTTP/1.1, keep-alive, one request at a time on a connection."""

    def __init__(self, planted: Planted) -> None:
        self.planted = planted
        self.received = b""
        self.transport: asyncio.Transport | None = None
        self.used = False
        self.tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.received += data
        end = self.received.find(b"\r\n\r\n")
        if end < 0:
            return
        head = self.received[:end].decode("latin-1").lower()
        request_line, *lines = head.split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines)
        length = int(headers.get("content-length", "0"))
        if len(self.received) < end + 4 + length:
            return
        body, self.received = self.received[end + 4 : end + 4 + length], self.received[end + 4 + length :]
        method, path, _ = request_line.split(" ")
        task = asyncio.ensure_future(self.answer(method, path, headers, body))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def answer(self, method: str, path: str, headers: dict[str, str], body: bytes) -> None:
        documents = {
            "/v2": {"name": "planted", "version": "1.0", "extensions": ["binary_tensor_data"]},
            f"/v2/models/{MODEL}": SEQUENCES if self.planted.settings.sequences else METADATA,
            f"/v2/models/{MODEL}/config": {"name": MODEL, "max_batch_size": LARGEST, **self.planted.batching()},
        }
        if self.planted.settings.queue_delay_ms:
            documents[f"/v2/models/{MODEL}/stats"] = self.planted.statistics()
        if method == "post" and path == f"/v2/models/{MODEL}/infer":
            json_bytes = int(headers["inference-header-content-length"])
            try:
                items = json.loads(body[:json_bytes])["inputs"][0]["shape"][0]
                answer = await self.planted.infer(body[json_bytes:], items)
                if not self.used:
                    await asyncio.sleep(self.planted.settings.first_ms / 1000)
                self.used = True
            except PlantedError as exc:
                self.send(503, json.dumps({"error": str(exc)}).encode())
                return
            if answer is None:
                self.send(200, b"{}")
                return
            data = answer.tobytes()
            output = {"name": "y", "datatype": "FP32", "shape": list(answer.shape),
                      "parameters": {"binary_data_size": len(data)}}  # fmt: skip
            text = json.dumps({"model_name": MODEL, "model_version": "1", "outputs": [output]}).encode()
            await self.send_slowly(text + data, f"Inference-Header-Content-Length: {len(text)}\r\n")
        elif path in ("/v2/health/live", "/v2/health/ready", f"/v2/models/{MODEL}/ready"):
            self.send(200, b"")
        elif path in documents:
            self.send(200, json.dumps(documents[path]).encode())
        else:
            self.send(404, b'{"error": "no such route"}')

    def send(self, status: int, content: bytes, extra: str = "") -> None:
        assert self.transport is not None
        head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(content)}\r\n{extra}\r\n".encode()
        self.transport.write(head + content)

    async def send_slowly(self, content: bytes, extra: str) -> None:
        if not self.planted.settings.slow_body_ms:
            self.send(200, content, extra)
            return
        assert self.transport is not None
        start_ns, pieces = time.monotonic_ns(), 4
        head = f"HTTP/1.1 200 X\r\nContent-Length: {len(content)}\r\n{extra}\r\n".encode()
        size = math.ceil(len(content) / pieces)
        self.transport.write(head + content[:size])
        for piece in range(1, pieces):
            share = piece / (pieces - 1)
            await self.planted.until(start_ns + int(share * self.planted.settings.slow_body_ms * 1e6))
            self.transport.write(content[piece * size : (piece + 1) * size])


class GrpcDoor(grpc.GenericRpcHandler):  # type: ignore[misc]
    """ModelInfer alone: everything else is asked over HTTP."""

    def __init__(self, planted: Planted) -> None:
        self.planted = planted

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        if details.method != "/inference.GRPCInferenceService/ModelInfer":
            return None
        return grpc.unary_unary_rpc_method_handler(
            self.infer,
            request_deserializer=service_pb2.ModelInferRequest.FromString,
            response_serializer=service_pb2.ModelInferResponse.SerializeToString,
        )

    async def infer(self, request: service_pb2.ModelInferRequest, context: grpc.aio.ServicerContext):
        try:
            outputs = await self.planted.infer(request.raw_input_contents[0], request.inputs[0].shape[0])
        except PlantedError as exc:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(exc))
        answer = service_pb2.ModelInferResponse(model_name=MODEL, model_version="1")
        if outputs is not None:
            answer.raw_output_contents.append(outputs.tobytes())
            answer.outputs.add(name="y", datatype="FP32", shape=outputs.shape)
        return answer


async def serve(settings: argparse.Namespace) -> None:
    planted, loop, stop = Planted(settings), asyncio.get_running_loop(), asyncio.Event()
    listener = await loop.create_server(lambda: HttpDoor(planted), "127.0.0.1", 0)
    door = grpc.aio.server(handlers=(GrpcDoor(planted),))
    grpc_port = door.add_insecure_port("127.0.0.1:0")
    await door.start()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    sys.stdout.write(f"{listener.sockets[0].getsockname()[1]} {grpc_port}\n")
    sys.stdout.flush()
    await stop.wait()
    await door.stop(None)
    listener.close()


if __name__ == "__main__":
    asyncio.run(serve(options(sys.argv[1:])))
