"""From no process to the first answer, several times, the arms taking turns.

The page cache is warm: the files of all arms have been read before (by the export, by earlier repetitions), and nobody
drops it. Ports are fresh for every start. The other arms are not running meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from loadgen.bench.arms import Arm
from loadgen.experiment.schedule import arm_orders
from loadgen.records.run import Label
from loadgen.studies.cold_start.records import ColdStart
from loadgen.targets.interface import DeploymentError, StartTimes
from loadgen.transport.bodies import failure_message
from loadgen.transport.exchange import ConnectionRefused
from loadgen.transport.transports import Body

CONDITIONS = "page cache warm, fresh ports, the other servers stopped"


def cold_start_order(labels: Sequence[Label], repetitions: int, seed: int) -> list[tuple[int, Label]]:
    """(repetition, arm) in order: rounds of starts, the order inside them balanced as for blocks."""
    orders = arm_orders(labels, repetitions, Random(seed))
    return [(repetition, label) for repetition, order in enumerate(orders) for label in order]


def measure_cold_start(arm: Arm, repetition: int, first: Body, timeout_s: float) -> ColdStart:
    """Start, wait for live and ready, connect by the arm's transport, send one image. A failure is in the record, not
    raised. The server runs on."""
    label = arm.request.label
    times: StartTimes | None = None
    error: str | None = None
    first_answer_ns: int | None = None
    try:
        arm.deployment.start()
        times = arm.deployment.wait_ready(arm.model, timeout_s)
        target = arm.target
        request = target.sendable(first)
        connection = target.connection((request,), timeout_s=timeout_s)
        try:
            exchange = connection.send(request)
            if exchange.good:
                first_answer_ns = exchange.end_ns - times.started_ns
            else:
                error = failure_message(exchange)
        finally:
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
