"""One process of the load generator: `python -m loadgen.client.worker` reads commands, one per line, and runs blocks.

Commands come from standard input; they and the replies are in `loadgen.client.messages`. Each user is a greenlet: this
process is patched by gevent, its driver (`loadgen.client.generator`) is not. All users of a block connect first, then
settle: each has one small request answered. Then they start together; a block ends with the last answer.
"""

# ruff: noqa: E402 (gevent patches before anything else is imported)
from __future__ import annotations

from gevent import monkey

monkey.patch_all()

import gc
import os
import signal
from collections.abc import Mapping, Sized
from contextlib import ExitStack, suppress
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter_ns, process_time_ns
from typing import Any

import gevent
import msgspec
from gevent.event import Event
from gevent.fileobject import FileObjectPosix
from gevent.lock import Semaphore
from gevent.queue import Queue

from loadgen.base.documents import one_line
from loadgen.client.bodies import choose_items, find_variation, fresh_numbers
from loadgen.client.connection import ClientConnection, ConnectionRefused
from loadgen.client.generation import PreparedPrompts, prepare_prompts
from loadgen.client.inputs import InputError, read_inputs
from loadgen.client.messages import (
    CONNECT_SECONDS,
    Abort,
    BlockOutcome,
    Command,
    CommandReply,
    GeneratorError,
    Go,
    Open,
    Prepare,
    Reply,
)
from loadgen.client.outputs import ExpectedOutputs
from loadgen.client.pacer import OPEN_LEAD_NS, MonotonicTimer, Pacer
from loadgen.client.recorded import RecordedBodies, prepare_recorded, prepare_recorded_prompts, prepare_trace
from loadgen.client.token_traffic import TokenTraffic
from loadgen.client.traffic import Counts, KeptAnswers, LoadWindow, Traffic, shared_counts
from loadgen.client.transports import InferenceTarget, PreparedBodies, prepare_bodies
from loadgen.experiment.prompts import SETTLING, PromptShape
from loadgen.records.samples import NS_PER_S, SampleWriter
from loadgen.records.targets import TOKEN_TRANSPORTS, is_token_transport

_FLUSH_SECONDS = 0.5

BodyShape = tuple[int, int | None] | PromptShape | tuple[str, str]
"""The batch size of a body, and the length of all its items; None: of any. Of a language model the shape of a prompt.
Or the source of a replay's requests."""
AnyBodies = PreparedBodies | PreparedPrompts | RecordedBodies
Prepared = Mapping[BodyShape, AnyBodies]

_ALIVE_SECONDS = 1.0


class Block:
    """One block of load: `gather`, then `run` once, or `discard`."""

    def __init__(self, command: Open, prepared: Prepare, bodies: Prepared, counts: Counts | None) -> None:
        """Raises `OSError` when something cannot be opened."""
        target = InferenceTarget(
            prepared.transport, command.url, prepared.signature.model, command.grpc_address, command.access,
            prepared.signature.batched,
        )  # fmt: skip
        target.connection((), timeout_s=command.timeout_s)  # refused here and not in every user's greenlet
        offsets = command.due_offsets_ns()
        self._offsets_ns: list[int] | None = (
            None if offsets is None else offsets[command.part :: command.parts].tolist()
        )
        """This process's share of an open loop's schedule, empty when there are more processes than requests."""
        self.window = LoadWindow(
            command.requests, command.seconds, command.max_seconds,
            latency_bound_ns=command.latency_bound_ns, late_allowed=command.late_allowed,
            counts=counts, part=command.part,
        )  # fmt: skip
        self._path = None if command.samples_path is None else Path(command.samples_path)
        self._users = range(command.first_user, command.first_user + command.concurrency)
        self._settling = target.sendable(bodies[SETTLING].requests[0])
        """The request that every user has answered before the window."""
        with ExitStack() as undo:  # what was opened before something cannot be
            self._pacer = None if self._offsets_ns is None else Pacer(self.window)
            self._timer = MonotonicTimer() if self._pacer is None else self._pacer.timer
            undo.callback(self._timer.close)
            self._writer = SampleWriter(self._path)
            undo.callback(self._writer.abandon)
            answers, others = KeptAnswers(command.keep_answers, command.keep_seed), (self._settling,)
            chosen = _of_block(bodies[_key(command)], command)
            in_order = command.replay is not None
            shared: dict[str, Any] = {
                "timeout_s": command.timeout_s, "others": others, "answers": answers,
                "first_body": command.part if in_order else command.first_body,
                "body_step": command.parts if in_order else 1,
            }  # fmt: skip
            if isinstance(chosen, PreparedPrompts):
                self._traffic: Traffic = TokenTraffic(target, chosen, self._writer, self._path, **shared)
            elif isinstance(chosen, RecordedBodies):
                self._traffic = Traffic(target, chosen, 1, self._writer, sizes=chosen.sizes, **shared)
            else:
                expected = ExpectedOutputs(prepared.transport, prepared.signature, command.batch_size)
                self._traffic = Traffic(target, chosen, command.batch_size, self._writer, expected=expected, **shared)
            undo.pop_all()
        self._go = Event()
        """Set when all users start."""
        self._greenlets: list[gevent.Greenlet] = []
        self._command = command
        self._connected: list[ClientConnection] = []
        self._turns = Semaphore(0)
        """How many more users may settle now."""
        self._first_answers_ns: list[int] = []
        """Time of connecting and of the first answer, of each user that has settled."""
        self._obstacle: str | None = None
        """Why a user cannot take part, so that the block does not start."""
        self._storage_error: str | None = None

    def gather(self) -> None:
        """Connect every user and have one small request of each answered, so that no connection is new and the
        server's threads are awake when the window opens. Raises `GeneratorError`.

        Connecting takes the network's time, settling the model's: one user settles alone, and the time of its answer
        says how many of the others may settle together, and how long all of them may take.
        """
        self._greenlets = [gevent.spawn(self._user, number) for number in self._users]
        try:
            users, command = len(self._users), self._command
            self._await_users(
                self._connected, users, CONNECT_SECONDS,
                "could connect; use fewer users or let the server accept more connections",
            )  # fmt: skip
            began_ns = perf_counter_ns()
            self._turns.release()
            self._await_users(self._first_answers_ns, 1, CONNECT_SECONDS + command.answer_limit_s, "had an answer")
            alone_s = (perf_counter_ns() - began_ns) / NS_PER_S
            for _ in range(command.settling_users(alone_s) - 1):
                self._turns.release()
            self._await_users(
                self._first_answers_ns, users, command.settling_s(alone_s),
                f"had a first answer, where one request alone took {alone_s:.3g} s; use fewer users",
            )  # fmt: skip
        except GeneratorError:
            self.discard()
            raise

    def _await_users(self, there: Sized, users: int, limit_s: float, what: str) -> None:
        """Raises `GeneratorError` with the obstacle that a user met, or if `there` has fewer users after `limit_s`."""
        deadline_ns = perf_counter_ns() + int(limit_s * NS_PER_S)
        while len(there) < users:
            if (obstacle := self._obstacle or self.window.cut_reason) is not None:
                raise GeneratorError(obstacle)
            if perf_counter_ns() > deadline_ns:
                raise GeneratorError(f"after {limit_s:.3g} s only {len(there)} of {len(self._users)} users {what}")
            gevent.sleep(0.001)

    def run(self, start_at_ns: int | None = None) -> BlockOutcome:
        """Run the block, from now or from a later moment, without garbage collection. If that fails, all users are
        ended."""
        flusher = gevent.spawn(self._flush)
        try:
            return self._run(start_at_ns)
        except BaseException:
            self.discard()
            raise
        finally:
            flusher.kill()

    def _run(self, start_at_ns: int | None) -> BlockOutcome:
        gc.collect()
        gc.disable()
        try:
            start_ns = self._await(start_at_ns)
            cpu_ns, reconnects, waited_ns = process_time_ns(), self._reconnects(), _waited_ns()
            self.window.start(start_ns)
            self._go.set()
            if self._pacer is not None:
                self._pacer.run(self._offsets_ns or (), start_ns, len(self._users))
            gevent.joinall(self._greenlets)
            cpu_ns, reconnects = process_time_ns() - cpu_ns, self._reconnects() - reconnects
            waited = (waited_ns, _waited_ns())
        finally:
            gc.enable()
        self._timer.close()
        self._traffic.close()
        try:
            try:
                self._traffic.finish()
            finally:
                self._writer.close()
        except OSError as exc:
            self._storage_failed(exc)
        except Exception as exc:  # noqa: BLE001 (what was stored of the block is kept)
            self.window.cut(f"the load generator failed: {one_line(repr(exc))}")
        return BlockOutcome(
            window_start_ns=start_ns,
            window_end_ns=max(start_ns, self._traffic.last_end_ns),
            requests=self._writer.count,
            errors=self._traffic.errors,
            error_messages=tuple(self._traffic.error_messages),
            cpu_ns=cpu_ns,
            generator_waited_ns=None if waited[0] is None or waited[1] is None else waited[1] - waited[0],
            spin_ns=0 if self._pacer is None else self._pacer.spun_ns,
            reconnects=reconnects,
            cool_down=self._traffic.unmeasured,
            cool_down_ns=self._traffic.unmeasured_ns,
            cool_down_tokens=self._traffic.unmeasured_tokens,
            first_answer_ns=int(median(self._first_answers_ns)),
            cut_reason=self.window.cut_reason,
            storage_error=self._storage_error,
            transport=self._traffic.target.transport,
            body_payload_bytes=tuple(request.payload_bytes for request in self._traffic.requests),
            offered=None if self._offsets_ns is None else len(self._offsets_ns),
            due_span_ns=self._offsets_ns[-1] - self._offsets_ns[0] if self._offsets_ns else None,
            late=self.window.late,
            answers=self._traffic.answers.read(),
        )

    def _reconnects(self) -> int:
        """Reconnects of all users so far: a server may close connections also before the window, while users wait for
        the others to settle."""
        return sum(connection.reconnects for connection in self._connected)

    def _await(self, start_at_ns: int | None) -> int:
        """Wait for the moment at which the window opens and return it; for an open loop a little earlier, or its first
        request would always be late."""
        lead_ns = 0 if self._pacer is None else OPEN_LEAD_NS
        start_ns = start_at_ns or perf_counter_ns() + lead_ns
        self._timer.wait_until(start_ns - lead_ns)
        return start_ns

    def discard(self) -> None:
        """End the users and remove the sample file of a block that has no outcome. Idempotent."""
        gevent.killall(self._greenlets)
        self._timer.close()
        self._traffic.close()
        self._writer.abandon()

    def _flush(self) -> None:
        while True:
            gevent.sleep(_FLUSH_SECONDS)
            try:
                self._writer.flush()
            except OSError as exc:
                self._storage_failed(exc)
                return

    def _storage_failed(self, exc: OSError) -> None:
        """End the block because samples are lost."""
        self._storage_error = self._storage_error or (exc.strerror or str(exc))
        self.window.cut("the samples cannot be stored")

    def _user(self, number: int) -> None:
        """Connect, have one small request answered, wait for the others, then send until the block ends."""
        try:
            connection = self._settle()
        except Exception as exc:  # noqa: BLE001 (gevent would only print it, and the block would wait for this user)
            self._obstacle = self._obstacle or (
                str(exc) if isinstance(exc, (GeneratorError, ConnectionRefused)) else repr(exc)
            )
            return
        self._go.wait()
        try:
            self._send(connection, number)
        except ConnectionRefused as refused:
            self.window.cut(f"the server accepts no more connections ({refused})")
        except OSError as exc:  # only the sample writer raises it
            self._storage_failed(exc)
        except Exception as exc:  # noqa: BLE001 (gevent would only print it, and the sample would be missing)
            self.window.cut(f"the load generator failed: {exc!r}")

    def _settle(self) -> ClientConnection:
        """A connection on which one request was answered. Raises `GeneratorError`, `ConnectionRefused`."""
        connection, began_ns = self._traffic.connection(), perf_counter_ns()
        connection.connect()
        connected_ns = perf_counter_ns() - began_ns
        self._connected.append(connection)
        with self._turns:
            exchange = connection.send(self._settling)
        if (fault := self._traffic.settling_fault(connection, exchange)) is not None:
            raise GeneratorError(fault)
        self._first_answers_ns.append(connected_ns + exchange.end_ns - exchange.send_ns)
        return connection

    def _send(self, connection: ClientConnection, number: int) -> None:
        window, pacer, traffic = self.window, self._pacer, self._traffic
        while True:
            intended_ns, claim = None, None
            if pacer is not None:
                if (intended_ns := pacer.take()) is None:
                    return
            elif (claim := window.claim(perf_counter_ns())) is None:
                return
            exchange, fault = traffic.infer(connection, number, intended_ns, measured=claim != "cool-down")
            window.answered(fault is None, 0 if intended_ns is None else exchange.end_ns - intended_ns, claim)


def _key(command: Open) -> BodyShape:
    """Which of the prepared bodies a block sends."""
    if command.replay is not None:
        return command.replay.source
    return command.shape or (command.batch_size, command.length)


def _of_block(bodies: AnyBodies, command: Open) -> AnyBodies:
    """What a block sends of the prepared bodies: of a replay its window."""
    if command.replay is None:
        return bodies
    assert not isinstance(bodies, PreparedBodies)
    first, window = command.replay.window(command.arrivals_seed)
    return bodies.window(first, len(window), command.replay_number)


class BlockRunner:
    """Carries out the commands: holds the prepared bodies and the block, if one is open."""

    def __init__(self) -> None:
        self._prepared: dict[str, tuple[Prepare, Prepared]] = {}
        self._numbers = fresh_numbers()
        self._block: Block | None = None
        self._counts: Counts | None = None
        """Memory that this process shares with the others of its generator."""

    def answer(self, command: Prepare | Open | Go) -> Reply:
        try:
            match command:
                case Prepare():
                    return self._prepare(command)
                case Open():
                    return self._open(command)
                case Go():
                    return self._go(command)
        except (GeneratorError, InputError, OSError, ValueError) as exc:
            return CommandReply(refusal=str(exc))
        except Exception as exc:  # noqa: BLE001 (the block is lost, and the generator is not)
            return CommandReply(refusal=f"the load generator failed: {one_line(repr(exc))}")

    def abort(self, reason: str) -> None:
        """End the running block early, if there is one."""
        if self._block is not None:
            self._block.window.cut(reason)

    def close(self) -> None:
        """End a block that was opened and did not run, and free what it holds on servers and in shared memory."""
        if self._block is not None:
            self._block.discard()
            self._block = None

    def _prepare(self, command: Prepare) -> CommandReply:
        self._prepared.pop(command.key, None)
        self._prepared[command.key] = command, self._prompts(command) or self._bodies(command)
        return CommandReply()

    def _prompts(self, command: Prepare) -> Prepared:
        """The bodies for a language model; none for another one."""
        plan, transport = command.prompts, command.transport
        if plan is None:
            return {}
        if not is_token_transport(transport):
            raise GeneratorError(
                f"prompts cannot be sent over {transport}; choose one of {', '.join(TOKEN_TRANSPORTS)}"
            )
        model = command.signature.model
        bodies: dict[BodyShape, AnyBodies] = {
            shape: prepare_prompts(transport, model, plan, shape, self._numbers, command.body)
            for shape in {SETTLING, *plan.shapes}
        }
        for source, replay in command.sources.items():
            prepare = prepare_trace if replay.is_trace else prepare_recorded_prompts
            bodies[source] = prepare(transport, model, plan, replay, command.body)
        return bodies

    def _bodies(self, command: Prepare) -> Prepared:
        inputs, signature = read_inputs(Path(command.samples_directory), command.payload), command.signature
        variation = find_variation(inputs, signature)
        bodies: dict[BodyShape, AnyBodies] = {}
        for shape in product(sorted({1, *command.batch_sizes}), (None, *command.lengths)):
            chosen = choose_items(inputs, shape[0], command.seed, length=shape[1])
            bodies[shape] = prepare_bodies(command.transport, inputs, signature, variation, chosen, self._numbers)
        bodies[SETTLING] = bodies[1, None]
        for source, replay in command.sources.items():
            bodies[source] = prepare_recorded(replay, signature)
        return bodies

    def _open(self, command: Open) -> CommandReply:
        self.close()
        prepared, bodies = self._prepared.get(command.key, (None, {}))
        if prepared is not None and command.shape is not None and command.shape not in bodies:
            raise GeneratorError(f"no prompts of {command.shape.prompt_tokens} tokens are prepared for such answers")
        if prepared is None or _key(command) not in bodies:
            of_length = "" if command.length is None else f" and length {command.length}"
            raise GeneratorError(f"no bodies of batch size {command.batch_size}{of_length} are prepared")
        if command.counts is not None and self._counts is None:
            self._counts = shared_counts(command.counts)
        self._block = Block(command, prepared, bodies, self._counts)
        try:
            self._block.gather()
        except GeneratorError:
            self._block = None
            raise
        return CommandReply()

    def _go(self, command: Go) -> BlockOutcome:
        if self._block is None:
            raise GeneratorError("no block is open")
        try:
            return self._block.run(command.start_ns)
        finally:
            self._block = None


def main() -> None:
    """Serve until standard input closes. Replies get the original standard output; other prints go to standard error,
    where they cannot be taken for replies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver decides what Ctrl-C does
    replies = os.dup(1)
    os.dup2(2, 1)
    gc.freeze()  # modules live as long as the process; a collection before each block took 20 ms to find that out again
    generator = BlockRunner()
    commands: Queue[Command | None] = Queue()

    def listen() -> None:
        decoder = msgspec.json.Decoder(Command)
        with suppress(OSError), FileObjectPosix(0, "rb") as lines:
            for line in lines:
                command = decoder.decode(line)
                if isinstance(command, Abort):
                    generator.abort(command.reason)
                else:
                    commands.put(command)
        generator.abort("the program that controls the load generator has ended")
        commands.put(None)

    def say_alive() -> None:
        while True:
            gevent.sleep(_ALIVE_SECONDS)
            _send(replies, None)

    gevent.spawn(listen)
    try:
        while (command := commands.get()) is not None:
            heartbeat = gevent.spawn(say_alive) if isinstance(command, Open | Go) else None
            reply = generator.answer(command)
            if heartbeat is not None:
                heartbeat.kill()
            _send(replies, reply)
    finally:
        generator.close()


def _send(descriptor: int, message: Reply | None) -> None:
    line = memoryview(msgspec.json.encode(message) + b"\n")
    while line:
        line = line[os.write(descriptor, line) :]


def _waited_ns() -> int | None:
    """Time in which this thread could have run and had no core: the kernel's run delay, which a CPU quota adds to. None
    without such a kernel."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_bytes().split()[1])
    except (OSError, IndexError, ValueError):
        return None


if __name__ == "__main__":
    main()
