"""Measures the arms' engines alone, by `abserve engine` in a separate process, when all servers are stopped.

A measurement that fails is stored with its reason, and the run goes on.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import msgspec

from loadgen.bench.interruption import uninterrupted
from loadgen.bench.progress import Progress
from loadgen.child_process import ChildProcess, ProcessError
from loadgen.probes.ceiling.plan import NAMED, SECONDS_A_SIZE, EngineRun, plan_ceilings
from loadgen.probes.ceiling.records import Ceiling, Ceilings, EngineDocument
from loadgen.records.run import ArmRecord, Experiment, shown
from loadgen.storage.store import RunStore

LOAD_TIMEOUT_S = 300.0
SIZE_TIMEOUT_S = 60.0
"""Seconds added per batch size and length: a large batch on a CPU takes seconds, and each size takes a dozen runs."""
STOP_TIMEOUT_S = 5.0


def measure_ceilings(
    experiment: Experiment,
    records: Sequence[ArmRecord],
    store: RunStore,
    progress: Progress,
    work: Path,
    abserve: Sequence[str],
    *,
    lengths: Collection[int] = (),
    timeout_s: float | None = None,
) -> None:
    """Measure all ceilings and store each; `lengths` are those of the samples. All servers must be stopped. Raises
    `StorageError`."""
    runs, done = plan_ceilings(experiment, records, lengths)
    store.write(Ceilings(measured=tuple(done)))
    for run in runs:
        arms = " and ".join(shown(label) for label in run.labels)
        progress.now(f"the engine of {arms} alone, at batches of {', '.join(map(str, run.sizes))}")
        shapes = len(run.sizes) * max(1, len(experiment.lengths))
        limit_s = LOAD_TIMEOUT_S + SIZE_TIMEOUT_S * shapes if timeout_s is None else timeout_s
        done.append(_measure(run, store, work, abserve, limit_s))
        store.write(Ceilings(measured=tuple(done)))


def command_of(run: EngineRun) -> tuple[str, ...]:
    """The arguments of `abserve`, without the file."""
    sizes = ",".join(map(str, run.sizes))
    return ("engine", *run.options, f"--batches={sizes}", f"--seconds={SECONDS_A_SIZE:g}")


def _measure(run: EngineRun, store: RunStore, work: Path, abserve: Sequence[str], limit_s: float) -> Ceiling:
    name = f"engine-{'-'.join(run.labels)}"
    path = work / f"{name}.json"
    command = command_of(run)
    document: EngineDocument | None = None
    reason: str | None
    try:
        reason = _run([*abserve, *command, f"--json={path}"], store.log_path(name), limit_s)
        if reason is None:
            document = read_document(path)
            reason = contradiction(run, document.engine)
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


def read_document(path: Path) -> EngineDocument:
    """Read the file that `abserve engine --json` wrote. Raises `OSError` and `ValueError`."""
    return msgspec.json.decode(path.read_bytes(), type=EngineDocument)


def contradiction(run: EngineRun, engine: Mapping[str, object]) -> str | None:
    """How the measured engine differs from the one that the server reports, so that it is not the server's ceiling."""
    names = {there: here for here, there in NAMED.items()}
    wrong = [
        f"{names[there]} {engine.get(there)} instead of {reported}"
        for there, reported in run.reported
        if str(engine.get(there)) != reported
    ]
    return f"the measured engine is not the server's: {', '.join(wrong)}" if wrong else None
