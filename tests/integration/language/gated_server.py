"""A native server whose generating engine does what a test tells it: `gated_server.py PORT FOLDER {settings}`.

The engine is the scripted one. Loading lasts until the file FOLDER/load exists. While FOLDER/hold exists a step waits;
FOLDER/steps holds the number of steps that have begun, and FOLDER/slots how many requests hold a slot after the last
one. FOLDER/fail makes the next step raise. FOLDER/pid is the process of the engine.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from servers.cli.launch import bind
from servers.cli.options import from_argument
from servers.engines.settings import EngineError
from servers.language.engine import Emission
from servers.native.generation_server import ServedLanguageModel, serve_language
from servers.native.server import configure_logs
from servers.native.settings import NativeSettings
from tests.scripted_generation import ScriptedEngine

POLL_S = 0.002


@dataclass
class GatedEngine(ScriptedEngine):
    """The scripted engine behind two gates."""

    folder: Path = field(default=Path())
    pause_s: float = 0.0

    def load(self) -> None:
        (self.folder / "pid").write_text(str(os.getpid()))
        while not (self.folder / "load").exists():
            time.sleep(POLL_S)
        if (self.folder / "load").read_text() == "fail":
            raise EngineError("the weights are missing: fetch them")
        super().load()

    def step(self) -> Sequence[Emission]:
        self._note("steps", self.steps + 1)
        while (self.folder / "hold").exists():
            time.sleep(POLL_S)
        if (self.folder / "fail").exists():
            raise EngineError("the device is lost")
        time.sleep(self.pause_s)
        emissions = super().step()
        self._note("slots", self.active)
        return emissions

    def _note(self, name: str, value: int) -> None:
        written = self.folder / f"{name}.new"
        written.write_text(str(value))
        written.rename(self.folder / name)


def main() -> int:
    folder = Path(sys.argv[2])
    settings = from_argument(NativeSettings, sys.argv[3:])
    configure_logs(settings.log_level)
    slots, longest = settings.slots or 4, settings.max_length or 256
    pause_s = 0.001 if (folder / "slow").exists() else 0.0
    model = ServedLanguageModel(
        "scripted",
        "language:scripted",
        lambda: GatedEngine(slots=slots, max_length=longest, folder=folder, pause_s=pause_s),
    )
    return serve_language(settings, model, bind("127.0.0.1", settings.http_port))


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)
