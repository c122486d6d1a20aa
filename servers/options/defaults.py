"""Default values that several servers share, the cores that a default counts, and which settings that only affect a
server's speed apply (`--tuning`).

`all` leaves a server as it is configured, `none` gives it its own defaults, and a list of names keeps only these.
`abserve compare` starts such servers beside an arm to see whether its configuration makes it slow. Imports no other
module of the project.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

HOST = "127.0.0.1"
PRECISION: Final = "auto"
MODE = "auto"
DEVICE = "auto"
MAX_BATCH_SIZE = 32
MAX_QUEUE_DELAY_US = 0
QUEUE_SIZE = 512
ARTEFACTS = ".artefacts"

ENGINES = "torch, onnxruntime, tensorrt, openvino, jax, another installed engine, or null (no model)"
PRECISIONS = "auto (fp16 on a GPU, fp32 on a CPU), fp32, tf32, fp16, bf16, int8 or fp8, as the engine offers them."
SPINNING = (
    "Whether the threads of torch and onnxruntime spin on the CPU while they wait for each other. auto: on, as both do "
    "by default; off suits cores that other programs use."
)
"""The help of `--engine`, `--precision` and `--spinning`."""
ANYONE = "Listen beyond loopback without keys: something in front protects it."
"""The help of `--anyone`."""
TRACE_SHARE = 0.01
TRACES = "Where OpenTelemetry's spans are sent, such as http://127.0.0.1:4318/v1/traces (OTLP/HTTP)."
TRACE_SHARES = "Share of the requests without a traceparent that are traced; one with it says so itself."
"""The help of `--traces` and `--trace-share`."""


def check_traces(url: str) -> None:
    """Raise `OptionError` for what is not an address of OTLP over HTTP; empty means no traces."""
    if url and not url.startswith(("http://", "https://")):
        raise OptionError(f"--traces {url}: give an address such as http://127.0.0.1:4318/v1/traces")


ALL = "all"
NONE = "none"


class OptionError(ValueError):
    """An option cannot be honoured, such as a port in use; the message names the option and what to do."""


def chosen_tuning(tuning: str, names: Iterable[str]) -> frozenset[str]:
    """Those of the set options `names` that the choice `tuning` leaves in effect. Raises `OptionError`."""
    have = frozenset(names)
    if tuning in (ALL, NONE):
        return have if tuning == ALL else frozenset()
    asked = frozenset(name.strip() for name in tuning.split(","))
    if unknown := asked - have:
        present = f"set here: {', '.join(sorted(have))}" if have else "none is set here"
        raise OptionError(f"--tuning {tuning}: {', '.join(sorted(unknown))} is not a setting in effect; {present}")
    return asked


def usable_cores(root: Path = Path("/")) -> int:
    """The cores that this process may use: those of its affinity, or fewer if a CPU quota of its cgroups gives it less
    time than that, as `docker run --cpus` and Kubernetes' limits do. A part of a core does not count: threads beyond
    the quota would all be stopped for the rest of each period."""
    return max(1, min([len(os.sched_getaffinity(0)), *map(int, _cpu_quotas(root))]))


def _cpu_quotas(root: Path) -> Iterator[float]:
    """The cores' worth of time that the cgroups of this process may use, those around them included."""
    with suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            names: tuple[str, ...] = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            mounts = ("cpu", "cpu,cpuacct")
            if not controllers:
                mounts, names = ("", "unified"), ("cpu.max",)
            elif "cpu" not in controllers.split(","):
                continue
            parts = [part for part in path.split("/") if part not in ("", "..")]
            # In a container the root of what is mounted may be its own cgroup, whatever its path.
            for depth in range(len(parts) + 1):
                for folder in (root.joinpath("sys/fs/cgroup", mount, *parts[:depth]) for mount in mounts):
                    with suppress(OSError, ValueError, ZeroDivisionError):
                        quota, period = map(float, " ".join((folder / name).read_text() for name in names).split())
                        if quota > 0:
                            yield quota / period


SPINS = ("torch", "onnxruntime")
"""Engines whose threads on the CPU spin while they wait for each other, unless the settings say otherwise."""
MOST_WARM_ON_CPU = 2
"""Largest batch with which a CPU warms up. After one call of any size, the first batch of 2, 4 or 8 items took as much
CPU time as later ones: ResNet-50 and DistilBERT with torch, ONNX Runtime and OpenVINO, ViT-B-32 with torch, two cores.
Batches of 4 and 8 took a fifth of the CPU time of a start. One of 2 shows that the model takes more than one item."""
