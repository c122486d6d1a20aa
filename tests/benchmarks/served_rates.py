"""Images per second and latency of servers side by side, by NVIDIA's perf_analyzer.

    python -m tests.benchmarks.served_rates --server-cores 0-7 --client-cores 8-15 --out rates.json \
        "native http=8100 grpc=8101: serve native --payloads uint8,fp32 --allow-shared-memory" \
        "triton http=8000 grpc=8001: serve triton --payloads uint8,fp32"

Each server is an `abserve` command with the ports that it was told. All run at the same time, one is loaded at a time,
and rounds alternate between them. Figures are medians over rounds; a ratio is the median of the rounds' ratios, with
the least and the greatest. The file also has what the server did during each measurement: the rows of its batches, the
mean time of its stages, and the cores that each of its processes kept busy. The client opens one gRPC channel per user,
for every server: by default perf_analyzer shares a channel between six, and a connection is what one processor core can
copy.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from tests.perf_analyzer import PerfAnalyzer, find_perf_analyzer

START_S = 180
MEASURE_S = 30
MODELS = {"uint8": "openclip_vit_b32_uint8", "fp32": "openclip_vit_b32"}
TRANSPORTS = ("http", "grpc", "http shm", "http cuda")


@dataclass(frozen=True)
class Rate:
    """What one measurement found."""

    images_per_s: float
    p50_ms: float
    rows_per_batch: float
    stages_us: Mapping[str, float]
    """Mean by stage; empty for a server that does not say."""
    busy_cores: Sequence[float]
    """Of each process of the server, the busiest first."""


@dataclass(frozen=True)
class Server:
    """One to be started: `NAME http=PORT grpc=PORT: COMMAND`."""

    name: str
    http: str
    grpc: str
    command: list[str]

    @classmethod
    def parse(cls, text: str) -> Server:
        """Raises `ValueError`."""
        found = re.fullmatch(r"(\w+) http=(\d+)(?: grpc=(\d+))?: (.+)", text)
        if found is None:
            raise ValueError(f"write NAME http=PORT grpc=PORT: COMMAND, not {text!r}")
        ports = ["--http-port", found[2], *(["--grpc-port", found[3]] if found[3] else [])]
        return cls(found[1], found[2], found[3] or "", [*found[4].split(), *ports])

    def start(self, cores: str, log: Path) -> subprocess.Popen[bytes]:
        with log.open("wb") as out:
            return subprocess.Popen(
                ["taskset", "-c", cores, sys.executable, "-P", "-m", "loadgen.entry", *self.command],
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def wait_ready(self, process: subprocess.Popen[bytes], log: Path) -> float:
        """Seconds until it was ready. Raises `RuntimeError`."""
        started = time.monotonic()
        while time.monotonic() - started < START_S and process.poll() is None:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.http}/v2/health/ready", timeout=5).close()
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
            else:
                return time.monotonic() - started
        raise RuntimeError(f"{self.name} is not ready:\n{log.read_text()[-2000:]}")


def arguments_of(server: Server, transport: str, model: str, clients: int, batch: int) -> list[str]:
    """perf_analyzer's."""
    protocol, _, memory = transport.partition(" ")
    port = server.grpc if protocol == "grpc" else server.http
    shared = {"": [], "shm": ["--shared-memory", "system"], "cuda": ["--shared-memory", "cuda"]}[memory]
    load = ["--concurrency-range", str(clients), "--max-threads", str(clients), "-b", str(batch)]
    return ["-m", model, "-i", protocol, "-u", f"127.0.0.1:{port}", *load, *shared]


def statistics_of(server: Server, model: str) -> dict[str, Any]:
    """What the server has counted so far."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.http}/v2/models/{model}/stats", timeout=5) as answer:
        counted: dict[str, Any] = json.load(answer)["model_stats"][0]
    return counted


def cpu_seconds(process: subprocess.Popen[bytes]) -> dict[int, float]:
    """By process of the server's."""
    own = psutil.Process(process.pid)
    return {one.pid: sum(one.cpu_times()[:2]) for one in (own, *own.children(recursive=True))}


def watched(
    analyzer: PerfAnalyzer, cores: str, interval_ms: int, arguments: list[str], server: Server, process: Any
) -> Rate:
    """One measurement, and what the server did during it. Raises `RuntimeError`."""
    model = arguments[arguments.index("-m") + 1]
    before, cpu, begun = statistics_of(server, model), cpu_seconds(process), time.monotonic()
    images_per_s, p50_ms = measure(analyzer, cores, interval_ms, arguments)
    seconds, after = time.monotonic() - begun, statistics_of(server, model)
    batches = after["execution_count"] - before["execution_count"]
    rows = (after["inference_count"] - before["inference_count"]) / batches if batches else 0.0
    stages = {}
    for name, now in after.get("abserve_stages", {}).items():
        then = before["abserve_stages"][name]
        if now["count"] > then["count"]:
            stages[name] = round((now["ns"] - then["ns"]) / (now["count"] - then["count"]) / 1000, 1)
    used = [round((now - cpu.get(pid, 0.0)) / seconds, 2) for pid, now in cpu_seconds(process).items()]
    return Rate(images_per_s, p50_ms, round(rows, 1), stages, sorted(used, reverse=True))


def measure(analyzer: PerfAnalyzer, cores: str, interval_ms: int, arguments: list[str]) -> tuple[float, float]:
    """Images per second and the median latency in ms. Raises `RuntimeError`."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.csv"
        window = ["--measurement-interval", str(interval_ms), "-s", "999", "-r", "3", "-f", str(report)]
        try:
            done = subprocess.run(
                ["taskset", "-c", cores, str(analyzer.binary), *arguments, *window],
                env={**analyzer.environment, "TRITON_CLIENT_GRPC_CHANNEL_MAX_SHARE_COUNT": "1"},
                capture_output=True,
                text=True,
                timeout=MEASURE_S,
            )
        except subprocess.TimeoutExpired as exc:
            raise RuntimeError(f"not measured within {MEASURE_S} s") from exc
        if not report.exists():
            raise RuntimeError((done.stderr or done.stdout).strip().splitlines()[-1])
        row = next(csv.DictReader(report.open()))
    return float(row["Inferences/Second"]), float(row["p50 latency"]) / 1000


def table(servers: Sequence[str], found: Mapping[tuple[str, ...], Mapping[str, Sequence[Rate | None]]]) -> str:
    """Markdown, with ratios of the first server to the others."""
    first, *others = servers
    heads = [f"{name}, images/s (p50 ms)" for name in servers] + [f"{first} ÷ {other}" for other in others]
    lines = ["| Payload | Transport | Clients × images | " + " | ".join(heads) + " |", "|---" * (3 + len(heads)) + "|"]
    for row, rates in found.items():
        known = {name: [one for one in rates[name] if one is not None] for name in servers}
        cells = [
            f"{median(one.images_per_s for one in own):,.0f} ({median(one.p50_ms for one in own):.2f})" if own else "–"
            for own in known.values()
        ]
        for other in others:
            pairs = zip(rates[first], rates[other], strict=True)
            ratios = sorted(
                own.images_per_s / its.images_per_s for own, its in pairs if own is not None and its is not None
            )
            cells.append(f"{median(ratios):.2f} ({ratios[0]:.2f}–{ratios[-1]:.2f})" if ratios else "–")
        lines.append("| " + " | ".join((*row, *cells)) + " |")
    return "\n".join(lines)


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="+", type=Server.parse)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--interval-ms", type=int, default=1000)
    parser.add_argument("--payloads", default=",".join(MODELS))
    parser.add_argument("--transports", default=",".join(TRANSPORTS))
    parser.add_argument(
        "--loads",
        default="1x1,64x1,4x32",
        help="clients x images, each by all transports or by its own: http 64x1,http shm 24x64",
    )
    parser.add_argument("--server-cores", default="0-7")
    parser.add_argument("--client-cores", default="8-15")
    parser.add_argument("--out", type=Path, default=Path("served-rates.json"))
    given = parser.parse_args()
    analyzer = find_perf_analyzer()
    found: dict[tuple[str, ...], dict[str, list[Rate | None]]] = {}
    processes = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            logs = {server.name: Path(folder) / f"{server.name}.log" for server in given.servers}
            for server in given.servers:
                processes.append(server.start(given.server_cores, logs[server.name]))
            for server, process in zip(given.servers, processes, strict=True):
                say(f"{server.name} ready after {server.wait_ready(process, logs[server.name]):.1f} s")
            loads = [
                (transport, load)
                for own, _, load in (one.rpartition(" ") for one in given.loads.split(","))
                for transport in ([own] if own else given.transports.split(","))
            ]
            rows = product(given.payloads.split(","), loads, range(given.rounds))
            for payload, (transport, load), number in rows:
                clients, batch = map(int, load.split("x"))
                pairs = list(zip(given.servers, processes, strict=True))
                for server, process in pairs if number % 2 == 0 else reversed(pairs):
                    arguments = arguments_of(server, transport, MODELS[payload], clients, batch)
                    rates = found.setdefault((payload, transport, load), {}).setdefault(server.name, [])
                    try:
                        rates.append(
                            watched(analyzer, given.client_cores, given.interval_ms, arguments, server, process)
                        )
                    except RuntimeError as error:
                        rates.append(None)
                        say(f"{server.name} {payload} {transport} {load}: {error}")
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait(60)
    say(table([server.name for server in given.servers], found))
    runs = [
        {
            **dict(zip(("payload", "transport", "load"), row, strict=True)),
            **{name: [None if one is None else asdict(one) for one in of_server] for name, of_server in rates.items()},
        }
        for row, rates in found.items()
    ]
    taken = datetime.now(UTC).isoformat(timespec="seconds")
    given.out.write_text(json.dumps({"taken": taken, "arguments": sys.argv[1:], "runs": runs}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
