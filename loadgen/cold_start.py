"""From no process to the first answer, several times, the arms taking turns.

The page cache is warm: the files of both arms have been read before (by the export, by earlier repetitions), and nobody
drops it. Ports are fresh for every start. The other arm is not running meanwhile.
"""

from __future__ import annotations

from random import Random

from loadgen.arms import Arm
from loadgen.bodies import PreparedBody, failure_message
from loadgen.clients.http import ConnectionRefused, HttpConnection
from loadgen.clients.requests import Address
from loadgen.deployment.interface import DeploymentError, StartTimes
from loadgen.records import ColdStart, Label
from loadgen.schedule import pair_orders

CONDITIONS = "page cache warm, fresh ports, the other server stopped"


def cold_start_order(repetitions: int, seed: int) -> list[tuple[int, Label]]:
    """(repetition, arm) in order: pairs of starts, the order inside them balanced as for blocks."""
    orders = pair_orders(repetitions, Random(seed))
    return [(repetition, label) for repetition, order in enumerate(orders) for label in order]


def measure_cold_start(arm: Arm, repetition: int, first: PreparedBody, timeout_s: float) -> ColdStart:
    """Start, wait for live and ready, send one image. A failure is in the record, not raised. The server runs on."""
    label = arm.request.label
    times: StartTimes | None = None
    error: str | None = None
    first_answer_ns: int | None = None
    try:
        arm.deployment.start()
        times = arm.deployment.wait_ready(arm.model, timeout_s)
        address = Address.parse(arm.deployment.url)
        connection = HttpConnection(address, timeout_s=timeout_s)
        exchange = connection.send(first.request(address, arm.model))
        if exchange.status == 200:
            first_answer_ns = exchange.end_ns - times.started_ns
        else:
            error = failure_message(exchange)
        connection.close()
    except (DeploymentError, ConnectionRefused) as exc:
        error = str(exc)
    return ColdStart(
        label=label,
        repetition=repetition,
        live_ns=None if times is None else times.live_ns - times.started_ns,
        ready_ns=None if times is None else times.ready_ns - times.started_ns,
        first_answer_ns=first_answer_ns,
        error=error,
        conditions=CONDITIONS,
    )
