"""The locustfile on several processes and machines: shares of a rate, lost workers, samples put together.

Over Locust's own channel the master tells each worker its share of a rate once all users are spawned (Locust decides
which worker has users of which class), and each worker hands in its samples when the test ends. A worker that
disappears during a test ends it. Then, and where one does not hand in, the test is INVALID, the exit status is not 0,
and what was measured is kept.

Latencies are differences of one machine's clock, so they merge. Moments do not: each machine has its own clock, so the
merged file says which worker sent what and when by its own clock, and the rate is the sum of the workers' own rates.
"""

from __future__ import annotations

import io
import json
import logging
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any

import gevent
import numpy as np

from loadgen.records.samples import NS_PER_S, Samples, load_samples, part_path, store_samples, with_errors_of

SHARE, STARTED, REPORT, SAMPLES, FINISH = (
    "abserve_share", "abserve_started", "abserve_report", "abserve_samples", "abserve_finish",
)  # fmt: skip
PACED_CLASS = "OpenLoop"
"""The user class among whose holders a rate is divided."""
_CHUNK_BYTES = 1 << 20
_WATCH_SECONDS = 0.25
_SILENCE_SECONDS = 20.0
"""Without a word from any worker that has not handed in yet, it is given up."""

logger = logging.getLogger("abserve")


def machine() -> str:
    """This machine's boot: processes with the same one share a monotonic clock."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def share_of(environment: Any) -> tuple[int, int, int] | None:
    """(part, parts, seed): this process takes every `parts`-th request of the schedule with that seed. None for a
    worker without users that send by a schedule, or that joined when the shares were given out already."""
    if environment.abserve_worker is None:
        return 0, 1, os.getpid()
    share: tuple[int, int, int] | None = environment.abserve_worker.share
    return share


class WorkerSide:
    """A worker's part: take the share, hand in the samples."""

    def __init__(self, environment: Any) -> None:
        self._runner: Any = environment.runner
        self.share: tuple[int, int, int] | None = None
        self._runner.register_message(SHARE, self._share)
        self._runner.register_message(FINISH, self._finish, concurrent=True)

    def started(self, files: dict[str, Path]) -> None:
        """Where the samples of each user class go: with this a master on this machine finds those of a lost worker."""
        paths = {name: str(path.resolve()) for name, path in files.items()}
        self._send(STARTED, {"pid": os.getpid(), "host": socket.gethostname(), "machine": machine(), "files": paths})

    def hand_in(self, files: Sequence[WorkerFile]) -> None:
        """What each user class did, then its samples in pieces."""
        self._send(REPORT, {"files": [file.described() for file in files]})
        for file in files:
            if file.path is None:
                continue
            with file.path.open("rb") as content:
                while piece := content.read(_CHUNK_BYTES):
                    self._send(SAMPLES, {"name": file.name, "data": piece})
                    gevent.sleep(0)
        self._send(REPORT, {"files": None})
        self.share = None

    def _send(self, kind: str, data: dict[str, Any]) -> None:
        self._runner.send_message(kind, data)

    def _share(self, msg: Any, **_: object) -> None:
        self.share = (msg.data["part"], msg.data["parts"], msg.data["seed"])

    def _finish(self, **_: object) -> None:
        self._runner.stop()  # fires test_stop, which hands in; nothing happens where it has stopped already


class MasterSide:
    """A master's part: watch the workers of a test, collect what they hand in, merge it."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._runner: Any = environment.runner
        self._reports: dict[str, WorkerReport] = {}
        self._heard = monotonic()
        self._running = False
        for kind, listener in ((STARTED, self._on_started), (REPORT, self._on_report), (SAMPLES, self._on_samples)):
            self._runner.register_message(kind, listener)
        environment.events.test_start.add_listener(self._test_start)
        environment.events.spawning_complete.add_listener(self._spawned)
        environment.events.test_stop.add_listener(self._test_stop)

    def _test_start(self, **_: object) -> None:
        clients = [client for client in self._runner.clients.all if client.state not in ("missing", "stopped")]
        self._reports = {client.id: WorkerReport(client.id, number) for number, client in enumerate(clients)}
        self._running = True
        gevent.spawn(self._watch)

    def _spawned(self, **_: object) -> None:
        """Before the workers are told that all users are there: the rate is divided over those that have some."""
        holders = [client for client in self._runner.clients.all if client.user_classes_count.get(PACED_CLASS)]
        for part, client in enumerate(holders):
            share = {"part": part, "parts": len(holders), "seed": os.getpid()}
            self._runner.send_message(SHARE, share, client_id=client.id)

    def _watch(self) -> None:
        """Until the test stops or a worker is lost; the first loss stops it, since what goes on is another load."""
        while self._running:
            lost = self._newly_lost()
            if lost:
                self._invalid(
                    f"{', '.join(lost)} lost during the test, which ends here: its load was not what was asked"
                )
                stop = self._runner.quit if self._environment.parsed_options.headless else self._runner.stop
                gevent.spawn(stop)
                return
            gevent.sleep(_WATCH_SECONDS)

    def _newly_lost(self) -> list[str]:
        names = []
        for report in self._reports.values():
            client = self._runner.clients.get(report.client_id)
            if not report.lost and not report.complete and (client is None or client.state == "missing"):
                report.lost = True
                names.append(report.title)
        return names

    def _test_stop(self, **_: object) -> None:
        """Locust calls this before it lets the workers go, so there is time to hear them out."""
        if not self._running:
            return
        self._running = False
        for report in self._reports.values():
            if not report.lost:
                self._runner.send_message(FINISH, {}, client_id=report.client_id)
        self._heard = monotonic()
        while self._waiting() and monotonic() - self._heard < _SILENCE_SECONDS:
            lost = self._newly_lost()
            if lost:
                self._invalid(f"{', '.join(lost)} lost at the end of the test, without its last samples")
            gevent.sleep(0.02)
        silent = self._waiting()
        for report in silent:
            report.lost = True
        if silent:
            self._invalid(f"{', '.join(report.title for report in silent)} did not hand in samples")
        self._merge()

    def _waiting(self) -> list[WorkerReport]:
        return [report for report in self._reports.values() if not report.complete and not report.lost]

    def _merge(self) -> None:
        reports = list(self._reports.values())
        for report in reports:
            if report.lost and report.machine == machine():
                report.recover()
        folder = self._environment.parsed_options.samples_out
        try:
            for sentence in merge_reports(reports, Path(folder) if folder else None):
                logger.info(sentence)
        except (OSError, ValueError) as exc:
            self._invalid(f"the samples of the workers cannot be put together: {exc}")

    def _invalid(self, problem: str) -> None:
        self._environment.process_exit_code = 1
        logger.error(f"INVALID: {problem}")

    def _on_started(self, msg: Any, **_: object) -> None:
        if self._running and msg.node_id not in self._reports:  # it joined during the test and was given users
            self._reports[msg.node_id] = WorkerReport(msg.node_id, len(self._reports))
        if msg.node_id in self._reports:
            self._reports[msg.node_id].introduce(msg.data)

    def _on_report(self, msg: Any, **_: object) -> None:
        self._heard = monotonic()
        if msg.node_id in self._reports:
            self._reports[msg.node_id].take(msg.data["files"])

    def _on_samples(self, msg: Any, **_: object) -> None:
        self._heard = monotonic()
        if msg.node_id in self._reports:
            self._reports[msg.node_id].add(msg.data["name"], msg.data["data"])


@dataclass(frozen=True, slots=True)
class WorkerFile:
    """What one user class did in one worker; `path` is None where samples are not stored."""

    name: str
    path: Path | None
    error_messages: tuple[str, ...]
    batch_size: int

    def described(self) -> dict[str, Any]:
        """As plain data for the master."""
        return {"name": self.name, "error_messages": list(self.error_messages), "batch_size": self.batch_size}


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

    def recover(self) -> None:
        """Read what a lost worker of this machine had written. Raises `OSError`."""
        for name, text in self.paths.items():
            whole = Path(text)
            for path in (part_path(whole), whole):
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
    lost = [report.title for report in reports if report.lost]
    names = dict.fromkeys(name for report in reports for name in (*report.described, *report.contents))
    for name in names:
        pieces, workers, first_user = [], [], 0
        told = [report.described.get(name, {}).get("error_messages", []) for report in reports]
        messages = list(dict.fromkeys(text for texts in told for text in texts))
        for report, texts in zip(reports, told, strict=True):
            samples = report.samples(name)
            workers.append(_worker(report, name, samples, first_user))
            if samples is None or not len(samples):
                continue
            piece = with_errors_of(samples, texts, messages)
            piece["user"] += first_user
            first_user = int(piece["user"].max()) + 1
            pieces.append(piece)
        if not pieces:
            continue
        merged = np.concatenate(pieces)
        path = folder / f"merged-{name}-{stamp}.npy"
        store_samples(path, merged)
        machines = {report.machine for report in reports if report.machine}
        about = {
            "complete": not lost,
            "lost": lost,
            "clock": "one" if len(machines) == 1 else "several",
            "requests": len(merged),
            "errors": int((merged["error"] >= 0).sum()),
            "error_messages": [*messages, *(["in a lost worker"] if lost else [])],
            "requests_per_s": sum(worker["requests_per_s"] or 0.0 for worker in workers),
            "workers": workers,
        }
        path.with_suffix(".json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        missing = f"; INCOMPLETE: {', '.join(lost)} lost" if lost else ""
        yield f"{len(merged):,} samples of {len(pieces)} workers are in {path}{missing}"


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
