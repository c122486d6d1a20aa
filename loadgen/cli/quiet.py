"""Waits for a quiet machine before a measurement begins, so that a run that others would spoil costs seconds."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from time import monotonic
from typing import TYPE_CHECKING, Annotated

import typer

from loadgen.cli.output import complain, console_for, fail
from loadgen.experiment.settings import MEASUREMENT
from loadgen.records.run import ArmRequest

if TYPE_CHECKING:
    from loadgen.measure.machine_watch import OtherPrograms

WAIT_SECONDS = 60.0
WINDOW_SECONDS = 0.5
"""The kernel counts 100 ticks per second and core, so this shows a tenth of two cores."""
EXIT_BUSY = 1
Anyway = Annotated[
    bool,
    typer.Option(
        "--anyway/--no-anyway",
        envvar="ABSERVE_ANYWAY",
        rich_help_panel=MEASUREMENT,
        help="With --strict: measure although other programs use the CPU, instead of waiting up to a minute for them "
        "and giving up.",
    ),
]


def await_quiet(wait: bool, arms: Sequence[ArmRequest] = ()) -> None:
    """Name the programs that use more than 10 % of the cores that the load generator may use, which is the limit of the
    check `machine_idle`. With `wait` return when none do, or end the command with status 1 after a minute. Servers of
    `arms` that run already do not count. Nothing is awaited without /proc."""
    servers = _running_servers(arms)
    others = _look(servers)
    if others is None:
        return
    if not wait:
        complain(f"the machine is busy: {others}; the result may be rough", kind="note", style="yellow")
        return
    others = _wait(servers, others)
    if others is not None:
        fail(f"busy machine: {others}. Stop them and run again, or leave --strict out", EXIT_BUSY)


def _wait(servers: Sequence[int], others: OtherPrograms | None) -> OtherPrograms | None:
    """Wait until no programs disturb; those that still do after a minute. On a terminal the line is kept up to date,
    elsewhere it is printed once."""
    console = console_for(errors=True)
    began = monotonic()
    if not console.is_terminal:
        complain(f"waiting up to {WAIT_SECONDS:.0f} s for a quiet machine: {others}", kind="note", style="yellow")
    with console.status("") as status:
        while others is not None and (left := began + WAIT_SECONDS - monotonic()) > 0:
            status.update(f"waiting {ceil(left)} s more for a quiet machine: {others}")
            others = _look(servers)
    if others is None:
        complain(f"quiet after {monotonic() - began:.0f} s", kind="note", style="yellow")
    return others


def _look(servers: Sequence[int]) -> OtherPrograms | None:
    """The other programs if they use too much CPU time now."""
    from loadgen.checks.machine import BUSY_CORES_LIMIT
    from loadgen.measure.machine_watch import read_others

    others = read_others(WINDOW_SECONDS, servers)
    return others if others is not None and others.share > BUSY_CORES_LIMIT else None


def _running_servers(arms: Sequence[ArmRequest]) -> list[int]:
    """The processes of the arms given by URL that run on this machine, as far as they can be seen."""
    from loadgen.client.connection import Address
    from loadgen.launch.deployment import find_listeners

    addresses = [Address.parse(arm.target, arm.access) for arm in arms if not arm.embedded]
    return [root.pid for address in addresses for root in find_listeners(address)[0]]
