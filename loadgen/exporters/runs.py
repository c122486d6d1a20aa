"""What the runs in a results folder found, for Prometheus, prefixes `abserve_run_` and `abserve_comparison_`.

It only reads what `abserve compare` has stored, so a run needs to know nothing of dashboards. Files that are missing,
half a run, or of another version show nothing; no value is made up.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from loadgen.storage.run_lock import is_running

NEWEST = 20
SILENT_SECONDS = 600.0
"""A run that says "running" and has written nothing for so long was killed, unless its process can be seen: nearly
every block and trial is shorter."""


class RunsCollector(Collector):
    """The newest runs of a folder, read at each scrape; a finished run is read once."""

    def __init__(self, folder: Path, wall_s: Callable[[], float] = time.time) -> None:
        self._folder = folder
        self._wall_s = wall_s
        self._known: dict[Path, tuple[int, Mapping[str, Any]]] = {}

    def collect(self) -> Iterable[Metric]:
        """All families; labels name the run by its folder."""
        families = _Families()
        for folder in self._newest():
            state = self._read(folder / "run.json")
            if state is not None:
                self._add_state(families, folder, state)
            result = self._read(folder / "result.json")
            if result is not None:
                _add_result(families, folder.name, result)
            evidence = self._read(folder / "evidence.json")
            if evidence is not None:
                _add_evidence(families, folder.name, evidence)
        return families.all()

    def _newest(self) -> list[Path]:
        """By the run's own first record; the newest last."""
        try:
            found = [(path.stat().st_mtime, path.parent) for path in self._folder.glob("*/experiment.json")]
        except OSError:
            return []
        return [folder for _, folder in sorted(found)[-NEWEST:]]

    def _add_state(self, families: _Families, folder: Path, state: Mapping[str, Any]) -> None:
        running = state.get("state") == "running" and (
            is_running(folder) or self._wall_s() - _last_written(folder) < SILENT_SECONDS
        )
        phase = str(state.get("phase", "")) if running else ""
        families.add("abserve_run_running", "1 while it runs.", float(running), run=folder.name, phase=phase)
        started = (folder / "experiment.json").stat().st_mtime
        families.add("abserve_run_start_timestamp_seconds", "When it began.", started, run=folder.name)

    def _read(self, path: Path) -> Mapping[str, Any] | None:
        """The JSON object in a file, read again when the file has changed; None for anything else."""
        try:
            changed = path.stat().st_mtime_ns
            known = self._known.get(path)
            if known is None or known[0] != changed:
                document = json.loads(path.read_bytes())
                if not isinstance(document, dict):
                    return None
                known = self._known[path] = (changed, document)
        except (OSError, ValueError):
            return None
        return known[1]


class _Families:
    """Gauges by name; a label set that comes twice keeps its first value."""

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


def _add_result(families: _Families, run: str, result: Mapping[str, Any]) -> None:
    verdict = result.get("verdict") or {}
    headline = str(verdict.get("headline", ""))
    families.add(
        "abserve_run_valid", "1: the verdict holds.", float(result.get("valid") is True), run=run, headline=headline
    )
    for arm in result.get("arms") or ():
        labels = {"run": run, "arm": str(arm.get("label", "")), "title": str(arm.get("title", ""))}
        families.add("abserve_run_arm_info", "The two sides; always 1.", 1.0, **labels)
    for comparison in result.get("comparisons") or ():
        ratio, interval = comparison.get("ratio_b_over_a"), comparison.get("ci95")
        labels = {
            "run": run,
            "scenario": str(comparison.get("scenario", "")),
            "metric": str(comparison.get("metric", "")),
            "verdict": str(comparison.get("verdict", "")),
        }
        if ratio is not None:
            families.add("abserve_comparison_ratio", "B over A.", float(ratio), **labels)
        if interval is not None:
            families.add(
                "abserve_comparison_ratio_low", "Lower end of the 95 % interval.", float(interval[0]), **labels
            )
            families.add("abserve_comparison_ratio_high", "Its upper end.", float(interval[1]), **labels)


def _add_evidence(families: _Families, run: str, evidence: Mapping[str, Any]) -> None:
    for record in evidence.get("records") or ():
        if record.get("control"):
            continue
        labels = {
            "run": run,
            "arm": str(record.get("label", "")),
            "scenario": str(record.get("cell") or "all"),
            "finding": str(record.get("finding", "")),
            "code": str(record.get("code") or ""),
        }
        families.add("abserve_run_gpu_evidence", "Where the work ran, as found; always 1.", 1.0, **labels)


def _last_written(folder: Path) -> float:
    """Blocks, trials and samples come one by one, and those of causes in folders of their own, so the folders' times
    move while a run lives."""
    times = []
    try:
        folders = [path for pattern in ("*", "*/*", "*/*/*") for path in folder.glob(pattern) if path.is_dir()]
    except OSError:
        folders = []
    for path in (folder, *folders, folder / "run.json"):
        try:
            times.append(path.stat().st_mtime)
        except OSError:
            continue
    return max(times, default=0.0)
