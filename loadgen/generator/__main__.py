"""The load generator's process: `python -m loadgen.generator` reads commands from standard input, a line each.

It runs one block at a time through Locust, or with `--processes N` has N workers run it. Only this process and its
workers import locust and are patched by gevent; what drives it (`loadgen.generator.process`) is not. Commands and
replies are in `loadgen.generator.messages`.
"""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import gevent
import msgspec
from gevent.fileobject import FileObjectPosix
from gevent.queue import Queue

from loadgen.generator.block import LocalGenerator
from loadgen.generator.distributed import DistributedGenerator
from loadgen.generator.messages import Abort, Command, Message


def _lines(descriptor: int) -> Iterator[bytes]:
    with FileObjectPosix(descriptor, "rb") as stream:
        yield from stream


def main() -> None:
    """Serve until standard input closes. Replies own the original standard output; stray prints go to standard
    error, where they break nothing."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, default=1, help="Workers that share the load.")
    parser.add_argument("--logs", type=Path, default=Path("generator"), help="Begin of the names of their logs.")
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the runner's to interpret
    replies = os.dup(1)
    os.dup2(2, 1)
    generator = LocalGenerator() if options.processes == 1 else DistributedGenerator(options.processes, options.logs)
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
    try:
        while (command := commands.get()) is not None:
            _send(replies, generator.answer(command))
    finally:
        generator.close()


def _send(descriptor: int, reply: Message) -> None:
    line = memoryview(msgspec.json.encode(reply) + b"\n")
    while line:
        line = line[os.write(descriptor, line) :]


if __name__ == "__main__":
    main()
