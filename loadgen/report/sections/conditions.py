"""Under which conditions: the arms as asked for and in effect, the experiment, the machine, the command."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import loadgen.report.document as doc
from loadgen.analysis.result import Result
from loadgen.quantities import share
from loadgen.records.run import ArmRecord, Experiment, setting_key
from loadgen.studies.gpu_proof.records import own_devices, used_gpu


def arms(result: Result) -> doc.Section | None:
    """Each setting of both arms, as asked for and in effect."""
    by_label = {arm.label: arm for arm in result.arms}
    columns: list[dict[str, str]] = []
    for request in (result.experiment.a, result.experiment.b):
        arm = by_label.get(request.label)
        wanted = dict(request.settings) | (arm.settings if arm else {})
        columns.append({setting_key(name): value for name, value in wanted.items()})
        columns.append(_in_effect(arm) | _sent(result, arm) if arm else {})
    asked_a, effect_a, asked_b, effect_b = columns
    keys = dict.fromkeys([*effect_a, *effect_b, *asked_a, *asked_b])
    return doc.section(
        "Arms, as asked for and in effect",
        doc.Table(
            (
                *doc.names("", "A asked for"),
                *doc.texts("A in effect"),
                *doc.names("B asked for"),
                *doc.texts("B in effect"),
            ),
            [(key.replace("_", " "), *(column.get(key, "–") for column in columns)) for key in keys],
        ),
        on=doc.HTML,
    )


def _in_effect(arm: ArmRecord) -> dict[str, str]:
    server = " ".join(part for part in (arm.server_name, arm.server_version) if part)
    shown = {"target": arm.target, "url": arm.url, "server": server or "–"}
    shown |= {name: str(value) for name, value in arm.in_effect.items()}
    if arm.artefact and "sha256" in arm.artefact:
        shown["artefact_sha256"] = str(arm.artefact["sha256"])[:16] + "…"
    return shown


def _sent(result: Result, arm: ArmRecord) -> dict[str, str]:
    """What an arm was sent, with the bytes of the smallest request's tensors."""
    experiment = result.experiment
    request = experiment.a if arm.label == "a" else experiment.b
    shown = {"payload": experiment.payload_of(request), "transport": experiment.transport}
    sizes = [s.payload_bytes for s in result.summaries if s.label == arm.label and s.payload_bytes is not None]
    if sizes:
        way = "through shared memory" if experiment.transport == "shm" else "over the wire"
        shown["payload_bytes"] = f"{min(sizes):,.0f} a request {way}"
    return shown


def experiment(result: Result) -> doc.Section | None:
    """What was asked for, beside the arms."""
    return doc.section(
        "Experiment", doc.Table((*doc.names(""), *doc.texts("")), experiment_rows(result)), on=doc.PAGES, half=True
    )


def experiment_rows(result: Result) -> list[tuple[str, str]]:
    """(name, value)."""
    e = result.experiment
    stack = [("deployment", f"the compose stack {e.compose_project}, with its own settings")]
    return [
        *(stack if e.deployment == "compose" else []),
        ("model", e.model),
        ("weights", _given(e, e.weights)),
        ("payload", ", ".join(dict.fromkeys(e.payload_of(arm) for arm in (e.a, e.b)))),
        ("transport", e.transport),
        ("preset", e.preset),
        ("equivalence margin δ", f"± {share(e.equivalence_margin)}"),
        ("order of the blocks", f"interleaved pairs, seed {e.seed}"),
        ("threads", _given(e, str(e.threads) if e.threads else "all cores")),
        *([("load generator", f"{e.processes} processes")] if e.processes > 1 else []),
        *([("settings", f"experiment.yaml, sha256 {e.settings_sha256}")] if e.settings_sha256 else []),
    ]


def _given(asked: Experiment, value: str) -> str:
    """What was asked for is in effect only on servers that this tool has started."""
    if asked.deployment != "embedded":
        return asked.weights
    started = [arm.label.upper() for arm in (asked.a, asked.b) if arm.embedded]
    if not started:
        return "as chosen by the servers given by URL"
    return value if len(started) > 1 else f"{value} on {started[0]}; chosen by the other server, given by URL"


def environment(result: Result) -> doc.Section | None:
    """Host, GPU and packages."""
    found = result.environment
    if found is None:
        return doc.section("Environment", doc.Text("Not recorded."), on=doc.HTML, half=True)
    rows = [("started", found.started_at), ("commit", found.git_commit or "–")]
    for name, value in found.host.items():
        if value is None:
            continue
        if name.endswith("_bytes") and isinstance(value, int | float):
            rows.append((name.removesuffix("_bytes").replace("_", " "), f"{value / 2**30:.1f} GiB"))
        else:
            rows.append((name.replace("_", " "), str(value)))
    rows += [("GPU", gpu_text(found.gpu)), *sorted(found.packages.items())]
    return doc.section("Environment", doc.Table((*doc.names(""), *doc.texts("")), rows), on=doc.PAGES, half=True)


def gpu_text(document: Mapping[str, Any]) -> str:
    """The GPU that the servers use, and of how many; the driver's status where none is told."""
    used = used_gpu(document)
    own = own_devices(document, () if used is None else (used,))
    if used is None or [device.get("uuid") for device in own] != [used]:
        return str(document.get("status", "unknown")).replace("_", " ")
    return f"{own[0].get('name') or 'GPU'} {used}, 1 of {len(own_devices(document, ()))}"


def reproduce(result: Result) -> doc.Section | None:
    """The command that made the run."""
    return doc.section("Reproduce", doc.Code(result.environment.command if result.environment else ""))
