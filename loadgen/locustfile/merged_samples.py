"""The samples of several workers of the locustfile as one file, with what each of them says of itself beside it."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from loadgen.records.sample_files import load_samples, store_samples
from loadgen.records.samples import NS_PER_S, Samples


@dataclass(frozen=True, slots=True)
class WorkerFile:
    """What one user class did in one worker; `path` is None where samples are not stored."""

    name: str
    path: Path | None
    requests: int
    errors: int
    error_messages: tuple[str, ...]
    batch_size: int

    def described(self) -> dict[str, Any]:
        """As plain data for the master."""
        return {
            "name": self.name,
            "requests": self.requests,
            "errors": self.errors,
            "error_messages": list(self.error_messages),
            "batch_size": self.batch_size,
        }


@dataclass(slots=True)
class WorkerReport:
    """What a master knows of one worker in one test."""

    client_id: str
    number: int
    host: str = ""
    pid: int = 0
    machine: str = ""
    paths: dict[str, str] = field(default_factory=dict)
    described: dict[str, dict[str, Any]] = field(default_factory=dict)
    contents: dict[str, bytearray] = field(default_factory=dict)
    complete: bool = False
    lost: bool = False

    @property
    def title(self) -> str:
        """For people."""
        where = f" ({self.host}, process {self.pid})" if self.host else f" ({self.client_id})"
        return f"load worker {self.number + 1}{where}"

    def introduce(self, data: dict[str, Any]) -> None:
        """Who it is and where it writes."""
        self.pid, self.host, self.machine, self.paths = data["pid"], data["host"], data["machine"], data["files"]

    def take(self, files: list[dict[str, Any]] | None) -> None:
        """What each user class did; None after the last of its samples."""
        if files is None:
            self.complete = True
            return
        self.described = {file["name"]: file for file in files}

    def add(self, name: str, content: bytes) -> None:
        """A piece of a sample file."""
        self.contents.setdefault(name, bytearray()).extend(content)

    def recover(self, find: Callable[[Path], Path]) -> None:
        """Read what a lost worker of this machine had written. Raises `OSError`."""
        for name, text in self.paths.items():
            path = find(Path(text))
            if path.exists():
                self.contents[name] = bytearray(path.read_bytes())

    def samples(self, name: str) -> Samples | None:
        """Those of one user class; None where there are none. Raises `ValueError` for what is no sample file."""
        return load_samples(io.BytesIO(self.contents[name]), name) if name in self.contents else None


def merge_reports(reports: Sequence[WorkerReport], folder: Path | None) -> Iterator[str]:
    """Write FOLDER/merged-CLASS-TIME.npy and .json for each user class; a sentence for each, or none without a folder.

    Users are numbered through over the workers, errors by one list of messages. Raises `OSError`, `ValueError`.
    """
    if folder is None:
        return
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
    names = dict.fromkeys(name for report in reports for name in (*report.described, *report.contents))
    for name in names:
        pieces, workers, messages = [], [], _messages(reports, name)
        first_user = 0
        for report in reports:
            samples = report.samples(name)
            own = _worker(report, name, samples, first_user)
            workers.append(own)
            if samples is None or not len(samples):
                continue
            piece = samples.copy()
            piece["user"] += first_user
            first_user = int(piece["user"].max()) + 1
            texts = report.described.get(name, {}).get("error_messages", [])
            numbers = np.array([messages.index(text) for text in texts] or [len(messages)], dtype=np.int16)
            failed = piece["error"] >= 0
            known = np.minimum(piece["error"][failed], len(numbers) - 1)
            piece["error"][failed] = numbers[known]
            pieces.append(piece)
        if not pieces:
            continue
        merged = np.concatenate(pieces)
        path = folder / f"merged-{name}-{stamp}.npy"
        store_samples(path, merged)
        machines = {report.machine for report in reports if report.machine}
        about = {
            "complete": not any(report.lost for report in reports),
            "lost": [report.title for report in reports if report.lost],
            "clock": "one" if len(machines) == 1 else "several",
            "requests": len(merged),
            "errors": int((merged["error"] >= 0).sum()),
            "error_messages": [*messages, *(["in a lost worker"] if any(report.lost for report in reports) else [])],
            "requests_per_s": _sum(worker["requests_per_s"] for worker in workers),
            "workers": workers,
        }
        path.with_suffix(".json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        told = "" if about["complete"] else f"; INCOMPLETE: {', '.join(about['lost'])} lost"  # type: ignore[arg-type]  # a list of names
        yield f"{len(merged):,} samples of {len(pieces)} workers are in {path}{told}"


def _worker(report: WorkerReport, name: str, samples: Samples | None, first_user: int) -> dict[str, Any]:
    """Its own window by its own clock, and its rate in it."""
    start_ns = int(samples["intended_ns"].min()) if samples is not None and len(samples) else None
    end_ns = int(samples["end_ns"].max()) if samples is not None and len(samples) else None
    seconds = (end_ns - start_ns) / NS_PER_S if start_ns is not None and end_ns is not None else 0.0
    count = 0 if samples is None else len(samples)
    return {
        "host": report.host,
        "pid": report.pid,
        "machine": report.machine,
        "lost": report.lost,
        "requests": count,
        "first_user": first_user,
        "window_start_ns": start_ns,
        "window_end_ns": end_ns,
        "requests_per_s": count / seconds if seconds > 0.0 else None,
        "batch_size": report.described.get(name, {}).get("batch_size"),
    }


def _messages(reports: Iterable[WorkerReport], name: str) -> list[str]:
    texts = (text for report in reports for text in report.described.get(name, {}).get("error_messages", []))
    return list(dict.fromkeys(texts))


def _sum(rates: Iterable[float | None]) -> float:
    return sum(rate for rate in rates if rate is not None)
