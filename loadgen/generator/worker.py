"""One worker of a distributed generator: `python -m loadgen.generator.worker HOST PORT INDEX`.

It is a Locust worker: it finds its master, sends heartbeats and gets its commands over Locust's own channel, in
messages of the types below. Commands and replies are those of `loadgen.generator.messages`, as one line of JSON.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import socket
from typing import Any

import locust.runners
import msgspec
from locust.env import Environment

from loadgen.generator.block import LocalGenerator
from loadgen.generator.messages import Abort, Command

HELLO, COMMAND, REPLY = "abserve_hello", "abserve_command", "abserve_reply"


def main() -> None:
    """Serve until the master says quit or is gone (then the kernel ends this process)."""
    parser = argparse.ArgumentParser()
    parser.add_argument("host")
    parser.add_argument("port", type=int)
    parser.add_argument("index", type=int)
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the runner's to interpret
    # Locust's worker takes a step of the wall clock for a dead master. Ours is our parent, whose end we notice anyway.
    locust.runners.MASTER_HEARTBEAT_TIMEOUT = math.inf
    generator = LocalGenerator()
    decoder = msgspec.json.Decoder(Command)
    runner: Any = Environment(user_classes=[]).create_worker_runner(options.host, options.port)

    def obey(msg: Any, **_: object) -> None:
        command = decoder.decode(msg.data["line"])
        if isinstance(command, Abort):
            generator.abort(command.reason)  # not answered: the block's outcome is
            return
        reply = msgspec.json.encode(generator.answer(command)).decode()
        runner.send_message(REPLY, {"index": options.index, "line": reply})

    runner.register_message(COMMAND, obey, concurrent=True)
    runner.send_message(HELLO, {"index": options.index, "pid": os.getpid(), "host": socket.gethostname()})
    try:
        runner.greenlet.join()
    finally:
        generator.close()


if __name__ == "__main__":
    main()
