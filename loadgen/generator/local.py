"""What a process of the load generator does with each command: prepares bodies, opens a block, runs it.

Importing this module imports locust, which patches the process with gevent.
"""

from __future__ import annotations

from pathlib import Path

from loadgen.clients.inputs import InputError, read_inputs
from loadgen.clients.transports import Body, Door, prepare_all
from loadgen.generator.block import Block, BlockError
from loadgen.generator.messages import (
    Abort,
    Command,
    Go,
    Open,
    Opened,
    Outcome,
    Prepare,
    Prepared,
    Refusal,
    Reply,
)


class LocalGenerator:
    """Holds the bodies and at most one block."""

    def __init__(self) -> None:
        self._prepared: dict[str, Prepare] = {}
        self._bodies: dict[str, dict[int, tuple[Body, ...]]] = {}
        self._block: Block | None = None

    def answer(self, command: Command) -> Reply:
        """Do what one command says."""
        try:
            match command:
                case Prepare():
                    return self._prepare(command)
                case Open():
                    return self._open(command)
                case Go():
                    return self._go(command)
                case Abort():
                    return Refusal(reason="no block is running")
        except (BlockError, InputError, OSError, ValueError) as exc:
            return Refusal(reason=str(exc))

    def abort(self, reason: str) -> bool:
        """End the running window early; False where there is none."""
        if self._block is None:
            return False
        self._block.window.cut(reason)
        return True

    def _prepare(self, command: Prepare) -> Prepared:
        self._bodies.pop(command.key, None)
        inputs = read_inputs(Path(command.samples_directory), command.payload)
        bodies = {
            batch_size: prepare_all(command.transport, inputs, command.signature, batch_size, command.seed)
            for batch_size in sorted({1, *command.batch_sizes})
        }
        self._prepared[command.key], self._bodies[command.key] = command, bodies
        return Prepared(body_bytes=sum(body.payload_bytes for several in bodies.values() for body in several))

    def _open(self, command: Open) -> Opened:
        self.discard()
        bodies = self._bodies.get(command.key, {})
        if command.batch_size not in bodies:
            raise BlockError(f"no bodies of batch size {command.batch_size} are prepared")
        prepared = self._prepared[command.key]
        door = Door(prepared.transport, command.url, prepared.signature.model, command.grpc_address)
        door.connection((), timeout_s=command.timeout_s)  # refused here and not in every user's greenlet
        requests = tuple(door.sendable(body) for body in bodies[command.batch_size])
        self._block = Block(command, door, requests, settling=door.sendable(bodies[1][0]))
        self._block.gather()
        return Opened()

    def discard(self) -> None:
        """End a block that was opened and did not run, with what it holds on servers and in shared memory."""
        if self._block is not None:
            self._block.discard()
            self._block = None

    def _go(self, command: Go) -> Outcome:
        if self._block is None:
            raise BlockError("no block is open")
        try:
            return self._block.run(command.start_ns)
        finally:
            self._block = None

    def close(self) -> None:
        """End what is open."""
        self.discard()
