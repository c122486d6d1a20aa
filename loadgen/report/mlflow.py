"""Exports a result to an MLflow tracking server or store: a parent run with a nested run per arm or configuration.

The parent holds the settings, versions, machine and files; a nested run holds what its arm or configuration is and its
metrics. In an engine matrix a metric's step is the batch size, so that MLflow draws it against the batch. An export
that fails never loses a result: `MlflowExportError` is a sentence to show as a warning.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from loadgen.base.documents import is_stored, one_line, stored_path
from loadgen.base.quantities import join
from loadgen.checks.registry import validity
from loadgen.findings.gpu.analysis import GpuFound
from loadgen.findings.rate_search import RatesFound
from loadgen.metrics.registry import METRICS
from loadgen.metrics.summaries import WorkloadSummary, figure_of, interval_of, tokens_per_answer
from loadgen.records.machine import own_devices
from loadgen.records.matrix import CellResult, Matrix
from loadgen.records.run import Environment
from loadgen.stats.estimates import Estimate
from loadgen.verdict.result import FILE_NAME, Result

EXPERIMENT = "abserve"
INSTALL = "pip install 'abserve[mlflow]'"
OF_DATABASES = ("sqlalchemy", "alembic", "cryptography")
"""What MLflow needs beside `INSTALL` where the runs are in a database."""
_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
_FILES = ("report.html", "summary.md", FILE_NAME, Matrix.FILE, "experiment.yaml")
_CONFIGURATION = ("model", "engine", "precision", "mode", "device", "threads")
_MOST_PARAM = 500
_MOST_PARAMS, _MOST_METRICS = 100, 1000
"""MLflow's limits of one call."""
_FORBIDDEN = re.compile(r"[^\w\-. /]+", re.ASCII)
Logged = tuple[str, float, int]
"""Name and value of one number, and its step: the batch size in a matrix, the round of a search, else 0."""
Nested = tuple[str, dict[str, object], list[Logged]]
"""Name, parameters and numbers of a nested run."""


class MlflowExportError(Exception):
    """Nothing, or not everything, could be exported; the message says why and what to do."""


def check_mlflow(uri: str | None) -> None:
    """Before anything is measured: whether the packages for this URI are installed. Raises `MlflowExportError`."""
    if uri is None:
        return
    if urlsplit(uri).password is not None:  # the command line is stored with the run
        raise MlflowExportError(
            "--mlflow: leave the password out of the address and set MLFLOW_TRACKING_USERNAME and "
            "MLFLOW_TRACKING_PASSWORD; for a database, run an MLflow server before it"
        )
    if find_spec("mlflow") is None:
        raise MlflowExportError(f"--mlflow {uri} needs MLflow; install it with: {INSTALL}")
    scheme = _scheme(uri)
    if scheme in _DATABASES:
        missing = [name for name in OF_DATABASES if find_spec(name) is None]
        if missing:
            raise MlflowExportError(
                f"--mlflow {uri}: MLflow needs {join(missing)} for a database; install it with: "
                f"pip install {' '.join(missing)}"
            )
    elif scheme not in ("", "file", "http", "https"):
        raise MlflowExportError(
            f"--mlflow {uri}: give the address of a server (http://HOST:5000), a folder or sqlite:///FILE"
        )


def export_result(result: Result, uri: str, folder: Path) -> str:
    """Export a comparison and the reports in `folder`; returns the id of the parent run. Raises `MlflowExportError`."""
    experiment = result.experiment
    params: dict[str, object] = {
        "model": experiment.model, "weights": experiment.weights, "payload": experiment.payload,
        "transport": experiment.transport, "preset": experiment.preset, "seed": experiment.seed,
        "threads": experiment.threads, "precision": experiment.precision, "deployment": experiment.deployment,
        "workloads": ", ".join(workload.name for workload in experiment.workloads),
    }  # fmt: skip
    params |= {f"settings.{name}": value for name, value in (experiment.settings or {}).items()}
    overall = [("valid", float(result.valid), 0), ("rough", float(result.rough), 0)]
    for row in result.comparisons:
        if row.ratio is not None:
            base = f"ratio.{row.metric}.{row.workload}.{row.arm}_over_{row.baseline}"
            overall += _estimate(base, Estimate.of(row.ratio, row.ci95))
    tags = {"schema": result.schema, "validity": validity(result.checks), "verdict": result.verdict.sentence}
    return _export(uri, "compare", folder, params, result.environment, tags, overall, list(_arms(result)))


def export_matrix(matrix: Matrix, uri: str, folder: Path) -> str:
    """Export an engine matrix and the reports in `folder`; returns the parent run's id. Raises `MlflowExportError`."""
    plan = matrix.plan
    params = {f"settings.{name}": value for name, value in plan.settings.items()}
    params |= {"rounds": plan.rounds, "seed": plan.seed, "baseline": plan.baseline, "processes": plan.processes}
    nested: list[Nested] = []
    for place, measured in enumerate(matrix.configurations):
        configuration = measured.configuration
        about: dict[str, object] = {
            **{name: getattr(configuration, name) for name in _CONFIGURATION},
            **{f"engine.{name}": value for name, value in measured.description.items()},
        }
        metrics = [metric for cell in matrix.cells if cell.configuration == place for metric in _cell(cell)]
        if measured.load_seconds is not None:
            metrics += _estimate("load_seconds", measured.load_seconds)
        metrics += [(f"conversion_seconds.{step.step}", step.seconds, 0) for step in measured.conversions]
        title = f"{configuration.model} {configuration.name} {configuration.precision}"
        nested.append((title, about, metrics))
    return _export(uri, "engines", folder, params, matrix.environment, {"schema": matrix.schema}, [], nested)


def _arms(result: Result) -> Iterator[Nested]:
    """Each arm: what it ran as, and its figures in every workload."""
    evidence = result.of(GpuFound).evidence
    tokens = {(s.label, s.workload): tokens_per_answer(s) for s in result.summaries}
    for arm in result.arms:
        params: dict[str, object] = {
            "label": arm.label, "title": arm.title, "target": arm.target, "server": arm.server_name,
            "server_version": arm.server_version, **{f"in_effect.{name}": v for name, v in arm.in_effect.items()},
        }  # fmt: skip
        metrics: list[Logged] = []
        for summary in result.summaries:
            metrics += _figures(summary) if summary.label == arm.label else []
        for record in () if evidence is None else evidence.records:
            gpu = record.inputs.gpu
            joules = None if gpu is None or record.control or record.no_energy is not None else gpu.joules_per_item
            if record.label == arm.label and joules is not None:
                metrics.append((f"joules_per_item.{record.workload or 'all'}", joules, 0))
                if record.workload is not None and (answer := tokens.get((arm.label, record.workload))):
                    metrics.append((f"joules_per_token.{record.workload}", joules / answer, 0))
        metrics += [
            (f"{rate.metric}.{rate.workload}", rate.rate_per_s, rate.round)
            for rate in result.of(RatesFound).rates
            if rate.label == arm.label and rate.rate_per_s is not None
        ]
        yield f"{arm.label} {arm.title}", params, metrics


def _figures(summary: WorkloadSummary) -> Iterator[Logged]:
    """The figures of the metrics that are compared or counted, each once, with its interval."""
    logged = set[str]()
    for metric in METRICS.values():
        name, value = metric.column or metric.name, figure_of(summary, metric)
        if value is not None and name not in logged and (metric.compared_in is not None or metric.is_count):
            logged.add(name)
            estimate = Estimate.of(float(value), interval_of(summary, metric))
            yield from _estimate(f"{name}.{summary.workload}", estimate)


def _cell(cell: CellResult) -> Iterator[Logged]:
    """The figures of a cell, with the batch size as the step."""
    at = "" if cell.length is None else f".length_{cell.length}"
    estimates = {
        "items_per_second": cell.items_per_second, "latency_ns": cell.latency_ns, "call_ns": cell.call_ns,
        "speedup": cell.speedup, "joules_per_item": cell.joules_per_item, "sustained_ns": cell.sustained_ns,
    }  # fmt: skip
    if cell.generation is not None:
        estimates |= {
            "first_token_ns": cell.generation.first_token_ns,
            "prompt_tokens_per_second": cell.generation.prompt_tokens_per_second,
        }
    for name, estimate in estimates.items():
        if estimate is not None:
            yield from _estimate(f"{name}{at}", estimate, cell.batch)
    values = {
        "p99_ns": cell.p99_ns, "first_call_seconds": cell.first_call_seconds, "cosine_min": cell.cosine_min,
        "top1": cell.top1, "relative_error": cell.relative_error, "tflops": cell.tflops,
        "allocated_bytes": cell.allocated_bytes, "reserved_bytes": cell.reserved_bytes,
        "process_device_bytes": cell.process_device_bytes, "rss_bytes": cell.rss_bytes,
        "ranked": float(cell.excluded is None and cell.fault is None),
    }  # fmt: skip
    yield from ((f"{name}{at}", float(value), cell.batch) for name, value in values.items() if value is not None)


def _estimate(name: str, estimate: Estimate, step: int = 0) -> list[Logged]:
    numbers = {name: estimate.value, f"{name}.low": estimate.low, f"{name}.high": estimate.high}
    return [(key, number, step) for key, number in numbers.items() if number is not None]


def _about_machine(environment: Environment | None) -> dict[str, object]:
    if environment is None:
        return {}
    nvml = environment.gpu.get("nvml")
    return {
        "git_commit": environment.git_commit,
        "machine.gpus": ", ".join(str(device.get("name")) for device in own_devices(environment.gpu)) or "none",
        "machine.driver": nvml.get("driver_version") if isinstance(nvml, dict) else None,
        **{f"machine.{name}": value for name, value in environment.host.items()},
        **{f"version.{name}": value for name, value in environment.packages.items()},
    }


def _export(
    uri: str,
    command: str,
    folder: Path,
    params: Mapping[str, object],
    environment: Environment | None,
    tags: Mapping[str, str],
    overall: Sequence[Logged],
    nested: Sequence[Nested],
) -> str:
    try:
        return _write(uri, command, folder, {**params, **_about_machine(environment)}, tags, overall, nested)
    except MlflowExportError:
        raise
    except Exception as exc:  # MLflow and what is below it raise errors of many libraries
        again = shlex.join(["abserve", "report", str(folder), "--mlflow", uri])
        raise MlflowExportError(
            f"the export to MLflow at {uri} failed ({type(exc).__name__}: {one_line(str(exc), 200)}); the result is "
            f"kept in {folder}; repeat the export with: {again}"
        ) from exc


def _write(
    uri: str,
    command: str,
    folder: Path,
    params: Mapping[str, object],
    tags: Mapping[str, str],
    overall: Sequence[Logged],
    nested: Sequence[Nested],
) -> str:
    check_mlflow(uri)
    if _scheme(uri) in ("", "file"):
        # MLflow 3 refuses a folder unless this is set; the user asked for one.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # nobody asked to report to MLflow's makers
    for name, limit in (("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2"), ("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")):
        os.environ.setdefault(name, limit)  # else a server that is away holds the command up for minutes
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    stored = client.get_experiment_by_name(EXPERIMENT)
    experiment = client.create_experiment(EXPERIMENT, _artefacts_of(uri)) if stored is None else stored.experiment_id
    name = f"{command} {folder.resolve().name}"
    parent = client.create_run(experiment, run_name=name, tags={"abserve.command": command}).info.run_id
    status = "FAILED"
    try:
        _log(client, parent, params, overall, tags)
        for title, about, metrics in nested:
            child = client.create_run(
                experiment, run_name=title, tags={"mlflow.parentRunId": parent, "abserve.command": command}
            ).info.run_id
            _log(client, child, about, metrics, {})
            client.set_terminated(child)
        for file in _FILES:
            path = stored_path(folder / file)
            if is_stored(path.parent, path.name):
                client.log_artifact(parent, str(path))
        status = "FINISHED"
    finally:
        client.set_terminated(parent, status)
    return str(parent)


def _log(
    client: Any, run: str, params: Mapping[str, object], metrics: Iterable[Logged], tags: Mapping[str, str]
) -> None:
    """Write everything in calls within MLflow's limits; of two names that become equal the first is kept."""
    from mlflow import entities

    texts: dict[str, str] = {}
    for name, value in params.items():
        if value is not None:
            texts.setdefault(key_of(name), one_line(str(value), _MOST_PARAM))
    parts = [entities.Param(name, value) for name, value in texts.items()]
    for start in range(0, len(parts), _MOST_PARAMS):
        client.log_batch(run, params=parts[start : start + _MOST_PARAMS])
    numbers = [entities.Metric(key_of(name), value, 0, step) for name, value, step in metrics]
    for start in range(0, len(numbers), _MOST_METRICS):
        client.log_batch(run, metrics=numbers[start : start + _MOST_METRICS])
    if tags:
        client.log_batch(run, tags=[entities.RunTag(f"abserve.{name}", value) for name, value in tags.items()])


def key_of(name: str) -> str:
    """A name that every MLflow store accepts: slo(p99≤10ms) becomes slo_p99_10ms."""
    return _FORBIDDEN.sub("_", name).strip("_ /.").replace("_.", ".")[:250] or "unnamed"


def _artefacts_of(uri: str) -> str | None:
    """The folder `mlartifacts` beside a SQLite file, where MLflow would use the working directory; None: MLflow's
    choice."""
    if _scheme(uri) != "sqlite":
        return None
    return (Path(uri.partition("///")[2]).resolve().parent / "mlartifacts").as_uri()


def _scheme(uri: str) -> str:
    return urlsplit(uri).scheme.partition("+")[0]
