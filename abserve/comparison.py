"""`compare` and `compare_async`: one process of the command `abserve compare`, its output, and its stored run."""

from __future__ import annotations

import os
import select
import signal
import sys
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from json import dumps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Unpack

from abserve.errors import AbserveError
from abserve.options import REPEATED, CompareOptions
from abserve.packages import own_packages
from abserve.run import Run

if TYPE_CHECKING:
    from loadgen.base.child_process import ChildProcess

_POLL_SECONDS = 0.5
_USAGE_STATUS = 2
_OUT, _MODEL = "ABSERVE_COMPARE_OUT", "ABSERVE_COMPARE_MODEL"


def compare(
    file: str | os.PathLike[str] | None = None, *, progress: bool = True, **options: Unpack[CompareOptions]
) -> Run:
    """Compare servers, wait until that is done, and return the run, whether it is valid or not.

    `file` is an experiment file. The other arguments are the options of `abserve compare` by their names in Python, as
    in `preset="full"`, `batch_sizes=[8, 32]`, `a_option={"fronts": 2}`, `gpu_control=False`. With `progress` the output
    of the command is written to standard output.

    Ctrl-C stops the servers, keeps the finished blocks and raises `KeyboardInterrupt`. Raises `AbserveError` if an
    option or a file is wrong, or nothing could be stored. This blocks an event loop; in a notebook use
    `await compare_async(…)`.
    """
    with TemporaryDirectory(prefix="abserve-") as folder:
        child = _Command(file, options, Path(folder) / "errors.txt")
        try:
            child.follow(_written if progress else _dropped)
        except BaseException:
            child.interrupt()
            child.follow(_written if progress else _dropped)
            raise
        finally:
            child.process.stop()
        return child.run()


async def compare_async(
    file: str | os.PathLike[str] | None = None, *, progress: bool = True, **options: Unpack[CompareOptions]
) -> Run:
    """`compare` for an event loop, such as a notebook's: it does not block the loop. Cancelling it stops the servers
    and keeps the finished blocks; so does the interrupt of a notebook."""
    import asyncio  # not above: it takes half of the time of `import abserve`

    loop = asyncio.get_running_loop()
    with TemporaryDirectory(prefix="abserve-") as folder:
        child = _Command(file, options, Path(folder) / "errors.txt")
        say = _written if progress else _dropped
        following = asyncio.ensure_future(
            asyncio.to_thread(child.follow, lambda text: loop.call_soon_threadsafe(say, text))
        )
        try:
            await asyncio.shield(following)
        except BaseException:
            child.interrupt()
            await asyncio.shield(following)
            raise
        finally:
            child.process.stop()
        return child.run()


class _Command:
    """The process of one `abserve compare` in a session of its own, which ends with this process."""

    def __init__(self, file: str | os.PathLike[str] | None, options: CompareOptions, errors: Path) -> None:
        """Start it; its standard error goes to the file `errors`. Raises `AbserveError` for an option that it does not
        have."""
        given = {name: value for name, value in options.items() if value is not None}
        arguments = [part for name, value in given.items() if name != "out" for part in _arguments(name, value)]
        with own_packages():
            from loadgen.base.child_process import ABSERVE, ChildProcess
            from loadgen.cli.output import default_out

            out = given.get("out") or os.environ.get(_OUT)
            self._made_folder = out is None
            model = given.get("model") or os.environ.get(_MODEL) or (file and Path(file).stem) or ""
            self._out = default_out(str(model)) if out is None else Path(str(out))
            command = [*ABSERVE, "compare", *([] if file is None else [os.fspath(file)]), f"--out={self._out}"]
            self._said = 0  # of the standard error
            self.process: ChildProcess = ChildProcess([*command, *arguments], log_path=errors, pipes=True)

    def follow(self, say: Callable[[str], object]) -> None:
        """Say what the command writes, as it comes, until it has ended."""
        decoder = getincrementaldecoder("utf-8")("replace")
        with self.process.log_path.open(encoding="utf-8", errors="replace") as errors:
            errors.seek(self._said)
            content = None
            while content != b"":
                if select.select([self.process], [], [], _POLL_SECONDS)[0]:
                    content = os.read(self.process.fileno(), 65536)
                    say(decoder.decode(content))
                say(errors.read())
                self._said = errors.tell()
            self.process.popen.wait()
            say(errors.read())
            self._said = errors.tell()

    def interrupt(self) -> None:
        """Ctrl-C for the command, which then stops its servers."""
        with suppress(ProcessLookupError):
            self.process.popen.send_signal(signal.SIGINT)

    def run(self) -> Run:
        """The run that it stored. Raises `AbserveError` with its last sentence if it stored none."""
        run = Run(self._out)
        if self.process.popen.returncode != _USAGE_STATUS and (run.runs or (self._out / "experiment.json").exists()):
            return run
        if self._made_folder:
            with suppress(OSError):  # it is not empty
                self._out.rmdir()
        errors = self.process.log_path.read_text(encoding="utf-8", errors="replace")
        raise AbserveError(errors.rpartition("error: ")[2].strip() or self.process.failure())


def _arguments(name: str, value: object) -> Iterator[str]:
    """One option of the command line. Raises `AbserveError` for a name that the command does not have."""
    if name not in CompareOptions.__annotations__:
        close = get_close_matches(name, CompareOptions.__annotations__, n=1)
        raise AbserveError(f"compare() has no option {name}" + (f"; did you mean {close[0]}?" if close else ""))
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        yield flag if value else f"--no-{flag[2:]}"
    elif isinstance(value, Mapping) and name.endswith("_body"):
        yield from (f"{flag}=-{key}" if part is None else f"{flag}={key}={dumps(part)}" for key, part in value.items())
    elif isinstance(value, Mapping):
        yield from (f"{flag}={key}={_text(part)}" for key, part in value.items())
    elif isinstance(value, Sequence) and not isinstance(value, str):
        parts = [_text(part) for part in value]
        yield from (f"{flag}={part}" for part in (parts if name in REPEATED else [",".join(parts)]))
    else:
        yield f"{flag}={_text(value)}"


def _text(value: object) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ",".join(map(_text, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _written(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _dropped(_text: str) -> None:
    """For a comparison without progress."""
