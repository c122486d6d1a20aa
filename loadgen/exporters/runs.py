"""The runs in a results folder as Prometheus metrics, `abserve_run_…` and `abserve_comparison_…`.

It only reads what `abserve compare` has stored. A file that is missing, incomplete, malformed or of another version
shows nothing and does not affect other runs.
"""

from __future__ import annotations

import stat
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from loadgen.documents import MOST_RECORD_BYTES, DocumentError, printable, read_record
from loadgen.storage.run_lock import is_running

NEWEST = 20
SILENT_SECONDS = 600.0
"""A run in the state "running" that wrote nothing for so long was killed, unless its process is alive: nearly every
block and trial is shorter."""

T = TypeVar("T")


class _State(msgspec.Struct):
    state: str = ""
    phase: str = ""


class _Verdict(msgspec.Struct):
    sentence: str = ""


class _Arm(msgspec.Struct):
    label: str = ""
    title: str = ""


class _Comparison(msgspec.Struct):
    scenario: str = ""
    metric: str = ""
    verdict: str = ""
    baseline: str = ""
    arm: str = ""
    ratio: float | None = None
    ci95: tuple[float, float] | None = None


class _Result(msgspec.Struct):
    valid: bool = False
    verdict: _Verdict = msgspec.field(default_factory=_Verdict)
    arms: tuple[_Arm, ...] = ()
    comparisons: tuple[_Comparison, ...] = ()


class _Finding(msgspec.Struct):
    label: str = ""
    cell: str | None = None
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
        self._known: dict[Path, tuple[int, Any]] = {}

    def collect(self) -> Iterable[Metric]:
        """All families; the label `run` is the run's folder."""
        families = _Families()
        for folder in self._newest():
            state = self._read(folder / "run.json", _State)
            if state is not None:
                self._add_state(families, folder, state)
            result = self._read(folder / "result.json", _Result)
            if result is not None:
                _add_result(families, printable(folder.name), result)
            evidence = self._read(folder / "evidence.json", _Evidence)
            if evidence is not None:
                _add_evidence(families, printable(folder.name), evidence)
        return families.all()

    def _newest(self) -> list[Path]:
        found = []
        with suppress(OSError):
            for path in self._folder.glob("*/experiment.json"):
                with suppress(OSError):
                    found.append((path.stat().st_mtime, path.parent))
        return [folder for _, folder in sorted(found)[-NEWEST:]]

    def _add_state(self, families: _Families, folder: Path, state: _State) -> None:
        running = state.state == "running" and (
            is_running(folder) or self._wall_s() - _last_written(folder) < SILENT_SECONDS
        )
        phase, name = state.phase if running else "", printable(folder.name)
        families.add("abserve_run_running", "1 while the run goes on.", float(running), run=name, phase=phase)
        with suppress(OSError):  # it has just been removed
            started = (folder / "experiment.json").stat().st_mtime
            families.add("abserve_run_start_timestamp_seconds", "When the run began.", started, run=name)

    def _read(self, path: Path, kind: type[T]) -> T | None:
        """The decoded file, read again when it has changed; None when it cannot be used."""
        try:
            found = path.stat()
            known = self._known.get(path)
            if known is None or known[0] != found.st_mtime_ns:
                known = self._known[path] = (found.st_mtime_ns, _decoded(path, found.st_mode, found.st_size, kind))
        except OSError:
            return None
        return known[1]  # type: ignore[no-any-return]


def _decoded(path: Path, mode: int, size: int, kind: type[T]) -> T | None:
    if not stat.S_ISREG(mode) or size > MOST_RECORD_BYTES:  # reading a named pipe would block
        return None
    try:
        return read_record(path.read_bytes(), kind)  # type: ignore[no-any-return]
    except DocumentError:
        return None


class _Families:
    """Gauges by name; a duplicate label set keeps its first value."""

    def __init__(self) -> None:
        self._families: dict[str, GaugeMetricFamily] = {}
        self._seen: set[tuple[str, ...]] = set()

    def add(self, name: str, help_text: str, value: float, **labels: str) -> None:
        family = self._families.setdefault(name, GaugeMetricFamily(name, help_text, labels=tuple(labels)))
        key = (name, *labels.values())
        if key not in self._seen:
            self._seen.add(key)
            family.add_metric(tuple(labels.values()), value)

    def all(self) -> list[Metric]:
        return list(self._families.values())


def _add_result(families: _Families, run: str, result: _Result) -> None:
    families.add(
        "abserve_run_valid", "1 if the result is valid.", float(result.valid), run=run, sentence=result.verdict.sentence
    )
    for arm in result.arms:
        families.add(
            "abserve_run_arm_info", "The arms of the run; always 1.", 1.0, run=run, arm=arm.label, title=arm.title
        )
    for one in result.comparisons:
        labels = {
            "run": run, "scenario": one.scenario, "metric": one.metric, "baseline": one.baseline, "arm": one.arm,
            "verdict": one.verdict,
        }  # fmt: skip
        if one.ratio is not None:
            families.add("abserve_comparison_ratio", "Arm divided by baseline.", one.ratio, **labels)
        if one.ci95 is not None:
            families.add("abserve_comparison_ratio_low", "Lower end of the 95 % interval.", one.ci95[0], **labels)
            families.add("abserve_comparison_ratio_high", "Upper end of the 95 % interval.", one.ci95[1], **labels)


def _add_evidence(families: _Families, run: str, evidence: _Evidence) -> None:
    for record in evidence.records:
        if record.control:
            continue
        labels = {
            "run": run,
            "arm": record.label,
            "scenario": record.cell or "all",
            "finding": record.finding,
            "code": record.code or "",
        }
        families.add("abserve_run_gpu_evidence", "GPU verification by arm and workload; always 1.", 1.0, **labels)


def _last_written(folder: Path) -> float:
    """The newest time of the run's folders, which change with every block, trial and sample file."""
    paths = [folder, folder / "run.json"]
    with suppress(OSError):
        paths += [path for pattern in ("*", "*/*", "*/*/*") for path in folder.glob(pattern) if path.is_dir()]
    times = []
    for path in paths:
        with suppress(OSError):
            times.append(path.stat().st_mtime)
    return max(times, default=0.0)
