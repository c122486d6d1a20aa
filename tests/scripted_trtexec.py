"""A trtexec that notes its arguments and writes them as the plan: NVIDIA's needs a GPU and is not to be had here."""

from __future__ import annotations

from pathlib import Path

SCRIPT = """#!/bin/sh
echo '&&&& RUNNING TensorRT.trtexec [TensorRT v{number}] [b36] # trtexec'
[ "$1" = --help ] && exit 0
{failure}
for argument in "$@"; do
  case "$argument" in
    --onnx=*) cat "${{argument#*=}}" > /dev/null || exit 1 ;;
    --saveEngine=*) plan="${{argument#*=}}" ;;
  esac
done
echo built >> '{log}'
printf '%s\\n' "$@" > "$plan"
"""


class ScriptedTrtexec:
    """`folder/trtexec`; a test puts the folder on PATH."""

    def __init__(self, folder: Path) -> None:
        self._program, self._log = folder / "trtexec", folder / "log"

    def install(self, release: str, failure: str = "") -> None:
        """Write the program anew; `failure` is shell code that runs before it builds."""
        major, minor, patch = map(int, release.split("."))
        number = major * 10_000 + minor * 100 + patch
        self._program.write_text(SCRIPT.format(number=number, failure=failure, log=self._log))
        self._program.chmod(0o755)

    @property
    def built(self) -> int:
        """The number of plans that it built."""
        return len(self._log.read_text().splitlines()) if self._log.exists() else 0
