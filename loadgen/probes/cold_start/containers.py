"""From a stopped container to its first answers, step by step: the engine, the process, imports, weights, batches.

The steps between the container's start and "ready" are the times at which the Docker engine received the server's log
lines, on this machine's clock. A step that the server does not log is missing, never 0.

The container and its image are kept, so its files are in the page cache. `cached` also keeps what torch and Triton have
compiled (the volume `caches`); `uncached` empties that volume first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec

from loadgen.client.bodies import PreparedBody
from loadgen.client.connection import Address, ConnectionRefused, failure_message
from loadgen.client.http import HttpConnection
from loadgen.launch.compose import ComposeDeployment, LogLine, wall_to_monotonic_ns
from loadgen.launch.deployment import DeploymentError
from loadgen.probes.cold_start.records import Caches, ContainerColdStart
from loadgen.records.run import Label

CONDITIONS: Mapping[Caches, str] = {
    "cached": "container kept and started again, page cache warm, compile caches kept",
    "uncached": "container kept and started again, page cache warm, compile caches emptied",
}
_CACHE_FOLDER = "/caches"

MILESTONES: Sequence[tuple[str, re.Pattern[str]]] = (
    ("process", re.compile(r".")),
    ("door_open", re.compile(r"\blistening\b.*url=|Started HTTPService")),
    ("imported", re.compile(r"\bengine imported\b")),
    ("load_begins", re.compile(r"loading: \S+:\d+")),
    ("weights_loaded", re.compile(r"\bweights loaded\b")),
    ("engine_ready", re.compile(r"\bengine ready\b|\bready\b.*warm_up_s=|successfully loaded '")),
)
"""A step → the first log line, of either server, that ends it."""


def measure_container_cold_start(
    deployment: ComposeDeployment,
    model: str,
    bodies: Mapping[int, PreparedBody],
    *,
    label: Label,
    repetition: int,
    timeout_s: float,
    caches: Caches = "cached",
) -> ContainerColdStart:
    """Stop, start, wait, send one request per batch size in `bodies`, which must hold size 1. The server runs on.

    A failure is in the record, not raised. Raises `DeploymentError` when the container cannot even be stopped.
    """
    if caches == "uncached":
        _empty_caches(deployment)
    deployment.stop()
    record = ContainerColdStart(
        label=label,
        repetition=repetition,
        service=deployment.container.service,
        image=deployment.container.image,
        conditions=CONDITIONS[caches],
        caches=caches,
    )
    found: dict[str, object] = {}
    try:
        offset_ns = wall_to_monotonic_ns()
        deployment.start()
        times = deployment.wait_ready(model, timeout_s)
        found["live_ns"] = times.live_ns - times.started_ns
        found["ready_ns"] = times.ready_ns - times.started_ns
        first_ns, answers = _first_answers(deployment.url, model, bodies, timeout_s)
        found["first_answer_ns"] = first_ns - times.started_ns
        found["batch_answers_ns"] = answers
        created = deployment.container.created_process_ns()
        found["started_ns"] = None if created is None else created + offset_ns - times.started_ns
        found["milestones_ns"] = milestones(deployment.log(), offset_ns - times.started_ns)
    except (DeploymentError, ConnectionRefused) as exc:
        found["error"] = str(exc)
    return msgspec.structs.replace(record, **found)


def milestones(log: Sequence[LogLine], shift_ns: int) -> dict[str, int]:
    """Step → ns since the start, for each step in the log; `shift_ns` converts its wall clock."""
    lines = {name: next((line for line in log if pattern.search(line.text)), None) for name, pattern in MILESTONES}
    return {name: line.at_ns + shift_ns for name, line in lines.items() if line is not None}


def _first_answers(
    url: str, model: str, bodies: Mapping[int, PreparedBody], timeout_s: float
) -> tuple[int, dict[int, int]]:
    """When the first request was answered, and the latency of the first request of each batch size."""
    address = Address.parse(url)
    connection = HttpConnection(address, timeout_s=timeout_s)
    answers: dict[int, int] = {}
    first_ns = 0
    try:
        for size in sorted(bodies):
            exchange = connection.send(bodies[size].request(address, model))
            if exchange.status != 200:
                raise DeploymentError(f"the first request of batch {size}: {failure_message(exchange)}")
            first_ns = first_ns or exchange.end_ns
            answers[size] = exchange.end_ns - exchange.send_ns
    finally:
        connection.close()
    return first_ns, answers


def _empty_caches(deployment: ComposeDeployment) -> None:
    """Empty the caches, which works inside a running container only; without the volume there is nothing to empty."""
    if deployment.container.state().status != "running":
        deployment.container.start()
    script = f"[ ! -d {_CACHE_FOLDER} ] || find {_CACHE_FOLDER} -mindepth 1 -delete"
    status, output = deployment.container.execute("sh", "-c", script)
    if status != 0:
        raise DeploymentError(f"the compile caches cannot be emptied: {output.strip()[:200]}")
