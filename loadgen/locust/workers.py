"""The locustfile on several processes and machines: shares of a rate, lost workers, merged samples.

Over Locust's own channel the master sends each worker its share of a rate once all users are spawned (Locust decides
which worker has users of which class), and each worker sends its samples when the test ends. A worker that disappears
ends the test. The test is then INVALID, the exit status is not 0, and everything measured is kept; the same holds for a
worker that does not send its samples.

Latencies are differences of one machine's clock, so they can be merged. Moments cannot, since each machine has its own
clock: the merged file says which worker sent each sample, by that worker's clock. The rate is the sum of their rates.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any, BinaryIO

import gevent

from loadgen.base.documents import open_inside
from loadgen.records.samples import NS_PER_S, Samples, part_path, read_in_parts, store_samples, with_errors_of

SHARE, STARTED, REPORT, SAMPLES, FINISH = (
    "abserve_share", "abserve_started", "abserve_report", "abserve_samples", "abserve_finish",
)  # fmt: skip
PACED_CLASS = "OpenLoop"
"""The user class of the rate, which is divided among the workers that have such users."""
_CHUNK_BYTES = 1 << 20
_WATCH_SECONDS = 0.25
_SILENCE_SECONDS = 20.0
"""When no worker sends anything for this long after a test, those whose samples are missing count as lost."""

logger = logging.getLogger("abserve")


def machine() -> str:
    """The ID of this machine's boot: processes with the same ID share a monotonic clock."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def share_of(environment: Any) -> tuple[int, int, int] | None:
    """(part, parts, seed): this process takes every `parts`-th request of the schedule with that seed. None for a
    worker without users of PACED_CLASS, or one that joined after the shares were sent."""
    if environment.abserve_worker is None:
        return 0, 1, os.getpid()
    share: tuple[int, int, int] | None = environment.abserve_worker.share
    return share


class WorkerSide:
    """A worker: gets its share, sends its samples."""

    def __init__(self, environment: Any) -> None:
        self._runner: Any = environment.runner
        self.share: tuple[int, int, int] | None = None
        self._runner.register_message(SHARE, self._share)
        # Stopping fires test_stop, which sends the samples; nothing happens when the test has stopped already.
        self._runner.register_message(FINISH, lambda **_: self._runner.stop(), concurrent=True)

    def started(self, files: dict[str, Path]) -> None:
        """Send the paths of the sample files, where a master on this machine finds those of a lost worker."""
        paths = {name: str(path.resolve()) for name, path in files.items()}
        about = {"pid": os.getpid(), "host": socket.gethostname(), "machine": machine(), "files": paths}
        self._runner.send_message(STARTED, about)

    def hand_in(self, files: Sequence[tuple[Path | None, dict[str, Any]]]) -> None:
        """Send the samples of each user class in pieces, then all descriptions, each with the class's `name`."""
        for path, described in files:
            if path is None:
                continue
            with path.open("rb") as content:
                while piece := content.read(_CHUNK_BYTES):
                    self._runner.send_message(SAMPLES, {"name": described["name"], "data": piece})
                    gevent.sleep(0)
        self._runner.send_message(REPORT, {"files": [described for _, described in files]})
        self.share = None

    def _share(self, msg: Any, **_: object) -> None:
        self.share = (msg.data["part"], msg.data["parts"], msg.data["seed"])


class MasterSide:
    """A master: watches the workers of a test, collects their samples and merges them."""

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
        self._reports = {client.id: self._report(client.id, number) for number, client in enumerate(clients)}
        self._running = True
        gevent.spawn(self._watch)

    def _report(self, client_id: str, number: int) -> WorkerReport:
        folder = self._environment.parsed_options.samples_out
        return WorkerReport(client_id, number, folder=Path(folder) if folder else None)

    def _spawned(self, **_: object) -> None:
        """Divide the rate over the workers that have users for it, before they hear that all users are spawned."""
        holders = [client for client in self._runner.clients.all if client.user_classes_count.get(PACED_CLASS)]
        for part, client in enumerate(holders):
            share = {"part": part, "parts": len(holders), "seed": os.getpid()}
            self._runner.send_message(SHARE, share, client_id=client.id)

    def _watch(self) -> None:
        """Stop the test when a worker is lost: the remaining load is not the intended one."""
        while self._running:
            lost = self._newly_lost()
            if lost:
                self._invalid(f"{', '.join(lost)} lost during the test; the test ends, since its load was incomplete")
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
        """Locust calls this before it disconnects the workers, so there is time to receive their samples."""
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
                self._invalid(f"{', '.join(lost)} lost at the end of the test; its last samples are missing")
            gevent.sleep(0.02)
        silent = self._waiting()
        for report in silent:
            report.lost = True
        if silent:
            self._invalid(f"{', '.join(report.title for report in silent)} did not send its samples")
        self._merge()

    def _waiting(self) -> list[WorkerReport]:
        return [report for report in self._reports.values() if not report.complete and not report.lost]

    def _merge(self) -> None:
        reports = list(self._reports.values())
        folder = self._environment.parsed_options.samples_out
        try:
            for report in reports:
                if report.lost and report.machine == machine():
                    report.recover()
            for sentence in merge_reports(reports, Path(folder) if folder else None):
                logger.info(sentence)
        except (OSError, ValueError) as exc:
            self._invalid(f"the samples of the workers cannot be merged: {exc}")

    def _invalid(self, problem: str) -> None:
        self._environment.process_exit_code = 1
        logger.error(f"INVALID: {problem}")

    def _on_started(self, msg: Any, **_: object) -> None:
        if self._running and msg.node_id not in self._reports:  # it joined during the test
            self._reports[msg.node_id] = self._report(msg.node_id, len(self._reports))
        if msg.node_id in self._reports:
            report, data = self._reports[msg.node_id], msg.data
            report.pid, report.host, report.machine, report.paths = (
                data["pid"], data["host"], data["machine"], data["files"],
            )  # fmt: skip

    def _on_report(self, msg: Any, **_: object) -> None:
        self._heard = monotonic()
        if msg.node_id in self._reports:
            self._reports[msg.node_id].finish(msg.data["files"])

    def _on_samples(self, msg: Any, **_: object) -> None:
        self._heard = monotonic()
        report = self._reports.get(msg.node_id)
        if report is None or report.lost:
            return
        try:
            report.add(msg.data["name"], msg.data["data"])
        except OSError as exc:
            report.lost = True
            self._invalid(f"the samples of {report.title} cannot be stored: {exc.strerror or exc}")


@dataclass(slots=True)
class WorkerReport:
    """A master's record of one worker in one test."""

    client_id: str
    number: int
    host: str = ""
    pid: int = 0
    machine: str = ""
    paths: dict[str, str] = field(default_factory=dict)
    described: dict[str, dict[str, Any]] = field(default_factory=dict)
    folder: Path | None = None
    """Where the samples lie until they are merged; None: where temporary files do."""
    contents: dict[str, BinaryIO] = field(default_factory=dict)
    """The file of each user class; a long test has more samples than memory may hold."""
    complete: bool = False
    lost: bool = False

    @property
    def title(self) -> str:
        where = f" ({self.host}, process {self.pid})" if self.host else f" ({self.client_id})"
        return f"load worker {self.number + 1}{where}"

    def finish(self, files: list[dict[str, Any]]) -> None:
        """All its samples have arrived; `files` describes them."""
        self.described = {file["name"]: file for file in files}
        self.complete = True

    def add(self, name: str, content: bytes) -> None:
        """Raises `OSError`."""
        if name not in self.contents:
            if self.folder is not None:
                self.folder.mkdir(parents=True, exist_ok=True)
            self.contents[name] = tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115 (`close` closes it)
        self.contents[name].write(content)

    def recover(self) -> None:
        """Use its own files, which lie where this process writes: what a worker names is a claim. Raises `OSError` and
        `DocumentError`."""
        for name, text in self.paths.items():
            whole = Path(str(text))
            if self.folder is None or whole.parent != self.folder.resolve() or whole.suffix != ".npy":
                continue
            for path in (part_path(whole), whole):
                with suppress(FileNotFoundError):
                    self.contents[str(name)] = open_inside(whole.parent, path.name)

    def samples(self, name: str) -> Iterator[Samples]:
        """The samples of one user class, in parts. Raises `OSError`, and `ValueError` for an invalid file."""
        if name in self.contents:
            self.contents[name].seek(0)
            yield from read_in_parts(self.contents[name], name)

    def close(self) -> None:
        """Free the files."""
        while self.contents:
            self.contents.popitem()[1].close()


def merge_reports(reports: Sequence[WorkerReport], folder: Path | None) -> Iterator[str]:
    """Write FOLDER/merged-CLASS-TIME.npy and .json for each user class, and close the reports; yields a sentence for
    each class. Users are numbered consecutively over the workers, errors by one list of messages. Raises `OSError`,
    `ValueError`."""
    with ExitStack() as closing:
        for report in reports:
            closing.callback(report.close)
        if folder is not None:
            yield from _merge_classes(reports, folder)


def _merge_classes(reports: Sequence[WorkerReport], folder: Path) -> Iterator[str]:
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
    lost = [report.title for report in reports if report.lost]
    claimed = dict.fromkeys(str(name) for report in reports for name in (*report.described, *report.contents))
    names = [name for name in claimed if name.isidentifier()]  # as classes are called; they become parts of paths
    for name in names:
        holders: list[tuple[WorkerReport, Sequence[str], int]] = []
        workers, first_user, errors = [], 0, 0
        messages_of = [report.described.get(name, {}).get("error_messages", []) for report in reports]
        messages = list(dict.fromkeys(text for texts in messages_of for text in texts))
        for report, texts in zip(reports, messages_of, strict=True):
            worker, users, failed = _worker(report, name, first_user)
            workers.append(worker)
            if users:
                holders.append((report, texts, first_user))
                first_user, errors = first_user + users, errors + failed
        if not holders:
            continue
        path = folder / f"merged-{name}-{stamp}.npy"
        store_samples(path, _renumbered(name, holders, messages))
        requests = sum(worker["requests"] for worker in workers)
        machines = {report.machine for report in reports if report.machine}
        about = {
            "complete": not lost,
            "lost": lost,
            "clock": "one" if len(machines) == 1 else "several",
            "requests": requests,
            "errors": errors,
            "error_messages": [*messages, *(["in a lost worker"] if lost else [])],
            "requests_per_s": sum(worker["requests_per_s"] or 0.0 for worker in workers),
            "workers": workers,
        }
        path.with_suffix(".json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        missing = f"; INCOMPLETE: {', '.join(lost)} lost" if lost else ""
        yield f"{requests:,} samples of {len(holders)} workers: {path}{missing}"


def _renumbered(
    name: str, holders: Sequence[tuple[WorkerReport, Sequence[str], int]], messages: Sequence[str]
) -> Iterator[Samples]:
    """The samples of each worker with its own messages and the number of its first user."""
    for report, texts, first_user in holders:
        for samples in report.samples(name):
            piece = with_errors_of(samples, texts, messages)
            piece["user"] += first_user
            yield piece


def _worker(report: WorkerReport, name: str, first_user: int) -> tuple[dict[str, Any], int, int]:
    """The record of one worker and user class, how many users its samples have, and how many failed."""
    requests = users = failed = 0
    start_ns: int | None = None
    end_ns: int | None = None
    for samples in report.samples(name):
        first_ns, last_ns = int(samples["intended_ns"].min()), int(samples["end_ns"].max())
        start_ns = first_ns if start_ns is None else min(first_ns, start_ns)
        end_ns = last_ns if end_ns is None else max(last_ns, end_ns)
        requests += len(samples)
        users = max(users, int(samples["user"].max()) + 1)
        failed += int((samples["error"] >= 0).sum())
    seconds = 0.0 if start_ns is None or end_ns is None else (end_ns - start_ns) / NS_PER_S
    worker = {
        "host": report.host,
        "pid": report.pid,
        "machine": report.machine,
        "lost": report.lost,
        "requests": requests,
        "first_user": first_user,
        "window_start_ns": start_ns,
        "window_end_ns": end_ns,
        "requests_per_s": requests / seconds if seconds > 0.0 else None,
        "batch_size": report.described.get(name, {}).get("batch_size"),
    }
    return worker, users, failed
