"""Prints where the time of served steps goes on a GPU: the device, the engine's host, its loop, front ends, clients.

python -m tests.gpu.language.profile_serving language:tinyllama-1.1b --fronts 1,2,4

Each line is one JSON object: the cost of steps by rows and tokens of prompts; the engine alone, driven as so many users
drive it; then a server for each number of front ends under the same load, with its engine's steps; at last the longest
gaps while long prompts arrive.
"""

from __future__ import annotations

import argparse
import gc
import http.client
import json
import multiprocessing
import os
import random
import resource
import select
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from servers.language.engine import Emission, GenerationRequest, GenerationSettings
from servers.language.slots import SlotsEngine, _Flight
from servers.language.specification import LanguageModel, language_model
from servers.native.shared.settings import NativeSettings
from servers.options.command_line import from_argument, to_argument
from servers.options.launch import bind

CLIENTS = 4
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


def say(**line: Any) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


class TimedEngine(SlotsEngine):
    """The engine with stamps around the parts of its steps, on the host and on the device."""

    def __init__(self, model: LanguageModel, settings: GenerationSettings) -> None:
        super().__init__(model, settings)
        self.steps: list[list[int]] = []
        """Of each: begin and end, the ns of starting, waiting and emitting, rows, tokens of prompts, tokens."""
        self.events: list[tuple[Any, Any, int, int] | None] = []
        """Of each: events before and after the step that it started, rows, tokens of prompts."""
        self._now = [0, 0, 0, 0, 0]
        self._event: tuple[Any, Any, int, int] | None = None

    def load(self) -> None:
        super().load()
        assert self._forward is not None
        forward, execute = self._forward, self._forward.step

        def timed(plan: Any) -> Any:
            import torch

            rows, chunk = len(plan.lengths), sum(len(piece.ids) for piece in plan.pieces)
            self._now[3], self._now[4] = rows, chunk
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            chosen = execute(plan)
            end.record()
            self._event = begin, end, rows, chunk
            return chosen

        if self._kind == "cuda":
            forward.step = timed  # type: ignore[method-assign]

    def step(self) -> Sequence[Emission]:
        self._now, self._event = [0, 0, 0, 0, 0], None
        began = time.perf_counter_ns()
        emissions = super().step()
        self.events.append(self._event)
        self.steps.append([began, time.perf_counter_ns(), *self._now, len(emissions)])
        return emissions

    def _start(self) -> None:
        began = time.perf_counter_ns()
        super()._start()
        self._now[0] += time.perf_counter_ns() - began

    def _finish(self, flight: _Flight, emissions: list[Emission]) -> None:
        began = time.perf_counter_ns()
        if flight.arrived is not None:
            flight.arrived.synchronize()
        waited = time.perf_counter_ns()
        super()._finish(flight, emissions)
        self._now[1] += waited - began
        self._now[2] += time.perf_counter_ns() - waited

    def forget(self) -> None:
        self.steps.clear()
        self.events.clear()

    def summary(self, begin_ns: int = 0, end_ns: int = 2**62) -> dict[str, Any]:
        """The steps within a period; times are µs and medians unless said."""
        chosen = [place for place, step in enumerate(self.steps) if begin_ns <= step[0] < end_ns]
        if len(chosen) < 3:
            return {"steps": len(chosen)}
        steps = [self.steps[place] for place in chosen]
        wall_ns = steps[-1][0] - steps[0][0]
        between = [b[0] - a[1] for a, b in pairwise(steps)]
        document: dict[str, Any] = {
            "steps": len(steps),
            "tokens_per_s": round(sum(step[7] for step in steps[1:]) / wall_ns * 1e9),
            "step_us": wall_ns / (len(steps) - 1) / 1e3,
            "rows": statistics.mean(step[5] for step in steps),
            "prompt_tokens_per_step": statistics.mean(step[6] for step in steps),
            "steps_with_prompts": sum(step[6] > 0 for step in steps) / len(steps),
            "mean_us": {
                name: statistics.mean(step[place] for step in steps) / 1e3
                for name, place in (("start", 2), ("wait", 3), ("emit", 4))
            }
            | {"loop": statistics.mean(between) / 1e3},
            "p99_us": {
                name: percentile([step[place] for step in steps], 0.99) / 1e3
                for name, place in (("start", 2), ("wait", 3), ("emit", 4))
            }
            | {"loop": percentile(between, 0.99) / 1e3},
        }
        events = [event for place in chosen if (event := self.events[place]) is not None]
        parts = [[round(part / 1e3) for part in (b[0] - a[0], *a[2:5])] for a, b in pairwise(steps)]
        document["longest_us_with_start_wait_emit"] = sorted(parts)[-6:]
        if not events:
            return document
        events[-1][1].synchronize()
        by_size: dict[str, list[float]] = defaultdict(list)
        idle: list[float] = []
        last: Any = None
        for begin, end, rows, chunk in events:
            size = f"{-(-rows // 16) * 16}+{-(-chunk // 64) * 64}"
            by_size[size].append(begin.elapsed_time(end) * 1e3)
            if last is not None:
                idle.append(last.elapsed_time(begin) * 1e3)
            last = end
        busy = sum(map(sum, by_size.values()))
        document["device"] = {
            "busy_share": busy / (busy + sum(idle)),
            "between_steps_us": statistics.median(idle),
            "between_steps_p99_us": percentile(idle, 0.99),
            "us_by_rows_and_prompt_tokens": {
                size: [len(times), round(statistics.median(times))]
                for size, times in sorted(by_size.items(), key=lambda item: -len(item[1]))[:10]
            },
        }
        return document


class ReportingEngine(TimedEngine):
    """Writes the summary of the period that the file `period` names, when it is closed."""

    folder = Path()

    def close(self) -> None:
        with suppress(Exception):
            begin_ns, end_ns = json.loads((self.folder / "period").read_text())
            (self.folder / "engine.json").write_text(json.dumps(self.summary(begin_ns, end_ns)))
            long_ns = json.loads((self.folder / "long").read_text())
            (self.folder / "long.json").write_text(json.dumps(self.summary(*long_ns)))
        super().close()


def serve(port: str, folder: str, argument: str) -> int:
    """A server like `python -m servers.native`, with the engine above."""
    from servers.native.generation_server import ServedLanguageModel, serve_language
    from servers.native.server import configure_logs

    requested = from_argument(NativeSettings, [argument])
    model = language_model(requested.model, requested.weights)
    settings = requested.resolved_for(model)
    listener = bind(settings.host, int(port))
    configure_logs("warning")

    def build() -> ReportingEngine:
        engine = ReportingEngine(model, settings.language_engine())
        engine.folder = Path(folder)
        (Path(folder) / "pid").write_text(str(os.getpid()))
        return engine

    return serve_language(settings, ServedLanguageModel(model.name, model.label, build), listener)


# Clients


def client(port: int, path: str, users: Sequence[tuple[int, int]], until: float, seed: int, answers: Any) -> None:
    """One process of users, each with the tokens of its prompts and answers; puts its samples into the queue."""
    gc.disable()  # a forked heap takes a quarter of a second to look through
    chance = random.Random(seed)
    poll = select.epoll()
    sockets: dict[int, socket.socket] = {}
    state: dict[int, list[Any]] = {}
    stamps: list[int] = []
    gaps: list[tuple[int, int]] = []
    requests: list[tuple[int, int, int]] = []
    reads = 0

    def ask(number: int, prompt: int, answer: int) -> None:
        ids = [chance.randrange(3, 1000) for _ in range(prompt)]
        document: dict[str, Any] = {"input_ids": ids, "max_tokens": answer, "ignore_eos": True}
        if path.endswith("completions"):
            document = {
                "prompt": ids, "max_tokens": answer, "ignore_eos": True, "stream": True, "return_token_ids": True,
                "temperature": 0, "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            }  # fmt: skip
        body = json.dumps(document).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        state[number] = [time.perf_counter_ns(), 0, 0, b"", prompt, answer]
        sockets[number].sendall(head + body)

    for prompt, answer in users:
        connected = socket.create_connection(("127.0.0.1", port))
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sockets[connected.fileno()] = connected
        poll.register(connected, select.EPOLLIN)
        ask(connected.fileno(), prompt, answer)
    while time.time() < until:
        for number, _ in poll.poll(0.1):
            data = sockets[number].recv(65536)
            now = time.perf_counter_ns()
            reads += 1
            if not data:
                raise ConnectionError("the server has closed a connection")
            sent, last, worst, tail, prompt, answer = state[number]
            data = tail + data
            count = data.count(b"data: {") - data.count(b'"choices":[]')
            if count > 0:
                stamps += [now] * count
                if last:
                    gaps.append((now, now - last))
                    worst = max(worst, now - last)
                else:
                    requests.append((sent, now - sent, -1))
                last = now
            state[number] = [sent, last, worst, data[-6:], prompt, answer]
            if data.endswith(b"0\r\n\r\n"):
                requests.append((now, prompt, worst))
                ask(number, prompt, answer)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    answers.put((stamps, gaps, requests, reads, usage.ru_utime + usage.ru_stime))


def load(
    port: int, path: str, users: Sequence[tuple[int, int]], seconds: float, processes: Callable[[], dict[str, float]]
) -> tuple[dict[str, Any], int, int]:
    """What the clients saw in the last `seconds` of a load that warms up for 1.5 s before, and the period in ns."""
    answers: Any = multiprocessing.Queue()
    begin, until = time.time() + 1.5, time.time() + 1.5 + seconds
    started_ns = time.perf_counter_ns()
    workers = [
        multiprocessing.Process(target=client, args=(port, path, users[n::CLIENTS], until, n, answers))
        for n in range(CLIENTS)
        if users[n::CLIENTS]
    ]
    for worker in workers:
        worker.start()
    time.sleep(max(0.0, begin - time.time()))
    begin_ns, cpu_before = time.perf_counter_ns(), processes()
    time.sleep(max(0.0, until - 0.2 - time.time()))
    end_ns, cpu_after = time.perf_counter_ns(), processes()
    stamps: list[int] = []
    gaps: list[tuple[int, int]] = []
    requests: list[tuple[int, int, int]] = []
    reads, client_cpu, total = 0, 0.0, 0
    for _ in workers:
        part = answers.get(timeout=60)
        stamps += part[0]
        gaps += part[1]
        requests += part[2]
        reads, client_cpu, total = reads + part[3], client_cpu + part[4], total + len(part[0])
    for worker in workers:
        worker.join()
    wall = (end_ns - begin_ns) / 1e9
    tokens = sum(begin_ns <= stamp < end_ns for stamp in stamps)
    within = [gap / 1e6 for at, gap in gaps if begin_ns <= at < end_ns]
    burst = [first / 1e6 for sent, first, worst in requests if worst == -1 and sent < started_ns + 1_000_000_000]
    firsts = [first / 1e6 for sent, first, worst in requests if worst == -1 and begin_ns <= sent < end_ns]
    worst = [gap / 1e6 for at, _, gap in requests if gap >= 0 and begin_ns <= at < end_ns]
    seen = {
        "tokens_per_s": round(tokens / wall),
        "cpu_us_per_token": {name: (cpu_after[name] - cpu_before[name]) / max(1, tokens) * 1e6 for name in cpu_after},
        "cores": {name: (cpu_after[name] - cpu_before[name]) / wall for name in cpu_after},
        "client_cpu_us_per_token": client_cpu / max(1, total) * 1e6,
        "tokens_per_read": total / max(1, reads),
        "gap_ms": {"p50": percentile(within, 0.5), "p90": percentile(within, 0.9), "p99": percentile(within, 0.99)},
        "ttft_ms": {"p50": percentile(firsts, 0.5), "p90": percentile(firsts, 0.9), "p99": percentile(firsts, 0.99)},
        "burst_ttft_ms": {
            "first": min(burst, default=0.0),
            "p50": percentile(burst, 0.5),
            "last": max(burst, default=0),
        },
        "worst_gap_ms": {"p50": percentile(worst, 0.5), "p90": percentile(worst, 0.9), "p99": percentile(worst, 0.99)},
        "worst_gap_p99_by_median_gap": percentile(worst, 0.99) / max(1e-9, percentile(within, 0.5)),
    }
    return seen, begin_ns, end_ns


def cpu_of(server: subprocess.Popen[bytes], folder: Path) -> Callable[[], dict[str, float]]:
    """Reads the CPU seconds of the engine's process and of the front ends together."""

    def read() -> dict[str, float]:
        engine = (folder / "pid").read_text()
        listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(server.pid)], capture_output=True, check=False)
        seconds = {"engine": 0.0, "fronts": 0.0}
        for pid in listed.stdout.decode().split():
            with suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                name = "engine" if pid == engine else "fronts"
                seconds[name] += (int(fields[11]) + int(fields[12])) / CLOCK_TICKS
        return seconds

    return read


def wait_ready(port: int, server: subprocess.Popen[bytes]) -> None:
    while True:
        if server.poll() is not None:
            raise SystemExit(f"a server has ended with status {server.returncode}")
        with suppress(OSError):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/v2/health/ready")
            if connection.getresponse().status == 200:
                return
        time.sleep(0.1)


# The engine


def step_costs(engine: TimedEngine, rows: Sequence[int], chunks: Sequence[int]) -> None:
    """The µs of a replay by rows and tokens of prompts, also of sizes that the engine does not use."""
    import torch

    from servers.language.triton_forward import StepSize, TritonForward, _StepIntegers
    from tests.gpu.language.profile_decoding import kernels_of

    assert isinstance(engine._forward, TritonForward)
    forward = TritonForward(engine._forward.weights, max(rows), 2048, max(chunks), max(chunks))
    pool = torch.cuda.graph_pool_handle()
    costs: dict[str, int] = {}
    with torch.inference_mode():
        for count in rows:
            for chunk in chunks:
                size = StepSize(count, chunk)
                forward._integers.zero_()
                arrays = _StepIntegers.of(forward._integers, size)
                arrays.positions[:count].fill_(384)
                arrays.positions[count:].fill_(128)
                milliseconds, graph = forward._capture(size, False, pool)
                costs[f"{count}+{chunk}"] = round(milliseconds * 1e3)
                if count == max(rows) and chunk in (0, 256) and graph is not None:
                    say(kernels=f"{count}+{chunk}", **kernels_of(graph))
    say(replay_us_by_rows_and_prompt_tokens=costs)
    del forward
    torch.cuda.empty_cache()


def drive(engine: TimedEngine, users: int, prompt: int, answer: int, seconds: float) -> None:
    """The engine alone under the load of so many users who never wait."""
    chance, number = random.Random(1), 0
    began_ns = time.perf_counter_ns()
    emitted, firsts, started = 0, dict[int, int](), -1

    def add() -> None:
        nonlocal number
        engine.add(GenerationRequest(number, [chance.randrange(3, 1000) for _ in range(prompt)], answer))
        number += 1

    for _ in range(users):
        add()
    engine.forget()
    while time.perf_counter_ns() - began_ns < (seconds + 1.0) * 1e9:
        for emission in engine.step():
            if emission.number < users:
                firsts.setdefault(emission.number, time.perf_counter_ns() - began_ns)
            if emission.finish:
                add()
        emitted += 1
        if started < 0 and time.perf_counter_ns() - began_ns > 1e9:
            started = time.perf_counter_ns()
    say(
        engine_alone=f"{users} users, {prompt} to {answer}",
        burst_first_token_ms={"first": min(firsts.values()) / 1e6, "last": max(firsts.values()) / 1e6},
        **engine.summary(started),
    )
    for open_number in list(engine._generations):
        engine.cancel(open_number)
    while engine.active:
        engine.step()


def main() -> int:
    if sys.argv[1] == "serve":
        return serve(*sys.argv[2:5])
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--fronts", default="1,2,4")
    parser.add_argument("--users", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--answer", type=int, default=256)
    parser.add_argument("--long-prompt", type=int, default=1920)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--route", choices=("generate_stream", "completions"), default="generate_stream")
    parser.add_argument("--prefill-chunk", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--no-costs", action="store_true")
    options = parser.parse_args()
    began = time.perf_counter()
    model = language_model(options.model)
    path = "/v1/completions" if options.route == "completions" else f"/v2/models/{model.name}/generate_stream"
    servers: list[tuple[int, subprocess.Popen[bytes], int, Path]] = []
    with tempfile.TemporaryDirectory() as root, ExitStack() as started:
        for fronts in map(int, options.fronts.split(",")):
            folder = Path(root) / f"fronts-{fronts}"
            folder.mkdir()
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            settings = NativeSettings(
                model=options.model, fronts=fronts, slots=options.users, prefill_chunk=options.prefill_chunk,
                device=options.device, queue_size=max(128, options.users),
            )  # fmt: skip
            argv = [sys.executable, "-m", "tests.gpu.language.profile_serving", "serve", str(port), str(folder)]
            server = subprocess.Popen([*argv, to_argument(settings)])
            started.callback(server.terminate)
            servers.append((fronts, server, port, folder))
        engine = TimedEngine(
            model,
            GenerationSettings(slots=options.users, prefill_chunk=options.prefill_chunk, device=options.device),
        )
        engine.load()
        engine.warm_up()
        for _, server, port, _ in servers:
            wait_ready(port, server)
        say(loaded_s=time.perf_counter() - began, **engine.settings())
        drive(engine, options.users, options.prompt, options.answer, options.seconds)
        if engine._kind == "cuda" and not options.no_costs:
            step_costs(engine, (1, 16, options.users), (0, 32, 64, 128, 192, 256, 384, 512))
        for place, (fronts, server, port, folder) in enumerate(servers):
            read = cpu_of(server, folder)
            users = [(options.prompt, options.answer)] * options.users
            seen, *period = load(port, path, users, options.seconds, read)
            (folder / "period").write_text(json.dumps(period))
            say(served_by_fronts=fronts, route=options.route, **seen)
            if place == len(servers) - 1:
                mixed = [(options.prompt, options.answer)] * 14 + [(options.long_prompt, 64)] * 2
                seen, *period = load(port, path, mixed, options.seconds, read)
                (folder / "long").write_text(json.dumps(period))
                say(long_prompts="14 users as above and 2 with long prompts", **seen)
            server.send_signal(signal.SIGTERM)
            server.wait(60)
            for name in ("engine", "long"):
                with suppress(FileNotFoundError):
                    say(**{f"{name}_of_fronts": fronts}, **json.loads((folder / f"{name}.json").read_text()))
        engine.close()
    say(seconds=time.perf_counter() - began)
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)
