"""A small server of the Open Inference Protocol with no model, whose faults are programmable.

Run as a program it listens on one port; it also stands in for `abserve serve … --print-launch`, `abserve samples`,
`abserve export` and `abserve engine`. Its embedding is a fixed function of each image, so parity between two of them
holds unless `--wrong-batches` or `--wrong` says otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import ssl
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np

# Beside this file: it is run as a program.
from fake_commands import SIDE, measure_engine, write_samples  # type: ignore[import-not-found]

MODEL = "openclip_vit_b32"


def options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", nargs="?")
    parser.add_argument("--http-port", type=int, default=0)
    parser.add_argument("--grpc-port")
    parser.add_argument("--metrics-port")
    parser.add_argument("--work-dir")
    parser.add_argument("--weights")
    parser.add_argument("--threads")
    parser.add_argument("--precision", help="taken, and not used")
    parser.add_argument("--pad-to", help="taken, and not used")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--side", type=int, default=SIDE, help="pixels on each side of an image")
    parser.add_argument("--also", help="a second model that is listed, and is the first under another name")
    parser.add_argument("--print-launch", action="store_true")
    parser.add_argument("--otherwise", help="a first start chooses otherwise than the later ones")
    parser.add_argument("--startup-ms", type=float, default=0)
    parser.add_argument("--delay-ms", type=float, default=3, help="leaves cores to others while a load lasts")
    parser.add_argument("--slots", type=int, default=0, help="requests under way at once; others wait. 0: no limit")
    parser.add_argument("--handicap-ms", type=float, default=0, help="of every inference; a setting that tunes it")
    parser.add_argument("--harmless", help="a setting that tunes it and does nothing; die-without, die-alone: a crash")
    parser.add_argument("--tuning", default="all", help="all, none, or one of these two settings")
    parser.add_argument("--max-queue-delay-us", type=float, help="waited by every request; it says 2000 without it")
    parser.add_argument("--engine", default="fake", help="null: no --delay-ms")
    parser.add_argument("--allow-shared-memory", action="store_true", help="taken, and not offered")
    parser.add_argument("--stall-ms", type=float, default=0, help="at the start of every second nothing is answered")
    parser.add_argument("--drop-every", type=int, default=0, help="close without an answer, every Nth inference")
    parser.add_argument("--error-every", type=int, default=0, help="503, every Nth inference")
    parser.add_argument("--error-above", type=int, default=0, help="503 with more than so many inferences under way")
    parser.add_argument("--latin1", action="store_true", help="words of those 503 are no UTF-8")
    parser.add_argument(
        "--hollow-every", type=int, default=0, help="200 without the output's bytes, every Nth inference"
    )
    parser.add_argument("--good-first", type=int, default=0, help="inferences before any drop or error")
    parser.add_argument("--die-after", type=int, default=0, help="exit at once at the Nth inference")
    parser.add_argument("--wrong", action="store_true", help="another function altogether")
    parser.add_argument("--wrong-batches", action="store_true", help="rows of a batch are mixed up")
    parser.add_argument("--empty", action="store_true", help="200 with an empty tensor")
    parser.add_argument("--crash", action="store_true", help="die before listening")
    parser.add_argument("--ignore-sigterm", action="store_true")
    parser.add_argument("--no-stats", action="store_true")
    parser.add_argument("--close", action="store_true", help="the connection, with every answer to an inference")
    parser.add_argument("--device", default="cpu", help="what it says that it executes on")
    parser.add_argument("--cpu-burn-ms", type=float, default=0, help="of work in every inference on the device cpu")
    parser.add_argument("--tell-engine", help="what it says that it executes with; see `measure_engine`")
    parser.add_argument("--lies", type=Path, help="JSON: path → [body, status, after so many inferences]")
    parser.add_argument("--tls", type=Path, help="speak TLS with this certificate and its key")
    parser.add_argument("--client-ca", type=Path, help="want a client certificate of this authority")
    parser.add_argument("--want-header", help="NAME=VALUE: 401 without it")
    parser.add_argument("--version", help="the only version, also under /versions/…; without it there are no versions")
    parser.add_argument("--children", type=int, default=0, help="child processes that just sleep")
    settings = parser.parse_args(argv)
    if settings.tuning not in ("all", "handicap-ms"):
        settings.handicap_ms = 0.0
    settings.crash |= (settings.tuning, settings.harmless) in (("none", "die-without"), ("harmless", "die-alone"))
    if settings.tuning not in ("all", "harmless"):
        settings.harmless = None
    settings.model = {"open_clip:ViT-B-32": MODEL}.get(settings.model, settings.model)
    return settings


def embed(pixels: np.ndarray) -> np.ndarray:
    coarse = pixels[:, :, ::4, ::4].reshape(len(pixels), -1)[:, :512]
    padded = np.zeros((len(pixels), 512), "<f4")
    padded[:, : coarse.shape[1]] = coarse
    return padded


def first_start() -> bool:
    """Whether this start finds no choice of an earlier one."""
    folder = os.environ.get("ABSERVE_PLANS_FOLDER")
    return folder is not None and not (Path(folder) / "choice.json").exists()


def gpu_info(device: str) -> dict | None:
    """What a server that executes on `device` says of itself; this one does whatever the option says."""
    if device == "cpu":
        return None
    return {
        "status": "ok",
        "runtime": {
            "kind": "torch",
            "used_device_uuid": "GPU-5c719ed0-0000-0000-0000-000000000000",
            "placement": {"result": "gpu", "params_by_device": {device: 1}},
            "kernel_probe": {"kernel_count": 9},
        },
    }


class FakeServer:
    def __init__(self, settings: argparse.Namespace) -> None:
        self.settings = settings
        self.started = time.monotonic()
        self.inferences = 0
        self.under_way = 0
        self.slots = asyncio.Semaphore(settings.slots) if settings.slots else None
        self.batches: Counter[int] = Counter()
        self.lies = {} if settings.lies is None else json.loads(settings.lies.read_text())
        self.log: list[str] = []

    @property
    def ready(self) -> bool:
        return (time.monotonic() - self.started) * 1000 >= self.settings.startup_ms

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                try:
                    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                except (asyncio.IncompleteReadError, ConnectionError):
                    return
                request_line, *lines = head.split("\r\n")
                headers = dict(line.lower().split(": ", 1) for line in lines if line)
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                method, path, _ = request_line.split(" ")
                answer = await self.answer(method, path, headers, body)
                if answer is None:
                    return
                status, extra, content = answer
                text = f"HTTP/1.1 {status} X\r\nContent-Length: {len(content)}\r\n"
                closes = self.settings.close and path.endswith("/infer")
                text += "Connection: close\r\n" if closes else ""
                writer.write((text + "".join(f"{k}: {v}\r\n" for k, v in extra.items()) + "\r\n").encode() + content)
                await writer.drain()
                if closes:
                    return
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def answer(self, method: str, path: str, headers: dict, body: bytes):
        if self.settings.want_header:
            name, _, value = self.settings.want_header.lower().partition("=")
            if headers.get(name) != value:
                return 401, {}, json.dumps({"error": f"no {name}"}).encode()
        if self.settings.version:
            path = path.replace(f"/versions/{self.settings.version}", "")
        if self.settings.also:
            path = path.replace(f"/v2/models/{self.settings.also}", f"/v2/models/{self.settings.model}")
        if path in self.lies:
            text, status, first_inference = self.lies[path]
            if self.inferences >= first_inference:
                return status, {}, text.encode()
        model, side = f"/v2/models/{self.settings.model}", self.settings.side
        if method == "POST" and path == f"{model}/infer":
            return await self.infer(headers, body)
        documents = {
            "/v2": {"name": "fake", "version": "1.0", "extensions": ["binary_tensor_data", "statistics"]},
            model: {
                "name": self.settings.model,
                "versions": ["1"],
                "platform": "fake",
                "inputs": [{"name": "pixel_values", "datatype": "FP32", "shape": [-1, 3, side, side]}],
                "outputs": [{"name": "embedding", "datatype": "FP32", "shape": [-1, 512]}],
            },
            f"{model}/config": {
                "name": self.settings.model,
                "max_batch_size": 32,
                "dynamic_batching": {"max_queue_delay_microseconds": self.queue_delay()},
                "parameters": {
                    "device": {"string_value": self.settings.device},
                    "precision": {"string_value": "fp32"},
                    **({"engine": {"string_value": self.settings.tell_engine}} if self.settings.tell_engine else {}),
                },
            },
            "/gpu-info": gpu_info(self.settings.device),
            f"{model}/stats": None if self.settings.no_stats else {"model_stats": [self.statistics()]},
        }
        if path == "/v2/health/live":
            return 200, {}, b""
        if path in ("/v2/health/ready", f"{model}/ready"):
            return (200 if self.ready else 503), {}, b""
        if method == "GET" and documents.get(path) is not None:
            return 200, {"Content-Type": "application/json"}, json.dumps(documents[path]).encode()
        if method == "POST" and path == "/v2/repository/index":
            names = filter(None, (self.settings.model, self.settings.also))
            return 200, {}, json.dumps([{"name": name, "version": "1", "state": "READY"} for name in names]).encode()
        return 404, {}, b'{"error": "no such route or model"}'

    async def infer(self, headers: dict, body: bytes):
        self.under_way += 1
        try:
            if self.settings.error_above and self.under_way > self.settings.error_above:
                return 503, {}, b'{"error": "too many at once"}'
            return await self.answer_to(headers, body)
        finally:
            self.under_way -= 1

    async def answer_to(self, headers: dict, body: bytes):
        self.inferences += 1
        settings, number = self.settings, self.inferences
        if settings.die_after and number >= settings.die_after:
            os._exit(9)
        if settings.cpu_burn_ms and settings.device == "cpu":
            until = time.monotonic() + settings.cpu_burn_ms / 1000
            while time.monotonic() < until:
                pass
        into_second = (time.monotonic() - self.started) % 1.0
        if into_second < settings.stall_ms / 1000:
            await asyncio.sleep(settings.stall_ms / 1000 - into_second)
        if settings.handicap_ms:
            await asyncio.sleep(settings.handicap_ms / 1e3)
        if settings.max_queue_delay_us:
            await asyncio.sleep(settings.max_queue_delay_us / 1e6)
        if settings.delay_ms and settings.engine != "null":
            async with self.slots or contextlib.nullcontext():
                await asyncio.sleep(settings.delay_ms / 1000)
        number = max(0, number - settings.good_first)
        if number and settings.drop_every and number % settings.drop_every == 0:
            return None
        if number and settings.error_every and number % settings.error_every == 0:
            repeated = f" for {headers['authorization']}" if "authorization" in headers else ""
            words = f'{{"error": "the queue is full{repeated}"}}'.encode()
            return 503, {}, b'{"error": "zu sp\xe4t"}' if settings.latin1 else words
        length = int(headers["inference-header-content-length"])
        shape = json.loads(body[:length])["inputs"][0]["shape"]
        pixels = np.frombuffer(body, dtype="<f4", offset=length).reshape(shape)
        self.batches[len(pixels)] += 1
        answer = embed(pixels)
        if settings.wrong:
            answer = -answer
        if settings.wrong_batches and len(answer) > 1:
            answer = answer[::-1]
        if settings.empty:
            answer = answer[:0]
        if number and settings.hollow_every and number % settings.hollow_every == 0:
            answer = answer[:0]
        data = answer.tobytes()
        output = {
            "name": "embedding",
            "datatype": "FP32",
            "shape": list(answer.shape),
            "parameters": {"binary_data_size": len(data)},
        }
        text = json.dumps({"model_name": settings.model, "model_version": "1", "outputs": [output]}).encode()
        return 200, {"Inference-Header-Content-Length": str(len(text))}, text + data

    def queue_delay(self) -> str:
        told = self.settings.max_queue_delay_us
        return "2000" if told is None else f"{told:.0f}"

    def statistics(self) -> dict:
        count = sum(self.batches.values())
        duration = {"count": count, "ns": count * 1000}
        return {
            "name": self.settings.model,
            "version": "1",
            "inference_count": sum(size * number for size, number in self.batches.items()),
            "execution_count": count,
            "inference_stats": {
                "success": duration,
                "fail": {"count": self.inferences - count, "ns": 0},
                "queue": duration,
                "compute_input": duration,
                "compute_infer": duration,
                "compute_output": duration,
            },
            "batch_stats": [{"batch_size": s, "compute_infer": {"count": n, "ns": n}} for s, n in self.batches.items()],
        }


def tls(settings: argparse.Namespace) -> ssl.SSLContext | None:
    if settings.tls is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(settings.tls)
    if settings.client_ca is not None:
        context.load_verify_locations(settings.client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


async def listen(settings: argparse.Namespace) -> None:
    server = FakeServer(settings)
    listener = await asyncio.start_server(
        server.connection, "127.0.0.1", settings.http_port, limit=2**26, ssl=tls(settings)
    )
    stop = asyncio.Event()
    if settings.ignore_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    port = listener.sockets[0].getsockname()[1]
    sys.stdout.write(f"listening on {port}\n")
    sys.stdout.flush()
    await stop.wait()
    os._exit(0)


def main(argv: list[str]) -> None:
    if argv[:1] == ["engine"]:
        measure_engine(argv[1:])
        return
    if argv[:1] == ["samples"]:
        write_samples(Path(argv[argv.index("--out") + 1]))
        return
    if argv[:1] == ["export"]:
        sys.stdout.write("exported nothing\n")
        return
    argv = argv[1:] if argv[:1] == ["serve"] else argv
    settings = options(argv)
    if settings.print_launch:
        plan = {
            "schema": "abserve.launch/1",
            "argv": [sys.executable, __file__, *[part for part in argv if part != "--print-launch"]],
            "env": {},
            "http_url": f"http://127.0.0.1:{settings.http_port}",
            "grpc_address": None,
            "metrics_url": "",
            "model": settings.model,
            "title": f"fake {settings.kind}{' otherwise' if settings.otherwise and first_start() else ''}",
            "tuning": {
                **({"handicap-ms": str(settings.handicap_ms)} if settings.handicap_ms else {}),
                **({"harmless": settings.harmless} if settings.harmless else {}),
            },
        }
        sys.stdout.write(json.dumps(plan) + "\n")
        return
    if settings.crash:
        sys.stderr.write("cannot open the model\n")
        sys.exit(3)
    import subprocess

    if plans := os.environ.get("ABSERVE_PLANS_FOLDER"):
        Path(plans).mkdir(parents=True, exist_ok=True)
        (Path(plans) / "choice.json").touch()
    sys.stderr.write("start import_s=0.01 load_s=0.02\n")
    for _ in range(settings.children):
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    asyncio.run(listen(settings))


if __name__ == "__main__":
    main(sys.argv[1:])
