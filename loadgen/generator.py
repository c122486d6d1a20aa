"""The load generator's process: `python -m loadgen.generator` reads commands from standard input, a line each.

It runs one block at a time through Locust. Only this process imports locust and is patched by gevent; what drives it
(`loadgen.generator_process`) is not. Commands and replies are in `loadgen.generator_messages`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import gevent
import msgspec
from gevent.fileobject import FileObjectPosix
from gevent.queue import Queue

from loadgen.block import Block, BlockError
from loadgen.bodies import PreparedBody, prepare_bodies
from loadgen.clients.requests import Address
from loadgen.generator_messages import (
    Abort,
    Command,
    Go,
    Message,
    Open,
    Opened,
    Outcome,
    Prepare,
    Prepared,
    Refusal,
    Reply,
)
from loadgen.inputs import InputError, read_samples


class Generator:
    """Holds the bodies and at most one block."""

    def __init__(self) -> None:
        self._bodies: dict[int, tuple[PreparedBody, ...]] = {}
        self._model = ""
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
                    return self._go()
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
        self._bodies = {}
        inputs = read_samples(Path(command.samples_directory), command.payload)
        self._model = command.signature.model
        for batch_size in sorted({1, *command.batch_sizes}):
            self._bodies[batch_size] = prepare_bodies(inputs, command.signature, batch_size, command.seed)
        return Prepared(body_bytes=sum(len(body.body) for bodies in self._bodies.values() for body in bodies))

    def _open(self, command: Open) -> Opened:
        if self._block is not None:
            self._block.discard()
            self._block = None
        if command.batch_size not in self._bodies:
            raise BlockError(f"no bodies of batch size {command.batch_size} are prepared")
        address = Address.parse(command.url)
        requests = tuple(body.request(address, self._model) for body in self._bodies[command.batch_size])
        settling = self._bodies[1][0].request(address, self._model)
        self._block = Block(command, address, requests)
        self._block.gather(settling)
        return Opened()

    def _go(self) -> Outcome:
        if self._block is None:
            raise BlockError("no block is open")
        try:
            return self._block.run()
        finally:
            self._block = None


def _lines(descriptor: int) -> Iterator[bytes]:
    with FileObjectPosix(descriptor, "rb") as stream:
        yield from stream


def main() -> None:
    """Serve until standard input closes. Replies own the original standard output; stray prints go to standard
    error, where they break nothing."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the runner's to interpret
    replies = os.dup(1)
    os.dup2(2, 1)
    generator = Generator()
    commands: Queue[Command | None] = Queue()
    decoder = msgspec.json.Decoder(Command)

    def listen() -> None:
        with suppress(OSError):
            for line in _lines(0):
                command = decoder.decode(line)
                if isinstance(command, Abort) and generator.abort(command.reason):
                    continue
                commands.put(command)
        generator.abort("the runner has gone")
        commands.put(None)

    gevent.spawn(listen)
    while (command := commands.get()) is not None:
        _send(replies, generator.answer(command))


def _send(descriptor: int, reply: Message) -> None:
    line = memoryview(msgspec.json.encode(reply) + b"\n")
    while line:
        line = line[os.write(descriptor, line) :]


if __name__ == "__main__":
    main()
