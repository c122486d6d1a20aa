"""Drives the processes of `servers.measuring.worker`: every wait is bounded, every answer is checked."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

import msgspec

from loadgen.base.child_process import ChildProcess, ProcessError, printed
from loadgen.base.documents import DocumentError, decode_json, one_line
from loadgen.engines.plan import CombinationCheck, Offers
from loadgen.experiment.plan import PlanError
from loadgen.records.matrix import NO_MODEL, Configuration, Conversion, Measured, Shape
from loadgen.records.targets import Kind

MOST_ANSWER_BYTES = 2**24
MOST_WORDS = 1_000
"""Characters of an error: its reason may stand after a long path or the names of many tensors."""
T = TypeVar("T")


class WorkerError(Exception):
    """An engine process has failed, hangs or answers what cannot be; it must be stopped."""


class CellError(Exception):
    """The engine process has refused one cell and goes on, as with a batch that does not fit into memory."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The longest waits, in seconds."""

    prepare: float = 3600.0
    """For an export, the build of a TensorRT plan, and the model's own answers."""
    load: float = 1800.0
    """For a process until its engine is ready; torch.compile and CUDA graphs take long."""
    cell: float = 600.0
    """For a cell, besides several times its seconds."""
    stop: float = 15.0


LIMITS = Limits()
CHECK_SECONDS = 120.0


class Ready(msgspec.Struct, frozen=True):
    """A loaded engine; the names are those of the record `Visit`."""

    import_seconds: float
    load_seconds: float
    conversions: tuple[Conversion, ...]
    description: dict[str, Any]
    item: str


class _WorkerMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    ready: Ready | None = None
    measured: Measured | None = None
    profiled: tuple[tuple[dict[str, Any], ...], ...] | None = None
    file: bool | None = None
    conversions: tuple[Conversion, ...] | None = None
    error: str | None = None


class WorkerProcess:
    """A process that loads an engine and measures it, or that makes the model's own answers and the file that an engine
    executes. Every method may raise `WorkerError`, after which it can only be stopped."""

    ready: Ready
    """Known after `wait_until_ready`."""

    def __init__(
        self, worker: Sequence[str], arguments: Sequence[object], log_path: Path, limits: Limits = LIMITS
    ) -> None:
        """Start it; arguments that are not text are passed as JSON."""
        argv = [*worker, *(part if isinstance(part, str) else _text(part) for part in arguments)]
        self._limits, self._answers, self._asked_at = limits, False, monotonic()
        try:
            self._process = ChildProcess(argv, log_path=log_path, pipes=True)
        except (ProcessError, OSError) as exc:
            raise WorkerError(one_line(str(exc), MOST_WORDS)) from exc

    def wait_until_prepared(self) -> tuple[bool, tuple[Conversion, ...]]:
        """Whether the engine executes a file, and the steps that made it."""
        answer = self._answer(self._limits.prepare)
        if answer.conversions is None or answer.file is None:
            raise WorkerError("answered something else than that its files are made")
        return answer.file, answer.conversions

    def wait_until_ready(self, configuration: Configuration, limit_s: float | None = None) -> None:
        """Wait until the engine is loaded, and is the one that was asked for."""
        ready = self._answer(self._limits.load if limit_s is None else limit_s).ready
        if ready is None:
            raise WorkerError("answered something else than that its engine is ready")
        if (wrong := contradiction(configuration, ready.description)) is not None:
            raise WorkerError(wrong)
        self.ready, self._answers = ready, True

    def measure(self, cell: Shape, seconds: float, *, energy: bool = True) -> Measured:
        """Measure one cell. Raises `CellError` if only this one fails."""
        batch, length = cell
        self._send({"batch": batch, "length": length, "seconds": seconds, "energy": energy})
        measured = self._answer(self._limits.cell + 20 * seconds, of_cell=True).measured
        if measured is None or (measured.batch, measured.length) != cell:
            raise WorkerError(f"answered something else than the cell of batch {batch}")
        if not measured.calls_ns or min(measured.calls_ns) <= 0:
            raise WorkerError(f"measured no time at batch {batch}")
        return measured

    def profile(self, cells: Sequence[Shape]) -> tuple[tuple[dict[str, Any], ...], ...]:
        """The kernels of each of the cells, which were measured; nothing can be measured later."""
        self._send({"profile": cells})
        profiled = self._answer(self._limits.cell * len(cells), of_cell=True).profiled
        if profiled is None or len(profiled) != len(cells):
            raise WorkerError("answered something else than the profile of its cells")
        return profiled

    def fileno(self) -> int:
        """Readable when it has answered or ended."""
        return self._process.fileno()

    def end(self) -> None:
        """Tell it to end, without waiting. Idempotent."""
        stdin = self._process.popen.stdin
        assert stdin is not None
        with suppress(OSError):
            stdin.close()

    def stop(self) -> None:
        """Let it end, within bounds: at once if it does not answer. Idempotent."""
        self.end()
        if self._answers:
            with suppress(subprocess.TimeoutExpired):
                self._process.popen.wait(self._limits.stop)
        self._process.stop(timeout_s=min(self._limits.stop, 5.0))

    def _send(self, command: Mapping[str, Any]) -> None:
        self._asked_at = monotonic()
        if not self._process.send(_text(command).encode()):
            raise WorkerError(_death(self._process))

    def _answer(self, limit_s: float, *, of_cell: bool = False) -> _WorkerMessage:
        self._answers, answered = False, self._answers
        line = self._process.read_line(limit_s)
        if line is None:
            raise WorkerError(f"no answer after {monotonic() - self._asked_at:.0f} s; {self._process.last_words()}")
        if not line:
            raise WorkerError(_death(self._process))
        try:
            answer: _WorkerMessage = decode_json(line, _WorkerMessage, most_bytes=MOST_ANSWER_BYTES)
        except DocumentError as exc:
            raise WorkerError(f"its answer cannot be read: {exc}") from exc
        self._answers = answered
        if answer.error is not None:
            raise (CellError if of_cell else WorkerError)(one_line(answer.error, MOST_WORDS))
        return answer


def contradiction(configuration: Configuration, description: Mapping[str, Any]) -> str | None:
    """How the engine in effect differs from the configuration, whose results it must not be taken for."""
    asked = {
        "kind": configuration.engine,
        "precision": configuration.precision,
        "mode": configuration.mode,
        "device": configuration.device,
    }
    if configuration.threads is not None and configuration.engine != NO_MODEL:
        asked["threads"] = configuration.threads  # type: ignore[assignment]  # shown as text
    wrong = [
        f"{name} {description.get(name)} instead of {value}"
        for name, value in asked.items()
        if description.get(name) != value
    ]
    return f"the engine in effect is another one: {', '.join(wrong)}" if wrong else None


def read_offers(device: str, worker: Sequence[str], kind: Kind = Kind.TENSORS) -> Offers:
    """What this machine offers for models of a kind. Raises `PlanError`."""
    asked: Mapping[Kind, tuple[str, ...]] = {Kind.TENSORS: (), Kind.TOKENS: ("generation",)}
    return _asked([*worker, "--offers", device, *asked[kind]], Offers)


def check(requests: Sequence[Mapping[str, Any]], worker: Sequence[str]) -> tuple[CombinationCheck, ...]:
    """Which of the requests this machine can measure. Raises `PlanError`."""
    checks = _asked([*worker, "--check"], tuple[CombinationCheck, ...], msgspec.json.encode(requests))
    if len(checks) != len(requests):
        raise PlanError("the check of the engines answered for another number of combinations")
    return checks


def _asked(argv: Sequence[str], kind: type[T], stdin: bytes = b"") -> T:
    try:
        return printed(argv, kind, CHECK_SECONDS, "the check of the engines", stdin=stdin)
    except ProcessError as exc:
        missing = "; run: pip install 'abserve[servers]'" if "ModuleNotFoundError" in str(exc) else ""
        raise PlanError(f"{exc}{missing}") from exc


def _death(process: ChildProcess) -> str:
    how = process.ended()
    cause = ", perhaps because the machine ran out of memory" if "SIGKILL" in how else ""
    return one_line(f"the process {how}{cause}", MOST_WORDS)


def _text(value: object) -> str:
    return msgspec.json.encode(value).decode()
