"""`abserve shadow`: passes traffic on to one server, and compares a second one with it on copies."""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loadgen.cli.output import complain, default_out, fail, publish
from loadgen.cli.record import parse_place, serve

if TYPE_CHECKING:
    from loadgen.recorder.shadow_run import ShadowStanding

HELP_GROUP = "Compare"
LAST_PAIRS_S = 60.0
"""How long the end waits for pairs that are still compared."""


def shadow(
    primary: Annotated[
        str, typer.Option("--primary", metavar="URL", help="The server whose answers clients get.", show_default=False)
    ],
    candidate: Annotated[
        str, typer.Option("--candidate", metavar="URL", help="The server that gets copies.", show_default=False)
    ],
    listen: Annotated[str, typer.Option("--listen", metavar="HOST:PORT", help="Where clients connect.")] = (
        "127.0.0.1:9000"
    ),
    share: Annotated[float, typer.Option("--share", min=1e-6, max=1.0, help="Copy this share of all requests.")] = 0.1,
    minutes: Annotated[
        float | None, typer.Option("--minutes", min=0.001, help="Compare so long.", show_default="until stopped")
    ] = None,
    block_seconds: Annotated[
        float, typer.Option("--block-seconds", min=0.1, help="Length of the blocks of time that are compared.")
    ] = 5.0,
    margin: Annotated[
        float,
        typer.Option("--margin", min=0.001, max=1.0, help="A difference within this share is not meaningful."),
    ] = 0.05,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for the results.", show_default="results/TIME-shadow")
    ] = None,
) -> None:
    """Pass all traffic on to one server, and compare another one with it on copies of the inference requests.

    Clients get the primary's answers unchanged, whatever the candidate does; copies that it is too slow for are dropped
    and counted. The verdict so far is printed after each block of time, and the report after --minutes or on Ctrl-C.

    After --minutes the traffic still passes; Ctrl-C ends it.

    Exit status: 0 ended, 1 the comparison failed, 2 an option is wrong.
    """  # fmt: skip
    from loadgen.client.connection import Address, AddressError
    from loadgen.client.tls import TlsError, tls_context
    from loadgen.recorder.http import HttpTap
    from loadgen.recorder.relay import Relay
    from loadgen.recorder.shadow import Shadow
    from loadgen.recorder.shadow_run import ShadowRun
    from loadgen.records.run import DEFAULT_ACCESS
    from loadgen.records.store import RunStore, StorageError, running
    from loadgen.report.files import stored
    from loadgen.report.renderers.terminal import make_console

    try:
        servers = [Address.parse(primary), Address.parse(candidate)]
        contexts = [tls_context(DEFAULT_ACCESS, "http/1.1") if address.tls else None for address in servers]
        place = parse_place(listen)
    except (AddressError, TlsError, ValueError) as exc:
        fail(str(exc))
    for option, address in (("--primary", servers[0]), ("--candidate", servers[1])):
        if address.base_path:
            fail(f"{option}: give the address without a path, because the paths of requests pass unchanged")
    folder = default_out("shadow") if out is None else out
    try:
        store = RunStore(folder)
    except StorageError as exc:
        fail(str(exc))
    sys.setswitchinterval(0.0005)  # the thread that compares gives way to the traffic
    outcome: list[bool] = []

    def end() -> None:
        """Compare what waits, and write the report."""
        finished = run.finish(LAST_PAIRS_S)
        outcome.append(publish(folder, partial(stored, folder), make_console(sys.stdout)) and finished)

    async def compare() -> None:
        """Copy until --minutes are over, and write the report beside the traffic."""
        with suppress(TimeoutError):
            async with asyncio.timeout(None if minutes is None else 60 * minutes):
                await copies.watch()
        await asyncio.to_thread(end)

    with running(folder):
        try:
            run = ShadowRun(
                store, (servers[0].url, servers[1].url), share=share, block_s=block_seconds, margin=margin,
                say=_say, failed=_say_failed,
            )  # fmt: skip
        except StorageError as exc:
            fail(str(exc))
        copies = Shadow(servers[1], contexts[1], share=share, counts=run.counts, paired=run.take)
        relay = Relay(servers[0], lambda: HttpTap(copies), contexts[0])
        asyncio.run(serve([(relay, place)], f"compared with {servers[1].authority}", compare()))
        if not outcome:
            end()
    if outcome != [True]:
        raise typer.Exit(1)


def _say(standing: ShadowStanding) -> None:
    """Show the standing, on a terminal in the place of the last one."""
    typer.echo(f"\r\x1b[K{standing}" if sys.stdout.isatty() else str(standing), nl=not sys.stdout.isatty())


def _say_failed(why: str) -> None:
    complain(f"the comparison has ended, and the traffic goes on: {why}", kind="note", style="yellow")
