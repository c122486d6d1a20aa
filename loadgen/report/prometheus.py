"""Shows the runs in a results folder as Prometheus metrics, `abserve_run_…` and `abserve_comparison_…`.

It only reads what `abserve compare` has stored. A file that is missing or malformed shows nothing and does not affect
other runs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from loadgen.base.documents import DocumentError, one_line, open_inside, printable, read_limited, read_record
from loadgen.records.model_config import listed, mapping
from loadgen.records.store import is_running
from loadgen.stats.ratios import has_log

NEWEST = 20
SILENT_SECONDS = 600.0
"""A run in the state "running" that wrote nothing for so long was killed, unless its process is alive: nearly every
block and trial is shorter."""
MOST_ROWS = 1000
"""Arms, comparisons and findings of one run that are shown, each."""
MOST_FILE_BYTES = 2**23
"""Limit of a file: all of them are read within one scrape, which Prometheus gives ten seconds."""
_DEEPEST = 3
"""Levels of folders in a run."""
_COMPARED = ("run", "scenario", "metric", "baseline", "arm", "verdict")
GAUGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "abserve_run_running": ("1 while the run goes on.", ("run", "phase")),
    "abserve_run_start_timestamp_seconds": ("When the run began.", ("run",)),
    "abserve_run_valid": ("1 if the result is valid.", ("run", "sentence")),
    "abserve_run_rough": ("1 if the result stands for a machine that others used; it is not valid then.", ("run",)),
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
SHOWN = {
    "run.json": ("state", "phase"),
    "result.json": ("valid", "rough", "verdict", "arms", "comparisons"),
    "evidence.json": ("records",),
}
"""The parts of each file that are shown; no others are kept."""


def start_exporter(collector: Collector, host: str, port: int) -> Callable[[], None]:
    """Answer scrapes in threads until the returned function is called. Raises `OSError`."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    server, thread = start_http_server(port, host, registry)

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop


class RunsCollector(Collector):
    """The newest runs of a folder, read at each scrape; a finished run is read once."""

    def __init__(self, folder: Path, wall_s: Callable[[], float] = time.time) -> None:
        self._folder = folder
        self._wall_s = wall_s
        self._read_files: dict[Path, tuple[int, Mapping[str, Any]]] = {}
        """When each file was changed that has been read, and what is shown of it."""

    def collect(self) -> Iterable[Metric]:
        """All families; a duplicate label set keeps its first value."""
        samples: dict[tuple[str, ...], float] = {}

        def show(value: float, name: str, *labels: str) -> None:
            samples.setdefault((name, *labels), value)

        for began_s, folder in self._newest():
            run = printable(folder.name)
            state = self._read(folder, "run.json")
            if "state" in state:
                running = state["state"] == "running" and (
                    is_running(folder) or self._wall_s() - _last_written(folder) < SILENT_SECONDS
                )
                show(float(running), "abserve_run_running", run, *_texts(state if running else {}, "phase"))
                show(began_s, "abserve_run_start_timestamp_seconds", run)
            result = self._read(folder, "result.json")
            if isinstance(valid := result.get("valid"), bool):
                show(float(valid), "abserve_run_valid", run, *_texts(result.get("verdict"), "sentence"))
            if isinstance(rough := result.get("rough"), bool):
                show(float(rough), "abserve_run_rough", run)
            for arm in listed(result.get("arms")):
                show(1.0, "abserve_run_arm_info", run, *_texts(arm, "label", "title"))
            for row in listed(result.get("comparisons")):
                bounds = listed(mapping(row).get("ci95"))
                low, high = bounds if len(bounds) == 2 else (None, None)
                ends = {"ratio": mapping(row).get("ratio"), "ratio_low": low, "ratio_high": high}
                for name, value in ends.items():
                    if isinstance(value, int | float) and has_log(value):  # no measurement gives another ratio
                        show(float(value), f"abserve_comparison_{name}", run, *_texts(row, *_COMPARED[1:]))
            for finding in listed(self._read(folder, "evidence.json").get("records")):
                if not mapping(finding).get("control"):
                    arm, scenario, *outcome = _texts(finding, "label", "workload", "finding", "code")
                    show(1.0, "abserve_run_gpu_evidence", run, arm, scenario or "all", *outcome)
        for name, (text, label_names) in GAUGES.items():
            family = GaugeMetricFamily(name, text, labels=label_names)
            for (metric, *values), value in samples.items():
                if metric == name:
                    family.add_metric(values, value)
            yield family

    def _newest(self) -> list[tuple[float, Path]]:
        """(time of its first record, folder) of the newest runs, the newest last. Nothing is kept of others."""
        runs = []
        with suppress(OSError):
            for path in self._folder.glob("*/experiment.json"):
                with suppress(OSError):
                    runs.append((path.stat().st_mtime, path.parent))
        newest = sorted(runs)[-NEWEST:]
        shown = {folder for _, folder in newest}
        for path in [path for path in list(self._read_files) if path.parent not in shown]:
            self._read_files.pop(path, None)  # scrapes may overlap
        return newest

    def _read(self, folder: Path, name: str) -> Mapping[str, Any]:
        """What is shown of a file, read again when it has changed; empty when it cannot be used."""
        path = folder / name
        try:
            with open_inside(folder, name) as file:
                changed_ns = os.fstat(file.fileno()).st_mtime_ns
                known = self._read_files.get(path)
                if known is None or known[0] != changed_ns:
                    known = self._read_files[path] = changed_ns, _shown(file, SHOWN[name])
                return known[1]
        except (OSError, DocumentError):
            return {}


def _shown(file: BinaryIO, keys: Iterable[str]) -> Mapping[str, Any]:
    try:
        content = read_record(read_limited(file, MOST_FILE_BYTES), dict[str, Any])
    except DocumentError:
        return {}
    values = {key: content[key] for key in keys if key in content}
    return {key: value[:MOST_ROWS] if isinstance(value, list) else value for key, value in values.items()}


def _texts(record: object, *names: str) -> list[str]:
    """The texts with these names in a record, cut if they are long; an empty one for anything else."""
    values = (mapping(record).get(name) for name in names)
    return [one_line(value) if isinstance(value, str) else "" for value in values]


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
