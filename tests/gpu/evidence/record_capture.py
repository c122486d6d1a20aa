"""Records what a GPU's readings look like idle, under load and while only the CPU works, for the tests of the verdict.

    python tests/gpu/evidence/record_capture.py --out tests/captures/NAME.json              about 95 s on a real GPU
    python tests/gpu/evidence/record_capture.py --synthetic --out tests/captures/NAME.json  at once, made up

Needs torch, nvidia-ml-py and `servers.gpu`. The real one runs the sampler process as a comparison does, with an edge
around every phase. `origin` in the file says which of both it is.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from servers.gpu.sampler import INTERVALS_S, Recording  # noqa: E402 (runs from a checkout that is not installed)
from tests.scripted_reader import Phase, ScriptedReader  # noqa: E402 (the same)

SCHEMA = "abserve.gpu-capture/1"
PHASES = (("idle", 14.0), ("gpu", 31.0), ("idle", 10.0), ("cpu", 31.0), ("idle", 8.0))
SECOND = 1_000_000_000
MATRIX = 8192
CPU_MATRIX = 1024
KERNELS_PER_REQUEST = 10

Document = dict[str, Any]


class Sampler:
    """The real sampler process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._process = subprocess.Popen(
            [sys.executable, "-m", "servers.gpu.sampler", "--out", str(path)],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        )  # fmt: skip
        self.ready = self._answer()
        if self.ready["status"] != "ok":
            raise SystemExit(f"no GPU to record: {self.ready['message']}")

    def edge(self, label: str) -> None:
        """Returns when the readings are in the file."""
        self._command(f"edge {label}")

    def stop(self) -> list[Document]:
        """All lines."""
        self._command("stop")
        self._process.wait(timeout=20)
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    def _command(self, text: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(text + "\n")
        self._answer()

    def _answer(self) -> Document:
        assert self._process.stdout is not None
        answer: Document = json.loads(self._process.stdout.readline())
        return answer


def real() -> Document:
    """On this machine's first GPU."""
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU here; record on a machine with one, or use --synthetic")
    left = torch.randn(MATRIX, MATRIX, device="cuda:0", dtype=torch.float16)
    small = torch.randn(CPU_MATRIX, CPU_MATRIX)

    def on_gpu() -> None:
        for _ in range(KERNELS_PER_REQUEST):
            torch.mm(left, left)
        torch.cuda.synchronize()

    def on_cpu() -> None:
        torch.mm(small, small)

    on_gpu()
    on_cpu()
    kernels = count_kernels(on_gpu)
    with tempfile.TemporaryDirectory() as folder:
        sampler = Sampler(Path(folder) / "readings.jsonl")
        phases = []
        for number, (kind, seconds) in enumerate(PHASES):
            work: Callable[[], None] | None = {"gpu": on_gpu, "cpu": on_cpu}.get(kind)
            sampler.edge(f"{number} before")
            phases.append(run_phase(kind, seconds, work))
            sampler.edge(f"{number} after")
        lines = sampler.stop()
    return {
        "origin": "real",
        "machine": {
            "gpu": torch.cuda.get_device_name(0),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "cpu": platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
        },
        "pid": os.getpid(),
        "uuid": f"GPU-{torch.cuda.get_device_properties(0).uuid}",
        "kernel_count": kernels,
        "phases": phases,
        "lines": lines,
    }


def run_phase(kind: str, seconds: float, work: Callable[[], None] | None) -> Document:
    """Work until the time is over, a request after the other; or wait."""
    cpu_ns, start_ns = time.process_time_ns(), time.perf_counter_ns()
    end_ns = start_ns + int(seconds * SECOND)
    completions_ns = []
    if work is None:
        time.sleep(seconds)
    else:
        while time.perf_counter_ns() < end_ns:
            work()
            completions_ns.append(time.perf_counter_ns())
    return {
        "kind": kind,
        "start_ns": start_ns,
        "end_ns": time.perf_counter_ns(),
        "cpu_ns": time.process_time_ns() - cpu_ns,
        "completions_ns": thinned(completions_ns),
        "completed": len(completions_ns),
    }


def thinned(times_ns: list[int], most: int = 4000) -> list[int]:
    """At most so many, evenly: the shape over time is what matters, and the file is checked in."""
    step = max(1, -(-len(times_ns) // most))
    return times_ns[::step]


def count_kernels(work: Callable[[], None]) -> int:
    """CUDA kernels of one request, by the profiler."""
    from torch.autograd import DeviceType  # type: ignore[attr-defined]
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        work()
    return sum(1 for event in profiler.events() if event.device_type == DeviceType.CUDA)


def synthetic() -> Document:
    """The same phases of a scripted GPU: 80 W idle, 690 W under load, and power that falls slowly afterwards."""
    clock = [1000 * SECOND]
    wall_offset_ns = 1_700_000_000 * SECOND
    spans = list(timeline(clock[0]))
    script = []
    for kind, start_ns, end_ns in spans:
        if kind == "gpu":
            script.append(Phase(start_ns, end_ns, 0.99, 690.0))
            script.append(Phase(end_ns, end_ns + 2 * SECOND, 0.0, 84.0))
    reader = ScriptedReader(lambda: clock[0], lambda: clock[0] + wall_offset_ns, script, pids=(4711,))
    recording = Recording(reader, INTERVALS_S, lambda: clock[0], lambda: clock[0] + wall_offset_ns)
    header = recording.header(pid=4712) | {"boot_id": None, "started_at": "2026-01-01T00:00:00+00:00"}
    lines, phases = [header], []
    for number, (kind, start_ns, end_ns) in enumerate(spans):
        clock[0] = start_ns
        lines += recording.edge(f"{number} before")
        while recording.next_due_ns() < end_ns:
            clock[0] = max(clock[0], recording.next_due_ns())
            lines += recording.tick()
        clock[0] = end_ns
        lines += recording.edge(f"{number} after")
        period_ns = {"gpu": 16_000_000, "cpu": 40_000_000}.get(kind)
        ends = [] if period_ns is None else list(range(start_ns + period_ns, end_ns, period_ns))
        cpu_ns = {"gpu": 100_000, "cpu": 300_000_000}.get(kind, 0) * len(ends)
        phases.append(
            {"kind": kind, "start_ns": start_ns, "end_ns": end_ns, "cpu_ns": cpu_ns, "completions_ns": thinned(ends),
             "completed": len(ends)}
        )  # fmt: skip
    lines += recording.close()
    return {
        "origin": "synthetic",
        "machine": {"gpu": "scripted GPU (not real)"},
        "pid": 4711,
        "uuid": lines[1]["uuid"],
        "kernel_count": KERNELS_PER_REQUEST,
        "phases": phases,
        "lines": lines,
    }


def timeline(start_ns: int) -> Iterator[tuple[str, int, int]]:
    """Phases one after the other, 50 ms apart."""
    for kind, seconds in PHASES:
        end_ns = start_ns + int(seconds * SECOND)
        yield kind, start_ns, end_ns
        start_ns = end_ns + SECOND // 20


def main() -> None:
    """Parse, record, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--synthetic", action="store_true")
    options = parser.parse_args()
    document = {"schema": SCHEMA} | (synthetic() if options.synthetic else real())
    if not options.synthetic:
        document["recorded_at"] = datetime.now(UTC).isoformat(timespec="seconds")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    lines = document.pop("lines")
    # One reading a line, so that a difference between two captures can be read.
    head = json.dumps(document, separators=(",", ":"))[:-1]
    body = ",\n".join(json.dumps(line, separators=(",", ":")) for line in lines)
    options.out.write_text(f'{head},\n"lines":[\n{body}\n]}}\n')
    sys.stdout.write(f"{options.out}: {document['origin']}, {len(lines)} lines, {options.out.stat().st_size} bytes\n")


if __name__ == "__main__":
    main()
