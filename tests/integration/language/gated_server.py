"""A native server whose generating engine does what a test tells it: `gated_server.py PORT FOLDER {settings}`.

The engine is the scripted one. Loading lasts until the file FOLDER/load exists. While FOLDER/hold exists
steps from the number in it on wait; FOLDER/steps holds the number of the last step that has begun. FOLDER/fail makes
the next step raise. FOLDER/pid is the process of the engine.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from servers.engines.settings import EngineError
from servers.language.engine import Emission
from servers.native.server import configure_logs, serve_language
from servers.native.shared.settings import NativeSettings
from servers.options.command_line import from_argument
from servers.options.launch import bind
from tests.scripted_generation import ScriptedEngine

POLL_S = 0.002


@dataclass
class GatedEngine(ScriptedEngine):
    """The scripted engine behind two gates."""

    folder: Path = field(default=Path())

    def load(self) -> None:
        (self.folder / "pid").write_text(str(os.getpid()))
        while not (self.folder / "load").exists():
            time.sleep(POLL_S)
        if (self.folder / "load").read_text() == "fail":
            raise EngineError("the weights are missing: fetch them")
        self._steps = os.open(self.folder / "steps", os.O_RDWR | os.O_CREAT)
        super().load()

    def step(self) -> Sequence[Emission]:
        os.pwrite(self._steps, b"%8d" % (self.steps + 1), 0)
        while self._held():
            time.sleep(POLL_S)
        if (self.folder / "fail").exists():
            raise EngineError("the device is lost")
        return super().step()

    def _held(self) -> bool:
        try:
            return self.steps + 1 >= int((self.folder / "hold").read_text())
        except FileNotFoundError:
            return False


def main() -> int:
    folder = Path(sys.argv[2])
    settings = from_argument(NativeSettings, sys.argv[3:])
    configure_logs(settings.log_level)
    slots, longest = settings.slots or 4, settings.max_length or 256
    build = partial(GatedEngine, slots=slots, max_length=longest, folder=folder)
    grpc_listener = bind("127.0.0.1", settings.grpc_port) if settings.grpc_port else None
    listener = bind("127.0.0.1", settings.http_port)
    return serve_language(settings, "scripted", "language:scripted", build, listener, grpc_listener)


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)
