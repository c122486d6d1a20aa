"""What a process of the load generator does: prepares bodies, and runs one block of load at a time through Locust.

All users of a block are spawned and connected first, then start together; a block ends with the last answer. Importing
this module imports locust, which patches the process with gevent.
"""

from __future__ import annotations

import gc
from pathlib import Path
from statistics import median
from time import perf_counter_ns, process_time_ns
from typing import Any

import gevent
from gevent.event import Event
from locust import task
from locust.env import Environment
from locust.exception import StopUser

from loadgen.generator.kept_answers import KeptAnswers
from loadgen.generator.messages import Done, Go, Open, Outcome, Prepare, Refusal, Reply
from loadgen.generator.pacer import OPEN_LEAD_NS, MonotonicTimer, Pacer
from loadgen.generator.users import InferenceUser, Traffic
from loadgen.generator.window import Claim, LoadWindow
from loadgen.records.samples import SampleWriter, median_latency_ns, read_samples
from loadgen.transport.bodies import choose_items, failure_message
from loadgen.transport.exchange import ConnectionRefused
from loadgen.transport.inputs import InputError, read_inputs
from loadgen.transport.promise import Promise
from loadgen.transport.transports import Bodies, Target, prepare_bodies
from loadgen.transport.variation import FreshNumbers, find_variation

_FLUSH_SECONDS = 0.5
_GATHER_SECONDS = 30.0


class BlockError(Exception):
    """A block cannot start; nothing of it is stored."""


class Block:
    """One block of load: `gather`, then `run` once, or `discard`."""

    def __init__(self, command: Open, prepared: Prepare, bodies: dict[int, Bodies]) -> None:
        target = Target(prepared.transport, command.url, prepared.signature.model, command.grpc_address)
        target.connection((), timeout_s=command.timeout_s)  # refused here and not in every user's greenlet
        self.window = LoadWindow(
            command.requests, command.seconds, command.max_seconds,
            latency_bound_ns=command.latency_bound_ns, late_allowed=command.late_allowed,
        )  # fmt: skip
        self._path = None if command.samples_path is None else Path(command.samples_path)
        self._concurrency = command.concurrency
        self._writer = SampleWriter(self._path)
        self.settling = target.sendable(bodies[1].requests[0])
        """The request that every user has answered before the window."""
        chosen = bodies[command.batch_size]
        self._traffic = Traffic(
            target, tuple(target.sendable(body) for body in chosen.requests), command.batch_size, self._writer,
            timeout_s=command.timeout_s, others=(self.settling,), first_user=command.first_user, fresh=chosen.fresh,
            promise=Promise(prepared.transport, prepared.signature, command.batch_size),
            kept=KeptAnswers(command.keep_answers, command.keep_seed),
        )  # fmt: skip
        offsets = command.due_offsets_ns()
        self._offsets_ns: list[int] | None = (
            None if offsets is None else offsets[command.part :: command.parts].tolist()
        )
        """This process's share of an open loop's schedule, empty when there are more processes than requests."""
        self.pacer = None if self._offsets_ns is None else Pacer(self.window)
        self.go = Event()
        """All users start."""
        self.connected: list[BlockUser] = []
        self.obstacle: str | None = None
        """Why a user cannot take part, so that the block does not start."""
        self._storage_error: str | None = None
        user_class = type("MeasuredUser", (BlockUser,), {"traffic": self._traffic, "block": self})
        self._runner: Any = Environment(user_classes=[user_class], host=target.url).create_local_runner()

    def gather(self) -> None:
        """Spawn and connect every user and have one small request of each answered, so that no connection is new and
        the server's threads are awake when the window opens. Raises `BlockError`."""
        self._runner.start(self._concurrency, spawn_rate=self._concurrency)
        deadline_ns = perf_counter_ns() + int(_GATHER_SECONDS * 1e9)
        while self.obstacle is None and len(self.connected) < self._concurrency:
            if perf_counter_ns() > deadline_ns:
                self.obstacle = f"only {len(self.connected)} of {self._concurrency} users could connect"
            gevent.sleep(0.001)
        if self.obstacle is not None:
            self.discard()
            raise BlockError(self.obstacle)

    def run(self, start_at_ns: int | None = None) -> Outcome:
        """Run the window, from now or from a later moment, without garbage collection."""
        flusher = gevent.spawn(self._flush)
        gc.collect()
        gc.freeze()
        gc.disable()
        try:
            start_ns = self._await(start_at_ns)
            cpu_ns = process_time_ns()
            self.window.start(start_ns)
            self.go.set()
            if self.pacer is not None:
                self.pacer.run(self._offsets_ns or (), start_ns, self._concurrency)
            self._runner.user_greenlets.join()
            cpu_ns = process_time_ns() - cpu_ns
        finally:
            gc.enable()
            gc.unfreeze()
        flusher.kill()
        reconnects = sum(user.connection.reconnects for user in self.connected)
        self._end_users()
        try:
            self._writer.close()
        except OSError as exc:
            self.storage_failed(exc)
        stored = self._path if self._storage_error is None else None
        return Outcome(
            window_start_ns=start_ns,
            window_end_ns=max(start_ns, self._traffic.last_end_ns),
            requests=self._writer.count,
            errors=self._traffic.errors,
            error_messages=tuple(self._traffic.error_messages),
            cpu_ns=cpu_ns,
            reconnects=reconnects,
            cool_down=self._traffic.unmeasured,
            first_answer_ns=int(median(user.first_answer_ns for user in self.connected)),
            latency_p50_ns=None if stored is None else median_latency_ns(read_samples(stored)),
            cut_reason=self.window.cut_reason,
            storage_error=self._storage_error,
            transport=self._traffic.target.transport,
            body_payload_bytes=tuple(request.payload_bytes for request in self._traffic.requests),
            offered=None if self._offsets_ns is None else len(self._offsets_ns),
            due_span_ns=self._offsets_ns[-1] - self._offsets_ns[0] if self._offsets_ns else None,
            late=self.window.late,
            answers=self._traffic.kept.read(),
        )

    def _await(self, start_at_ns: int | None) -> int:
        """Wait for the moment at which the window opens and return it; for an open loop a little earlier, or its first
        request would always be late."""
        lead_ns = 0 if self.pacer is None else OPEN_LEAD_NS
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

    def _flush(self) -> None:
        while True:
            gevent.sleep(_FLUSH_SECONDS)
            try:
                self._writer.flush()
            except OSError as exc:
                self.storage_failed(exc)
                return

    def storage_failed(self, exc: OSError) -> None:
        """End the block: samples are lost."""
        self._storage_error = self._storage_error or (exc.strerror or str(exc))
        self.window.cut("the samples cannot be stored")


class BlockUser(InferenceUser):
    """A user that waits for the common start and sends until the window or the schedule ends."""

    abstract = True
    fires_events = False
    block: Block
    first_answer_ns = 0
    """From the start of the connection to its first answer."""

    def on_start(self) -> None:
        """Connect, have one small request answered and wait for the others."""
        block, began_ns = self.block, perf_counter_ns()
        try:
            self.connection.connect()
            exchange = self.connection.send(block.settling)
        except ConnectionRefused as refused:
            block.obstacle = block.obstacle or str(refused)
        else:
            if exchange.good:
                self.first_answer_ns = exchange.end_ns - began_ns
                block.connected.append(self)
            else:
                block.obstacle = block.obstacle or failure_message(exchange)
        block.go.wait()  # for ever where the block does not start

    @task  # type: ignore[untyped-decorator]  # locust ships no usable types
    def load(self) -> None:
        """The whole loop, inside one Locust task: its scheduler costs more than a small request."""
        window, pacer = self.block.window, self.block.pacer
        while True:
            intended_ns, claim = None, None
            if pacer is not None:
                if (intended_ns := pacer.take()) is None:
                    break
            elif (claim := window.claim(perf_counter_ns())) is None:
                break
            try:
                good = self.infer(intended_ns, measured=claim is not Claim.COOL_DOWN)
            except ConnectionRefused as refused:
                window.cut(f"the server accepts no more connections ({refused})")
                break
            except OSError as exc:  # only the sample writer raises it
                self.block.storage_failed(exc)
                break
            except Exception as exc:  # noqa: BLE001 (Locust would log it and continue without the sample)
                window.cut(f"the load generator failed: {exc!r}")
                break
            window.answered(good, 0 if intended_ns is None else self.traffic.last_end_ns - intended_ns, claim)
        raise StopUser


class LocalGenerator:
    """Holds the bodies and at most one block."""

    def __init__(self) -> None:
        self._prepared: dict[str, tuple[Prepare, dict[int, Bodies]]] = {}
        self._numbers = FreshNumbers()
        self._block: Block | None = None

    def answer(self, command: Prepare | Open | Go) -> Reply:
        try:
            match command:
                case Prepare():
                    return self._prepare(command)
                case Open():
                    return self._open(command)
                case Go():
                    return self._go(command)
        except (BlockError, InputError, OSError, ValueError) as exc:
            return Refusal(reason=str(exc))

    def abort(self, reason: str) -> None:
        """End the running block early, where there is one."""
        if self._block is not None:
            self._block.window.cut(reason)

    def close(self) -> None:
        """End a block that was opened and did not run, with what it holds on servers and in shared memory."""
        if self._block is not None:
            self._block.discard()
            self._block = None

    def _prepare(self, command: Prepare) -> Done:
        self._prepared.pop(command.key, None)
        inputs, signature = read_inputs(Path(command.samples_directory), command.payload), command.signature
        variation = find_variation(inputs, signature)
        bodies = {}
        for size in sorted({1, *command.batch_sizes}):
            chosen = choose_items(inputs.count, size, command.seed)
            bodies[size] = prepare_bodies(command.transport, inputs, signature, variation, chosen, self._numbers)
        self._prepared[command.key] = command, bodies
        return Done()

    def _open(self, command: Open) -> Done:
        self.close()
        prepared, bodies = self._prepared.get(command.key, (None, {}))
        if prepared is None or command.batch_size not in bodies:
            raise BlockError(f"no bodies of batch size {command.batch_size} are prepared")
        self._block = Block(command, prepared, bodies)
        self._block.gather()
        return Done()

    def _go(self, command: Go) -> Outcome:
        if self._block is None:
            raise BlockError("no block is open")
        try:
            return self._block.run(command.start_ns)
        finally:
            self._block = None
