"""Where a command writes: error messages, its folder of results, files of JSON, and exports of a stored result."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import typer

from loadgen.base.documents import CHOICE, free_path, indented, kind_of, one_line

if TYPE_CHECKING:
    from rich.console import Console

    from loadgen.records.run import Environment
    from loadgen.report.document import Document
    from loadgen.report.published import Published

EXIT_USAGE = 2
T = TypeVar("T")
OUT: dict[str, Any] = {"metavar": "DIR", "help": "Folder for the results (default: results/TIME-MODEL)."}
MLFLOW: dict[str, Any] = {
    "metavar": "URI", "help": "Also export to MLflow: the address of a server, a folder or sqlite:///FILE.",
}  # fmt: skip
REPORT = "abserve report"
"""The command that repeats an analysis."""


def settings_file(metavar: str, prefix: str) -> Any:
    """The argument for a file of the options of a command, whose variables begin with `prefix`."""
    help_text = (
        f"Read the options from this file; its keys are their names. An option, or a variable {prefix}_OPTION, "
        "overrides the file."
    )
    return typer.Argument(metavar=metavar, show_default=False, help=help_text)


def console_for(json_file: str | None = None, *, errors: bool = False) -> Console:
    """Standard error for `errors`, and for all words if JSON goes to standard output; else standard output."""
    from loadgen.report.renderers.terminal import make_console

    return make_console(sys.stderr if errors or json_file == "-" else sys.stdout)


def print_report(document: Document, json_file: str | None = None) -> None:
    """Print a report as `console_for` says."""
    from loadgen.report.renderers.terminal import print_document

    print_document(document, console_for(json_file))


def fail(message: str, status: int = EXIT_USAGE) -> NoReturn:
    """End the command with one sentence on standard error."""
    complain(message)
    raise typer.Exit(status)


def complain(message: str, style: str = "bold red", kind: str = "error") -> None:
    """Print one sentence on standard error."""
    console_for(errors=True).print(f"{kind}: {message}", style=style, soft_wrap=True)


CHECKING = "checking the options, the model and the servers"


def announce(text: str, *, in_logs: bool = True) -> None:
    """Say on standard error what takes longer than a second, before it begins; `in_logs`: also without a terminal."""
    if not in_logs and not sys.stderr.isatty():
        return
    console_for(errors=True).print(f"{text} …", style="dim", soft_wrap=True)


def check_files(files: Mapping[str, str | Path | None]) -> None:
    """End the command before it measures if a file to write, by its option, has no folder; `-` is standard output."""
    for option, target in files.items():
        path = None if target in (None, "-") else Path(str(target))
        if path is not None and (path.is_dir() or not os.access(path.parent, os.W_OK)):
            fail(f"{option} {path}: give the path of a file in a folder that exists")


def write_json(document: object, target: str | None) -> None:
    """Write to the file `target`; `-` is standard output, None is nowhere. A file that cannot be written ends the
    command."""
    if target is None:
        return
    text = indented(document)
    if target == "-":
        sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()
        return
    try:
        Path(target).write_bytes(text)
    except OSError as exc:
        fail(f"--json {target} cannot be written: {exc.strerror or exc}")


def check_out(out: Path | None) -> None:
    """Raises `PlanError` for a folder that cannot take a new run: also where another one only began to choose, since
    what it chose is for other settings."""
    from loadgen.experiment.plan import PlanError

    if out is None:
        return
    if out.exists() and not out.is_dir():
        raise PlanError(f"--out {out} is a file; give a folder")
    kind = kind_of(out)
    if kind == "comparison":
        raise PlanError(f"--out {out} already holds a run; give another folder")
    if kind is not None or (out / CHOICE).exists():
        held = {"tuning": "a tuning", "engines": "a matrix", None: "a comparison with --best"}[kind]
        raise PlanError(f"--out {out} already holds {held}; give another folder, or continue it with --resume {out}")
    place = next(folder for folder in (out, *out.absolute().parents) if folder.is_dir())
    try:
        TemporaryDirectory(dir=place).cleanup()
    except OSError as exc:
        raise PlanError(f"--out {out}: cannot write to {place}: {exc.strerror or exc}; give another folder") from exc


def same_settings(folder: Path, before: Mapping[str, object], now: Mapping[str, object]) -> None:
    """Raises `PlanError` if what goes on in `folder` was begun with other settings."""
    from loadgen.engines.plan import difference
    from loadgen.experiment.plan import PlanError

    if differs := difference(before, now):
        raise PlanError(f"--resume {folder}: it was begun with {differs}; leave the options out, or use --out")


def resumed(folder: Path, read: Callable[[Path], tuple[T, str | None, Sequence[Environment | None]]]) -> T:
    """What an interrupted command stored in `folder`: `read` returns it, its state, and the machine of each of its
    runs. Raises `PlanError` unless it can go on here."""
    from loadgen.experiment.plan import PlanError
    from loadgen.records.store import StoredRunError, is_running

    try:
        stored, state, machines = read(folder)
    except StoredRunError as exc:
        raise PlanError(f"--resume {folder}: {exc}") from exc
    if is_running(folder):
        raise PlanError(f"--resume {folder}: a process still runs it")
    if state == "finished":
        raise PlanError(f"--resume {folder}: it is finished; start another one without --resume")
    known = [machine for machine in machines if machine is not None]
    if known:  # a run whose servers did not tell their GPUs knows less than another one
        _same_machine(folder, next((m for m in known if m.gpu.get("status") != "unknown"), known[0]))
    return stored


def _same_machine(folder: Path, before: Environment) -> None:
    """Raises `PlanError` for another machine or other versions. The GPUs count where they were known."""
    from loadgen.base.child_process import ENGINE_WORKER
    from loadgen.engines.plan import difference
    from loadgen.engines.worker_process import read_offers
    from loadgen.experiment.plan import PlanError
    from loadgen.measure.machine import fingerprint, read_environment
    from loadgen.records.machine import own_devices

    is_known = before.gpu.get("status") != "unknown"
    now = read_environment(read_offers("auto", ENGINE_WORKER).gpu if is_known else {}, {})
    machines = []
    for environment in (before, now):
        names = [f"{device.get('name')} {device.get('uuid')}" for device in own_devices(environment.gpu)]
        machines.append({**environment.host, **environment.packages, "GPUs": names})
    if fingerprint(before.host, before.packages, before.gpu) != fingerprint(now.host, now.packages, now.gpu):
        differs = difference(*machines)
        raise PlanError(f"--resume {folder}: it was begun on another machine or with other versions ({differs})")


def default_out(model: str) -> Path:
    """A new folder results/TIME-MODEL, in UTC, with a number appended where another run began in the same second."""
    name = re.sub(r"[^\w.-]+", "-", model.rstrip("/").rpartition("/")[2], flags=re.ASCII).strip("-.") or "model"
    name = f"{datetime.now(UTC).strftime('%Y%m%dT%H%M%SZ')}-{name[:80]}"
    while True:
        folder = free_path(Path("results") / name)
        with suppress(OSError):  # writing the run's first record reports the reason and the remedy
            try:
                folder.mkdir(parents=True)
            except FileExistsError:  # another run has just made it
                continue
        return folder


def check_export(mlflow: str | None) -> None:
    """End the command before it measures if it could not export to MLflow."""
    if mlflow is None:
        return
    from loadgen.report.mlflow import MlflowExportError, check_mlflow

    try:
        check_mlflow(mlflow)
    except MlflowExportError as exc:
        fail(str(exc))


def publish(
    folder: Path, analyse: Callable[[], T], make: Callable[[T], Published], mlflow: str | None = None, *,
    again: str = REPORT, json_file: str | None = None,
) -> tuple[T, bool] | tuple[None, bool]:  # fmt: skip
    """Analyse what was measured in `folder`, write its reports and show them. Returns the result, and whether they were
    written. A fault is a sentence with the command that repeats the analysis, because the records are whole; `again` is
    the command that writes the reports."""
    result, console = None, console_for(json_file)
    try:
        result = analyse()
        published, paths = make(result), list[Path]()
        try:
            paths = published.write(folder)
        except OSError as exc:  # a full disk: what was measured is shown all the same
            complain(f"no reports: {exc.strerror or exc}; free some space, then: {again} {shlex.quote(str(folder))}")
        show(published, console)
        hand_over(published, mlflow, folder)
        if paths:
            console.print(f"report: {paths[0]}", soft_wrap=True)
            return result, True
    except typer.Exit:
        raise
    except Exception as exc:  # noqa: BLE001 (no fault of the analysis may cost a measurement)
        complain(
            f"the analysis failed ({type(exc).__name__}: {one_line(str(exc))}); everything that was measured is in "
            f"{folder}; analyse it again with: {REPORT} {shlex.quote(str(folder))}; please report this as a bug"
        )
    return (None, False) if result is None else (result, False)


def show(published: Published, console: Console | None) -> None:
    """Print a report, unless its console is None, and append it to the summary of a CI step if there is one."""
    from loadgen.report.files import append_job_summary
    from loadgen.report.renderers.terminal import print_document

    if console is not None:
        print_document(published.document, console)
    if (warning := append_job_summary(published.printable["markdown"]())) is not None:
        complain(warning, style="bold yellow")


def printed(published: Published, name: str) -> None:
    """Print one format. An unknown one ends the command."""
    from loadgen.experiment.plan import unknown

    formats = published.printable
    if name not in formats:
        fail(unknown("--format", name, list(formats)))
    typer.echo(formats[name](), nl=False)


def hand_over(published: Published, mlflow: str | None, folder: Path) -> None:
    """Export to MLflow if `mlflow` says where. A failure is a warning, because the result is stored in `folder`."""
    if mlflow is None or published.export is None:
        return
    from loadgen.report.mlflow import MlflowExportError

    try:
        published.export(mlflow, folder)
    except MlflowExportError as exc:
        complain(str(exc), style="bold yellow")
    except Exception as exc:  # noqa: BLE001 (an export that fails costs itself)
        complain(f"no export to MLflow: {type(exc).__name__}: {one_line(str(exc))}", style="bold yellow")
