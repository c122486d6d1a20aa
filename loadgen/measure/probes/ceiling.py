"""Ceiling: measures the arms' engines alone, by `abserve engine` in a separate process, when all servers are stopped.

A measurement that fails is stored with its reason, and the run goes on.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from loadgen.base.child_process import ChildProcess, ProcessError
from loadgen.findings.ceiling import (
    NAMED,
    SECONDS_A_SIZE,
    Ceiling,
    Ceilings,
    CeilingsFound,
    EngineDocument,
    EngineRun,
    analyse,
    plan_ceilings,
    wants_ceilings,
)
from loadgen.findings.registry import Probe
from loadgen.measure.interruption import uninterrupted

if TYPE_CHECKING:
    from loadgen.measure.context import RunContext

LOAD_TIMEOUT_S = 300.0
SIZE_TIMEOUT_S = 60.0
"""Seconds added per batch size and length: a large batch on a CPU takes seconds, and each size takes a dozen runs."""
STOP_TIMEOUT_S = 5.0


def measure(context: RunContext) -> None:
    """Measure the engine of every arm, and store each. Raises `StorageError`."""
    context.enter("measuring the engines alone")
    lengths = {length for samples in context.inputs.values() for length in samples.lengths}
    runs, done = plan_ceilings(context.experiment, context.records, lengths)
    context.store.write(Ceilings(measured=tuple(done)))
    for run in runs:
        arms = " and ".join(context.arms[label].name for label in run.labels)
        context.progress.now(f"the engine of {arms} alone, at batches of {', '.join(map(str, run.sizes))}")
        done.append(_measure(context, run))
        context.store.write(Ceilings(measured=tuple(done)))


def command_of(run: EngineRun) -> tuple[str, ...]:
    """The arguments of `abserve`, without the file."""
    sizes = ",".join(map(str, run.sizes))
    return ("engine", *run.options, f"--batches={sizes}", f"--seconds={SECONDS_A_SIZE:g}")


def _measure(context: RunContext, run: EngineRun) -> Ceiling:
    name = f"engine-{'-'.join(run.labels)}"
    path = context.work / f"{name}.json"
    command = command_of(run)
    limit_s = LOAD_TIMEOUT_S + SIZE_TIMEOUT_S * len(run.sizes) * max(1, len(context.experiment.lengths))
    document: dict[str, object] = {}
    try:
        argv = [*context.abserve, *command, f"--json={path}"]
        reason = _run(argv, context.store.log_path(name), limit_s)
        if reason is None:
            document = msgspec.json.decode(path.read_bytes(), type=dict[str, object])
            reason = contradiction(run, msgspec.convert(document, EngineDocument).engine)
    except (ProcessError, OSError, ValueError) as exc:
        reason = f"its measurement left no readable result: {exc}"
    return Ceiling(
        labels=run.labels,
        command=shlex.join(["abserve", *command]),
        document=document if reason is None else None,
        reason=reason,
    )


def _run(argv: Sequence[str], log_path: Path, limit_s: float) -> str | None:
    """Run the process; returns why it failed, or None. It has ended in any case."""
    process = ChildProcess(argv, log_path=log_path)
    try:
        code = process.popen.wait(limit_s)
        return None if code == 0 else f"its measurement {process.failure()}"
    except subprocess.TimeoutExpired:
        return f"its measurement took more than {limit_s:g} s; {process.last_words()}"
    finally:
        with uninterrupted():
            process.stop(timeout_s=STOP_TIMEOUT_S)


def contradiction(run: EngineRun, engine: Mapping[str, object]) -> str | None:
    """How the measured engine differs from the one that the server reports, so that it is not the server's ceiling."""
    names = {there: here for here, there in NAMED.items()}
    wrong = [
        f"{names[there]} {engine.get(there)} instead of {reported}"
        for there, reported in run.reported
        if str(engine.get(there)) != reported
    ]
    return f"the measured engine is not the server's: {', '.join(wrong)}" if wrong else None


PROBE = Probe(
    wanted=wants_ceilings,
    measure=measure,
    after_servers=True,
    finding=CeilingsFound,
    analyse=analyse,
    sections="loadgen.report.sections.ceiling",
)
