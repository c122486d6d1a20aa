"""The conditions of a run: the arms as requested and in effect, the experiment, the machine, the command."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import loadgen.report.document as doc
from loadgen.base.quantities import join, share
from loadgen.records.machine import own_devices, used_gpus
from loadgen.records.payloads import inputs_in_words
from loadgen.records.run import ArmRecord, Environment, Experiment, setting_key, shown
from loadgen.records.targets import ROUTES
from loadgen.report.charts import several
from loadgen.verdict.result import Result


def arms(result: Result) -> doc.Section | None:
    """Each setting of the arms, as requested and in effect."""
    by_label = {arm.label: arm for arm in result.arms}
    columns: list[dict[str, str]] = []
    for request in result.experiment.arms:
        arm = by_label.get(request.label)
        settings = dict(request.settings) | (arm.settings if arm else {})
        columns.append({setting_key(name): value for name, value in settings.items()})
        columns.append(_in_effect(result, arm) if arm else {})
    keys = dict.fromkeys(key for column in (*columns[1::2], *columns[::2]) for key in column)
    headings = [
        column
        for label in map(shown, result.experiment.labels)
        for column in (*doc.names(f"{label} requested"), *doc.texts(f"{label} in effect"))
    ]
    rows = [(key.replace("_", " "), *(column.get(key, "–") for column in columns)) for key in keys]
    return doc.section("Arms as requested and in effect", doc.Table((*doc.names(""), *headings), rows), on=doc.HTML)


def _in_effect(result: Result, arm: ArmRecord) -> dict[str, str]:
    """The server's settings, and the payload with the bytes of the smallest request's tensors."""
    server = " ".join(part for part in (arm.server_name, arm.server_version) if part)
    values = {"target": arm.target, "url": arm.url, "server": server or "–"}
    values |= {name: str(value) for name, value in arm.in_effect.items()}
    if arm.artefact and "sha256" in arm.artefact:
        values["artefact_sha256"] = str(arm.artefact["sha256"])
    experiment = result.experiment
    values |= {"payload": experiment.payload_of(experiment.arm(arm.label)), "transport": experiment.transport}
    sizes = [s.payload_bytes for s in result.summaries if s.label == arm.label and s.payload_bytes is not None]
    if sizes:
        way = "through shared memory" if ROUTES[experiment.transport].shares_memory else "over the wire"
        values["payload_bytes"] = f"{min(sizes):,.0f} per request {way}"
    return values


def experiment(result: Result) -> doc.Section | None:
    """The settings that all arms share."""
    return fact_table("Experiment", experiment_rows(result))


def fact_table(title: str, rows: list[tuple[str, str]]) -> doc.Section | None:
    """A section of (name, value) rows, half as wide as a page."""
    return doc.section(title, doc.Table((*doc.names(""), *doc.texts("")), rows), on=doc.PAGES, half=True)


def experiment_rows(result: Result) -> list[tuple[str, str]]:
    """Rows of (name, value)."""
    e = result.experiment
    stack = [("deployment", f"the compose stack {e.compose_project}, with its own settings")]
    return [
        *(stack if e.deployment == "compose" else []),
        ("model", e.model),
        ("weights", _given(e, e.weights)),
        *([("precision", _given(e, e.precision))] if e.precision else []),
        *([("inputs", inputs_in_words(sent))] if (sent := result.environment and result.environment.inputs) else []),
        ("payload", ", ".join(e.payloads)),
        ("transport", e.transport),
        ("preset", e.preset),
        ("no meaningful difference", f"within ±{share(e.equivalence_margin)}"),
        ("order of the blocks", f"interleaved {'rounds' if several(result) else 'pairs'}, seed {e.seed}"),
        ("threads", _given(e, str(e.threads) if e.threads else "all cores")),
        *([("load generator", f"{e.processes} processes")] if e.processes > 1 else []),
        *([("settings", f"experiment.yaml, sha256 {e.settings_sha256}")] if e.settings_sha256 else []),
    ]


def _given(asked: Experiment, value: str) -> str:
    """The text of a setting that takes effect only on servers that abserve starts."""
    if asked.deployment != "embedded":
        return asked.weights
    started = [shown(arm.label) for arm in asked.arms if arm.embedded]
    others = len(asked.arms) - len(started)
    if not started:
        return "as chosen by the servers given by URL"
    if not others:
        return value
    whose = "other server" if others == 1 else "other servers"
    return f"{value} on {join(started)}; chosen by the {whose}, given by URL"


def environment(result: Result) -> doc.Section | None:
    """Host, GPU and packages."""
    recorded = result.environment
    if recorded is None:
        return doc.section("Environment", doc.Text("Not recorded."), on=doc.HTML, half=True)
    return fact_table("Environment", environment_rows(recorded))


def reproduce(result: Result) -> doc.Section | None:
    """The command that made the run."""
    command = result.environment.command if result.environment else ""
    return doc.section("Reproduce", doc.Text(command, "code", doc.PAGES))


def environment_rows(environment: Environment) -> list[tuple[str, str]]:
    """Host, GPU and packages as rows of (name, value)."""
    rows = [("started", environment.started_at), ("commit", environment.git_commit or "–")]
    for name, value in environment.host.items():
        title = name.removesuffix("_bytes").replace("_", " ")
        if name.endswith("_bytes") and isinstance(value, int | float):
            rows.append((title, f"{value / 2**30:.1f} GiB"))
        elif value is not None:
            rows.append((name.replace("_", " "), str(value)))
    return [*rows, ("GPU", gpu_text(environment.gpu)), *sorted(environment.packages.items())]


def gpu_text(document: Mapping[str, Any]) -> str:
    """The GPUs that the servers use, and of how many; where no server reports any, the machine's; without any, the
    driver's status."""
    used = used_gpus(document)
    devices = own_devices(document, used)
    if not used or sorted(str(device.get("uuid")) for device in devices) != list(used):
        names = Counter(str(device.get("name") or "GPU") for device in own_devices(document, ()))
        every = [name if count == 1 else f"{count} × {name}" for name, count in names.items()]
        return ", ".join(every) or str(document.get("status", "unknown")).replace("_", " ")
    named = join([f"{device.get('name') or 'GPU'} {device.get('uuid')}" for device in devices])
    return f"{named}, {len(devices)} of {len(own_devices(document, ()))}"
