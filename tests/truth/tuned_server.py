"""Stands in for `abserve` with servers whose speed is a known function of their settings: `time_ms`.

`serve TARGET … --print-space` prints what can be tuned, `--print-launch` the command of a server, which is this program
again with `listen`. Every start of a server but litserve's is a little slower or faster than the last, as of real ones.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import signal
import sys
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path

import numpy as np

MODEL, FEATURES, OUTPUTS, LARGEST = "planted", 16, 4, 64
MATRIX = np.random.default_rng(0).standard_normal((FEATURES, OUTPUTS)).astype("<f4")
BASE_MS, START_SPREAD = 24.0, 0.005
SETTINGS: dict[str, tuple[str, ...]] = {
    "engine": ("torch", "onnx"),
    "workers": ("1", "2", "4"),
    "batch": ("4", "8", "16"),
    "mode": ("eager", "graphs"),
    "arithmetic": ("exact", "fast"),
    "allocator": ("libc", "arena"),
}
"""Each with its default first. A server also takes the arithmetic racy, which is wrong after `GOOD_FIRST` answers."""
ORDERED = ("workers", "batch")
OF_TRITON = ("engine", "workers", "batch")
WHEN = {"mode": {"engine": ["torch"]}}
DIES = {"allocator": "arena", "workers": "4"}
"""A server with both does not start."""
LANES_MS = {"1": 12.0, "2": 24.0, "4": 32.0}
"""Of the target fastapi: by how many requests it works on at once, the default 2, the time of each. One lane is best
for one user, four are for eight, and one loses least over both."""
LITSERVE_MS, ALIKE = 20.0, ("a", "b", "c")
"""Of the target litserve: the time of a request in two lanes, and the values of a setting that changes nothing."""
GOOD_FIRST = 110
"""Answers of racy arithmetic that are right: those of parity and warm-up."""


def time_ms(target: str, given: Mapping[str, str]) -> float:
    """The time of a request. onnx, 4 workers and batch 16 pay together; two of them pay little, and one alone costs.
    torch with 4 workers falls off a cliff. The allocator changes nothing; fast arithmetic is fast and wrong."""
    chosen = {name: values[0] for name, values in SETTINGS.items()} | dict(given)
    onnx = chosen["engine"] == "onnx"
    together = onnx + (chosen["workers"] == "4") + (chosen["batch"] == "16")
    factor = (1.0, 1.04, 0.97, 0.75)[together]
    factor *= {"1": 1.0, "2": 0.96, "4": 1.0 if onnx else 1.9}[chosen["workers"]]
    factor *= {"4": 1.0, "8": 0.97, "16": 1.0}[chosen["batch"]]
    if not onnx:
        factor *= {"eager": 1.0, "graphs": 0.93}[chosen["mode"]]
    factor *= {"exact": 1.0, "fast": 0.5, "racy": 0.6}[chosen["arithmetic"]]
    return BASE_MS * factor * (1.15 if target == "triton" else 1.0)


def right(given: Mapping[str, str]) -> bool:
    """Whether a server with these settings starts and answers rightly."""
    dies = all(given.get(name) == value for name, value in DIES.items())
    return given.get("arithmetic", "exact") == "exact" and not dies


def best_ms(target: str) -> float:
    """The shortest time of a server that is right."""
    return min(time_ms(target, given) for given in every(target) if right(given))


def every(target: str) -> Iterator[dict[str, str]]:
    names = SETTINGS if target == "native" else OF_TRITON
    for values in product(*(SETTINGS[name] for name in names)):
        yield dict(zip(names, values, strict=True))


def space(target: str) -> dict[str, object]:
    if target in ("fastapi", "litserve"):
        tried = ("lanes", "2", [*LANES_MS]) if target == "fastapi" else ("alike", ALIKE[0], ALIKE)
        plain = dict(zip(("name", "default", "values"), tried, strict=True))
        return {"target": target, "settings": [plain | {"by_load": True}]}
    names = SETTINGS if target == "native" else OF_TRITON
    settings = [
        {"name": name, "default": SETTINGS[name][0], "values": SETTINGS[name], "ordered": name in ORDERED,
         "when": WHEN.get(name, {})}
        for name in names
    ]  # fmt: skip
    return {"target": target, "settings": settings}


class Server:
    """HTTP/1.1 with the routes that a run asks."""

    def __init__(self, given: Mapping[str, str], target: str) -> None:
        self.arithmetic = given.get("arithmetic", "exact")
        plain_ms = {"fastapi": LANES_MS[given["lanes"]], "litserve": LITSERVE_MS}
        self.delay_s = plain_ms.get(target, time_ms(target, given)) / 1e3
        if target != "litserve":
            self.delay_s *= math.exp(random.gauss(0.0, START_SPREAD))
        lanes = {"fastapi": int(given["lanes"]), "litserve": 2}
        self.lanes = asyncio.Semaphore(lanes.get(target, 1000))
        self.answered = 0

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
                request_line, *lines = head.split("\r\n")
                headers = dict(line.split(": ", 1) for line in lines if line)
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                method, path, _ = request_line.split(" ")
                status, extra, content = await self.answer(method, path, headers, body)
                writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(content)}\r\n{extra}\r\n".encode() + content)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            writer.close()

    async def answer(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, str, bytes]:
        model = f"/v2/models/{MODEL}"
        if method == "post" and path == f"{model}/infer":
            return await self.infer(headers, body)
        documents: dict[str, object] = {
            "/v2": {"name": "planted", "version": "1.0", "extensions": ["binary_tensor_data"]},
            model: {
                "name": MODEL, "versions": ["1"], "platform": "planted",
                "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, FEATURES]}],
                "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, OUTPUTS]}],
            },
            f"{model}/config": {
                "name": MODEL, "max_batch_size": LARGEST, "parameters": {"device": {"string_value": "cpu"}},
            },
        }  # fmt: skip
        if path in documents:
            return 200, "", json.dumps(documents[path]).encode()
        return (200 if path.endswith(("/live", "/ready")) else 404), "", b""

    async def infer(self, headers: dict[str, str], body: bytes) -> tuple[int, str, bytes]:
        async with self.lanes:
            await asyncio.sleep(self.delay_s)
        self.answered += 1
        length = int(headers["inference-header-content-length"])
        shape = json.loads(body[:length])["inputs"][0]["shape"]
        answer = np.frombuffer(body, dtype="<f4", offset=length).reshape(shape) @ MATRIX
        if self.arithmetic == "fast" or (self.arithmetic == "racy" and self.answered > GOOD_FIRST):
            answer = 1.1 * answer
        data = np.ascontiguousarray(answer, dtype="<f4").tobytes()
        output = {"name": "y", "datatype": "FP32", "shape": list(answer.shape),
                  "parameters": {"binary_data_size": len(data)}}  # fmt: skip
        text = json.dumps({"model_name": MODEL, "model_version": "1", "outputs": [output]}).encode()
        return 200, f"Inference-Header-Content-Length: {len(text)}\r\n", text + data


async def listen(port: int, server: Server) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    listener = await asyncio.start_server(server.connection, "127.0.0.1", port)
    await stop.wait()
    listener.close()


def write_samples(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "x.fp32.npy", np.random.default_rng(4).standard_normal((8, FEATURES), dtype="<f4"))
    manifest = {"schema": "abserve.samples/2", "kind": "random values", "item": "item", "count": 8,
                "kinds": {"y": "embedding"}}  # fmt: skip
    (folder / "samples.json").write_text(json.dumps(manifest))


def main(argv: list[str]) -> None:
    command, *rest = argv
    if command == "samples":
        write_samples(Path(rest[rest.index("--out") + 1]))
        return
    if command == "export":
        return
    target, *options = rest
    parser = argparse.ArgumentParser()
    parser.add_argument("--http-port", type=int, default=0)
    parser.add_argument("--print-launch", action="store_true")
    parser.add_argument("--print-space", action="store_true")
    for name, values in SETTINGS.items():
        parser.add_argument(f"--{name}", choices=[*values, "racy"], default=values[0])
    parser.add_argument("--lanes", choices=[*LANES_MS], default="2")
    parser.add_argument("--alike", choices=ALIKE, default=ALIKE[0])
    asked, _ = parser.parse_known_args(options)
    given = {name: getattr(asked, name) for name in (*SETTINGS, "lanes", "alike")}
    if asked.print_space:
        sys.stdout.write(json.dumps(space(target)) + "\n")
    elif asked.print_launch:
        url = f"http://127.0.0.1:{asked.http_port}"
        chosen = [f"--{name}={value}" for name, value in given.items()]
        argv = [sys.executable, __file__, "listen", target, f"--http-port={asked.http_port}", *chosen]
        tuning = {"lanes": given["lanes"]} if target == "fastapi" and given["lanes"] != "2" else {}
        plan = {"argv": argv, "env": {}, "http_url": url, "model": MODEL, "title": target, "tuning": tuning}
        sys.stdout.write(json.dumps(plan) + "\n")
    elif all(given[name] == value for name, value in DIES.items()):
        sys.exit("the allocator has no room for 4 workers")
    else:
        asyncio.run(listen(asked.http_port, Server(given, target)))


if __name__ == "__main__":
    main(sys.argv[1:])
