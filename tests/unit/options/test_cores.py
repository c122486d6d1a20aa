"""A CPU quota of cgroups counts like fewer cores: planted files, read by both sides."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from loadgen.base import child_process
from loadgen.measure.machine import read_host
from servers.engines.processors import thread_count
from servers.options import defaults

V1 = "3:cpuset:/a\n2:cpu,cpuacct:/a/b\n1:memory:/a\n0::/\n"
UNLIMITED = {"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"}


def planted(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    for name, text in {"proc/self/cgroup": cgroup, **{f"sys/fs/cgroup/{name}": files[name] for name in files}}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


@pytest.mark.parametrize("usable_cores", [defaults.usable_cores, child_process.usable_cores])
@pytest.mark.parametrize(
    ("cgroup", "files", "cores"),
    [
        ("0::/", {"cpu.max": "300000 100000"}, 3),
        ("0::/", {"cpu.max": "max 100000"}, 8),
        ("0::/", {"cpu.max": "1600000 100000"}, 8),
        ("0::/", {"cpu.max": "250000 100000"}, 2),
        ("0::/", {"cpu.max": "50000 100000"}, 1),
        ("0::/a/b", {"cpu.max": "max 100000", "a/cpu.max": "200000 100000", "a/b/cpu.max": "400000 100000"}, 2),
        ("0::/../../pod/c", {"cpu.max": "200000 50000"}, 4),
        (V1 + "x", {}, 8),
        (V1, {"unified/cpu.max": "500000 100000"}, 5),
        (V1, {"cpu/cpu.cfs_quota_us": "150000", "cpu/cpu.cfs_period_us": "50000"}, 3),
        (V1, {"cpu,cpuacct/a/b/cpu.cfs_quota_us": "60000", "cpu,cpuacct/a/b/cpu.cfs_period_us": "10000"}, 6),
        (V1, {f"cpu/{name}": text for name, text in UNLIMITED.items()}, 8),
        ("0::/", {"cpu.max": "100000 0"}, 8),
        ("0::/", {"cpu.max": ""}, 8),
        ("", {}, 8),
    ],
)
def test_cores_are_those_of_the_affinity_or_of_the_quota(
    usable_cores: Callable[[Path], int],
    cgroup: str,
    files: dict[str, str],
    cores: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))
    assert usable_cores(planted(tmp_path, cgroup, files)) == cores


def test_threads_and_the_host_table_count_the_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))
    for module in (defaults, child_process):
        monkeypatch.setattr(module, "_cpu_quotas", lambda _root: [3.5])
    assert thread_count(0) == 3
    assert thread_count(5) == 5
    assert read_host()["cpu_count"] == 3
