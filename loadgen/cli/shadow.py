"""`abserve shadow`: passes traffic on to one server, and compares a second one with it on copies."""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated

import typer

from loadgen.base.quantities import counted
from loadgen.cli.output import fail
from loadgen.cli.record import parse_place, serve

HELP_GROUP = "Compare"


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
    share: Annotated[float, typer.Option("--share", min=1e-6, max=1.0, help="Copy this share of all requests.")] = 1.0,
) -> None:
    """Pass all traffic on to one server, and compare another one with it on copies of the inference requests.

    Clients connect to --listen in place of the primary and get its answers unchanged, whatever the candidate does.
    Copies that the candidate is too slow for are dropped and counted. Ctrl-C ends it.

    Exit status: 0 ended, 2 an option is wrong.
    """  # fmt: skip
    from loadgen.client.connection import Address, AddressError
    from loadgen.client.tls import TlsError, tls_context
    from loadgen.recorder.http import HttpTap
    from loadgen.recorder.relay import Relay
    from loadgen.recorder.shadow import PairedRequest, Shadow
    from loadgen.records.run import DEFAULT_ACCESS

    try:
        servers = [Address.parse(primary), Address.parse(candidate)]
        contexts = [tls_context(DEFAULT_ACCESS, "http/1.1") if address.tls else None for address in servers]
        place = parse_place(listen)
    except (AddressError, TlsError, ValueError) as exc:
        fail(str(exc))
    for option, address in (("--primary", servers[0]), ("--candidate", servers[1])):
        if address.base_path:
            fail(f"{option}: give the address without a path, because the paths of requests pass unchanged")
    sys.setswitchinterval(0.0005)  # the thread that compares gives way to the traffic
    pairs = 0

    def paired(first: PairedRequest, copy: PairedRequest) -> None:
        nonlocal pairs
        pairs += 1
        copies.freed_bytes += first.held_bytes + copy.held_bytes

    copies = Shadow(servers[1], contexts[1], share=share, paired=paired)
    relay = Relay(servers[0], lambda: HttpTap(copies), contexts[0])
    asyncio.run(serve([(relay, place)], f"copied to {servers[1].authority}", copies.watch()))
    counts = copies.counts
    typer.echo(f"{counted(pairs, 'pair')}, {counts.dropped} dropped, {counts.failed} failed")
