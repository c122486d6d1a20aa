"""Shows the runs in a results folder as Prometheus metrics, `abserve_run_…` and `abserve_comparison_…`.

It only reads what `abserve compare` has stored. A file that is missing, incomplete, malformed or of another version
shows nothing and does not affect other runs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from loadgen.documents import MOST_RECORD_BYTES, DocumentError, open_inside, printable, read_limited, read_record
from loadgen.run.storage import is_running

NEWEST = 20
SILENT_SECONDS = 600.0
"""A run in the state "running" that wrote nothing for so long was killed, unless its process is alive: nearly every
block and trial is shorter."""
_DEEPEST = 3
"""Levels of folders in a run."""
_COMPARED = ("run", "scenario", "metric", "baseline", "arm", "verdict")
GAUGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "abserve_run_running": ("1 while the run goes on.", ("run", "phase")),
    "abserve_run_start_timestamp_seconds": ("When the run began.", ("run",)),
    "abserve_run_valid": ("1 if the result is valid.", ("run", "sentence")),
    "abserve_run_arm_info": ("The arms of the run; always 1.", ("run", "arm", "title")),
    "abserve_comparison_ratio": ("Arm divided by baseline.", _COMPARED),
    "abserve_comparison_ratio_low": ("Lower end of the 95 % interval.", _COMPARED),
    "abserve_comparison_ratio_high": ("Upper end of the 95 % interval.", _COMPARED),
    "abserve_run_gpu_evidence": (
        "GPU verification by arm and workload; always 1.",
        ("run", "arm", "scenario", "finding", "code"),
    ),
}
"""Help and labels by name; the label `run` is the run's folder."""

T = TypeVar("T")


class _State(msgspec.Struct):
    state: str = ""
    phase: str = ""


class _Comparison(msgspec.Struct):
    scenario: str = ""
    metric: str = ""
    verdict: str = ""
    baseline: str = ""
    arm: str = ""
    ratio: float | None = None
    ci95: tuple[float, float] | None = None


class _Verdict(msgspec.Struct):
    sentence: str = ""


class _Arm(msgspec.Struct):
    label: str = ""
    title: str = ""


class _Result(msgspec.Struct):
    valid: bool = False
    verdict: _Verdict = msgspec.field(default_factory=_Verdict)
    arms: tuple[_Arm, ...] = ()
    comparisons: tuple[_Comparison, ...] = ()


class _Finding(msgspec.Struct):
    label: str = ""
    workload: str | None = None
    finding: str = ""
    code: str | None = None
    control: bool = False


class _Evidence(msgspec.Struct):
    records: tuple[_Finding, ...] = ()


class RunsCollector(Collector):
    """The newest runs of a folder, read at each scrape; a finished run is read once."""

    def __init__(self, folder: Path, wall_s: Callable[[], float] = time.time) -> None:
        self._folder = folder
        self._wall_s = wall_s
        self._read_files: dict[Path, tuple[int, Any]] = {}
        """When each file was changed that has been read, and its content."""

    def collect(self) -> Iterable[Metric]:
        """All families; a duplicate label set keeps its first value."""
        samples: dict[tuple[str, ...], float] = {}

        def show(value: float, name: str, *labels: str) -> None:
            samples.setdefault((name, *labels), value)

        for began_s, folder in self._newest():
            run = printable(folder.name)
            if (state := self._read(folder, "run.json", _State)) is not None:
                running = state.state == "running" and (
                    is_running(folder) or self._wall_s() - _last_written(folder) < SILENT_SECONDS
                )
                show(float(running), "abserve_run_running", run, state.phase if running else "")
                show(began_s, "abserve_run_start_timestamp_seconds", run)
            if (result := self._read(folder, "result.json", _Result)) is not None:
                show(float(result.valid), "abserve_run_valid", run, result.verdict.sentence)
                for arm in result.arms:
                    show(1.0, "abserve_run_arm_info", run, arm.label, arm.title)
                for row in result.comparisons:
                    labels = (run, row.scenario, row.metric, row.baseline, row.arm, row.verdict)
                    if row.ratio is not None:
                        show(row.ratio, "abserve_comparison_ratio", *labels)
                    if row.ci95 is not None:
                        show(row.ci95[0], "abserve_comparison_ratio_low", *labels)
                        show(row.ci95[1], "abserve_comparison_ratio_high", *labels)
            if (evidence := self._read(folder, "evidence.json", _Evidence)) is not None:
                for finding in evidence.records:
                    if not finding.control:
                        place = (finding.label, finding.workload or "all")
                        show(1.0, "abserve_run_gpu_evidence", run, *place, finding.finding, finding.code or "")
        for name, (text, label_names) in GAUGES.items():
            family = GaugeMetricFamily(name, text, labels=label_names)
            for (metric, *values), value in samples.items():
                if metric == name:
                    family.add_metric(values, value)
            yield family

    def _newest(self) -> list[tuple[float, Path]]:
        """(time of its first record, folder) of the newest runs, the newest last."""
        runs = []
        with suppress(OSError):
            for path in self._folder.glob("*/experiment.json"):
                with suppress(OSError):
                    runs.append((path.stat().st_mtime, path.parent))
        return sorted(runs)[-NEWEST:]

    def _read(self, folder: Path, name: str, kind: type[T]) -> T | None:
        """The decoded file, read again when it has changed; None when it cannot be used."""
        path = folder / name
        try:
            with open_inside(folder, name) as file:
                changed_ns = os.fstat(file.fileno()).st_mtime_ns
                cached = self._read_files.get(path)
                if cached is None or cached[0] != changed_ns:
                    cached = self._read_files[path] = changed_ns, _decoded(read_limited(file, MOST_RECORD_BYTES), kind)
        except (OSError, DocumentError):
            return None
        return cached[1]  # type: ignore[no-any-return]


def _decoded(content: bytes, kind: type[T]) -> T | None:
    try:
        return read_record(content, kind)  # type: ignore[no-any-return]
    except DocumentError:
        return None


def _last_written(folder: Path) -> float:
    """The newest time of the run's folders, which change with every block, trial and sample file."""
    times = [0.0]
    with suppress(OSError):
        times.append((folder / "run.json").stat(follow_symlinks=False).st_mtime)
    for place, inner, _ in os.walk(folder):  # follows no link
        with suppress(OSError):
            times.append(os.stat(place).st_mtime)  # noqa: PTH116 (os.walk gives texts)
        if len(Path(place).relative_to(folder).parts) == _DEEPEST:
            inner.clear()
    return max(times)
