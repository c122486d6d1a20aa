"""One block of load, run through Locust: spawn and connect all users, start them together, wait for the last answer."""

from __future__ import annotations

import gc
from pathlib import Path
from time import perf_counter_ns, process_time_ns
from typing import Any

import gevent
from gevent.event import Event
from locust import task
from locust.env import Environment
from locust.exception import StopUser

from loadgen.clients.bodies import failure_message
from loadgen.clients.exchange import ConnectionRefused
from loadgen.clients.transports import Door, Sendable
from loadgen.experiment.arrivals import arrival_count, due_offsets_ns
from loadgen.generator.messages import Open, Outcome
from loadgen.generator.pacer import MonotonicTimer, Pacer
from loadgen.generator.users import InferenceUser, Traffic
from loadgen.generator.window import LoadWindow
from loadgen.records.sample_files import SampleWriter, read_samples

_FLUSH_SECONDS = 0.5
_GATHER_SECONDS = 30.0
_OPEN_LEAD_NS = 20_000_000
"""Between the start of an open loop and its first request, which would otherwise always be late."""


class BlockError(Exception):
    """A block cannot start; nothing of it is stored."""


class Block:
    """From the command to the outcome: `gather`, then `run` once, or `discard`."""

    def __init__(self, command: Open, door: Door, requests: tuple[Sendable, ...], *, settling: Sendable) -> None:
        self.window = LoadWindow(
            command.requests, command.seconds, command.max_seconds,
            latency_bound_ns=command.latency_bound_ns, late_allowed=command.late_allowed,
        )  # fmt: skip
        self._path = None if command.samples_path is None else Path(command.samples_path)
        self._concurrency = command.concurrency
        self._writer = SampleWriter(self._path)
        self._settling = settling
        self._traffic = Traffic(
            door, requests, command.batch_size, self._writer,
            timeout_s=command.timeout_s, others=(settling,), first_user=command.first_user,
        )  # fmt: skip
        self._offsets_ns = _schedule(command)
        self.pacer = None if self._offsets_ns is None else Pacer(self.window)
        self._go = Event()
        self._users: list[BlockUser] = []
        self._obstacle: str | None = None
        self._storage_error: str | None = None
        user_class = type("MeasuredUser", (BlockUser,), {"traffic": self._traffic, "block": self})
        self._environment = Environment(user_classes=[user_class], host=door.url)
        self._runner: Any = self._environment.create_local_runner()

    def gather(self) -> None:
        """Spawn and connect every user, then send one small request on the first connection, so that the server's
        threads are awake when the window opens. Raises `BlockError`."""
        self._runner.start(self._concurrency, spawn_rate=self._concurrency)
        deadline_ns = perf_counter_ns() + int(_GATHER_SECONDS * 1e9)
        while self._obstacle is None and len(self._users) < self._concurrency:
            if perf_counter_ns() > deadline_ns:
                self._obstacle = f"only {len(self._users)} of {self._concurrency} users could connect"
            gevent.sleep(0.001)
        if self._obstacle is None:
            try:
                exchange = self._users[0].connection.send(self._settling)
            except ConnectionRefused as refused:
                self._obstacle = str(refused)
            else:
                self._obstacle = None if exchange.good else failure_message(exchange)
        if self._obstacle is not None:
            self.discard()
            raise BlockError(self._obstacle)

    def run(self, start_at_ns: int | None = None) -> Outcome:
        """The window, from now or from a moment to come. Garbage collection is off inside it."""
        flusher = gevent.spawn(self._flush)
        gc.collect()
        gc.freeze()
        gc.disable()
        try:
            start_ns = self._await(start_at_ns)
            cpu_ns = process_time_ns()
            self.window.start(start_ns)
            self._go.set()
            if self.pacer is not None:
                self.pacer.run(self._offsets_ns or (), start_ns, self._concurrency)
            self._runner.user_greenlets.join()
            cpu_ns = process_time_ns() - cpu_ns
        finally:
            gc.enable()
            gc.unfreeze()
        flusher.kill()
        reconnects = sum(user.connection.reconnects for user in self._users)
        self._end_users()
        self._close_samples()
        return Outcome(
            window_start_ns=start_ns,
            window_end_ns=max(start_ns, self._traffic.last_end_ns),
            requests=self._writer.count,
            errors=self._traffic.errors,
            error_messages=tuple(self._traffic.error_messages),
            cpu_ns=cpu_ns,
            reconnects=reconnects,
            latency_p50_ns=self._median_ns(),
            cut_reason=self.window.cut_reason,
            storage_error=self._storage_error,
            transport=self._traffic.door.transport,
            body_payload_bytes=tuple(request.payload_bytes for request in self._traffic.requests),
            offered=None if self._offsets_ns is None else len(self._offsets_ns),
            due_span_ns=self._offsets_ns[-1] - self._offsets_ns[0] if self._offsets_ns else None,
            late=self.window.late,
        )

    def _await(self, start_at_ns: int | None) -> int:
        """The moment at which the window opens, when it has come; an open loop's first request is due a little later
        than this returns."""
        lead_ns = 0 if self.pacer is None else _OPEN_LEAD_NS
        start_ns = start_at_ns or perf_counter_ns() + lead_ns
        timer = MonotonicTimer()
        timer.wait_until(start_ns - lead_ns)
        timer.close()
        return start_ns

    def discard(self) -> None:
        """End the users and remove the sample file of a block that did not run."""
        self._end_users()
        self._writer.abandon()

    def _end_users(self) -> None:
        self._runner.quit()
        self._traffic.close()

    def joined(self, user: BlockUser) -> None:
        """A user is connected; returns when all are to start."""
        self._users.append(user)
        self.wait_for_start()

    def wait_for_start(self) -> None:
        """Returns when all users are to start."""
        self._go.wait()

    def obstructed(self, reason: str) -> None:
        """A user cannot take part."""
        self._obstacle = self._obstacle or reason

    def _flush(self) -> None:
        while True:
            gevent.sleep(_FLUSH_SECONDS)
            try:
                self._writer.flush()
            except OSError as exc:
                self.storage_failed(exc)
                return

    def _close_samples(self) -> None:
        try:
            self._writer.close()
        except OSError as exc:
            self.storage_failed(exc)

    def storage_failed(self, exc: OSError) -> None:
        """Samples are lost, so the block is."""
        self._storage_error = self._storage_error or (exc.strerror or str(exc))
        self.window.cut("the samples cannot be stored")

    def _median_ns(self) -> int | None:
        if self._path is None or self._storage_error is not None:
            return None
        samples = read_samples(self._path)
        good = samples[samples["error"] < 0]
        if not len(good):
            return None
        ordered = sorted((good["end_ns"] - good["intended_ns"]).tolist())
        return int(ordered[len(ordered) // 2])


def _schedule(command: Open) -> list[int] | None:
    """This worker's share of an open loop's schedule, which is empty where there are more workers than requests; None
    in a closed loop."""
    if command.arrivals == "closed" or command.rate_per_s is None:
        return None
    count = arrival_count(command.rate_per_s, command.requests, command.seconds, command.max_seconds)
    offsets = due_offsets_ns(command.arrivals, command.rate_per_s, count, command.arrivals_seed)
    own: list[int] = offsets[command.part :: command.parts].tolist()
    return own


class BlockUser(InferenceUser):
    """A user that waits for the common start and sends until the window, or the schedule, has had enough."""

    abstract = True
    fires_events = False
    block: Block

    def on_start(self) -> None:
        """Connect and wait for the others."""
        try:
            self.connection.connect()
        except ConnectionRefused as refused:
            self.block.obstructed(str(refused))  # the block will not start, so `load` is never reached
            self.block.wait_for_start()
            return
        self.block.joined(self)

    @task  # type: ignore[untyped-decorator]  # locust ships no usable types
    def load(self) -> None:
        """The whole loop, inside one Locust task: its scheduler costs more than a small request."""
        window, pacer = self.block.window, self.block.pacer
        while True:
            intended_ns = None
            if pacer is not None:
                if (intended_ns := pacer.take()) is None:
                    break
            elif not window.claim(perf_counter_ns()):
                break
            try:
                good = self.infer(intended_ns)
            except ConnectionRefused as refused:
                window.cut(f"the server takes no connections any more ({refused})")
                break
            except OSError as exc:  # only the sample writer raises it
                self.block.storage_failed(exc)
                break
            except Exception as exc:  # noqa: BLE001 (Locust would log it and go on, without the sample)
                window.cut(f"the load generator failed: {exc!r}")
                break
            window.answered(good, 0 if intended_ns is None else self.traffic.last_end_ns - intended_ns)
        raise StopUser
