"""One process of the load generator: `python -m loadgen.generator` reads commands from standard input, one per line.

It runs one block at a time. This process is patched by gevent; its driver (`loadgen.generator.process`) is not.
Commands and replies are in `loadgen.generator.messages`.
"""

# ruff: noqa: E402 (gevent patches before anything else is imported)
from __future__ import annotations

from gevent import monkey

monkey.patch_all()

import os
import signal
from contextlib import suppress

import gevent
import msgspec
from gevent.fileobject import FileObjectPosix
from gevent.queue import Queue

from loadgen.generator.block import LocalGenerator
from loadgen.generator.messages import Abort, Alive, Command, Go, Message, Open

_ALIVE_SECONDS = 1.0


def main() -> None:
    """Serve until standard input closes. Replies get the original standard output; other prints go to standard error,
    where they cannot be taken for replies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver decides what Ctrl-C does
    replies = os.dup(1)
    os.dup2(2, 1)
    generator = LocalGenerator()
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
            _send(replies, Alive())

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


def _send(descriptor: int, message: Message) -> None:
    line = memoryview(msgspec.json.encode(message) + b"\n")
    while line:
        line = line[os.write(descriptor, line) :]


if __name__ == "__main__":
    main()
