"""`abserve shadow`: passes traffic on to one server, and compares a second one with it on copies."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import perf_counter_ns
from typing import TYPE_CHECKING, Annotated

import typer

from loadgen.cli.output import complain, default_out, fail, publish
from loadgen.cli.record import Anyone, GrpcListen, Listen, parse_place, parse_way, serve

if TYPE_CHECKING:
    from loadgen.cli.record import Way
    from loadgen.recorder.relay import Relay
    from loadgen.recorder.shadow import Shadow
    from loadgen.recorder.shadow_run import ShadowRun

HELP_GROUP = "Compare"
LAST_PAIRS_S = 60.0
"""How long the end waits for pairs that are still compared."""


def shadow(
    primary: Annotated[
        str | None,
        typer.Option(metavar="URL", help="The server whose answers clients get.", show_default=False),
    ] = None,
    candidate: Annotated[
        str | None, typer.Option(metavar="URL", help="The server that gets copies.", show_default=False)
    ] = None,
    listen: Listen = "127.0.0.1:9000",
    primary_grpc: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="The primary's gRPC address.", show_default=False),
    ] = None,
    candidate_grpc: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="The candidate's gRPC address.", show_default=False),
    ] = None,
    grpc_listen: GrpcListen = "127.0.0.1:9001",
    anyone: Anyone = False,
    primary_ca: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Trust these CA certificates.", show_default="system"),
    ] = None,
    candidate_ca: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Trust these CA certificates.", show_default="system"),
    ] = None,
    share: Annotated[float, typer.Option(min=1e-6, max=1.0, help="Copy this share of all requests.")] = 0.1,
    minutes: Annotated[
        float | None, typer.Option(min=0.001, help="Compare so long.", show_default="until stopped")
    ] = None,
    block_seconds: Annotated[
        float, typer.Option(min=0.1, help="Length of the blocks of time that are compared.")
    ] = 10.0,
    swap: Annotated[
        bool,
        typer.Option("--swap", help="Let clients get the answers of both in turns, by blocks in random order."),
    ] = False,
    margin: Annotated[
        float, typer.Option(min=0.001, max=1.0, help="A difference within this share is not meaningful.")
    ] = 0.05,
    metrics_listen: Annotated[
        str | None,
        typer.Option(
            metavar="[HOST:]PORT",
            show_default="none",
            help="Serve Prometheus metrics there, without a host for this machine alone.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the results.", show_default="results/TIME-shadow")
    ] = None,
) -> None:
    """Pass all traffic on to one server, and compare another one with it on copies of the inference requests.

    Clients get the primary's answers unchanged, whatever the candidate does; copies that it is too slow for are dropped
    and counted. The verdict so far is printed after each block of time, and the report after --minutes or on Ctrl-C.

    After --minutes the traffic still passes; Ctrl-C ends it.

    Exit status: 0 ended, 1 the comparison failed, 2 an option is wrong.
    """  # fmt: skip
    from loadgen.client.tls import TlsError
    from loadgen.findings.shadow import FOR_CLIENTS
    from loadgen.recorder.shadow_run import LABELS, ShadowRun
    from loadgen.records.run import Access, ArmRequest
    from loadgen.records.store import RunStore, StorageError, running
    from loadgen.report.files import published
    from loadgen.verdict.result import stored_result

    urls, grpc_urls = (primary, candidate), (primary_grpc, candidate_grpc)
    if urls == grpc_urls == (None, None) or any((base is None) != (other is None) for base, other in (urls, grpc_urls)):
        fail("give both servers: --primary and --candidate URL, --primary-grpc and --candidate-grpc HOST:PORT, or all")
    try:
        metrics_place = None
        if metrics_listen is not None:
            place = metrics_listen if ":" in metrics_listen else f"127.0.0.1:{metrics_listen}"
            metrics_place = parse_place(place, "--metrics-listen", anyone=anyone)
        ways = [
            parse_way(
                [url for url in given if url is not None],
                place,
                [primary_ca, candidate_ca],
                is_grpc=given is grpc_urls,
                anyone=anyone,
            )
            for given, place in ((urls, listen), (grpc_urls, grpc_listen))
            if given != (None, None)
        ]
    except (TlsError, ValueError) as exc:
        fail(str(exc))
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
        _, is_written = publish(folder, partial(stored_result, folder), published)
        outcome.append(is_written and finished)

    def say_failed(why: str) -> None:
        complain(f"the comparison has ended, and the traffic goes on: {why}", kind="note", style="yellow")

    async def compare() -> None:
        """Copy until --minutes are over, and write the report beside the traffic."""
        with suppress(TimeoutError):
            async with asyncio.timeout(None if minutes is None else 60 * minutes):
                await asyncio.gather(_alternate(run, relays), *(shadow.watch() for shadow in shadows))
        for relay in relays:
            relay.choose(0)
        await asyncio.to_thread(end)

    with running(folder):
        arms = [
            ArmRequest(label=label, target=url or grpc or "", grpc=grpc, access=Access(ca=ca))
            for label, url, grpc, ca in zip(LABELS, urls, grpc_urls, (primary_ca, candidate_ca), strict=True)
        ]
        try:
            run = ShadowRun(
                store, (arms[0], arms[1]), share=share, block_s=block_seconds, margin=margin,
                say=_say, failed=say_failed, takes_turns=swap,
            )  # fmt: skip
        except StorageError as exc:
            fail(str(exc))
        if metrics_place is not None:
            _serve_metrics(run, metrics_place)
        relays, shadows = _relays(ways, run, share)
        if swap:
            complain(FOR_CLIENTS, kind="note", style="yellow")
        candidates = " and ".join(way.servers[1].authority for way in ways)
        places = [way.place for way in ways]
        asyncio.run(serve([*zip(relays, places, strict=True)], f"compared with {candidates}", compare()))
        if not outcome:
            end()
    if outcome != [True]:
        raise typer.Exit(1)


def _relays(ways: Sequence[Way], run: ShadowRun, share: float) -> tuple[list[Relay], list[Shadow]]:
    """A relay per protocol, and the shadows that copy what passes it; if servers take turns, one for each server."""
    from loadgen.recorder.relay import Relay, Upstream
    from loadgen.recorder.shadow import ReadingTime, Shadow
    from loadgen.recorder.shadow_run import LABELS

    reading, shadows, relays = ReadingTime(), list[Shadow](), list[Relay]()
    takes_turns = run.seed is not None
    for way in ways:
        upstreams = []
        for number, arm in enumerate(LABELS if takes_turns else LABELS[:1]):
            shadow = Shadow(
                way.servers[1 - number], way.contexts[1 - number], share=share, counts=run.counts, reading=reading,
                paired=run.take, is_grpc=way.is_grpc, arm=arm, takes_turns=takes_turns,
            )  # fmt: skip
            shadows.append(shadow)
            upstreams.append(Upstream(way.servers[number], way.tap(shadow), way.contexts[number]))
        relays.append(Relay(*upstreams))
    return relays, shadows


def _serve_metrics(run: ShadowRun, place: tuple[str, int]) -> None:
    from loadgen.recorder.metrics import ShadowMetrics
    from loadgen.report.prometheus import start_exporter

    host, port = place
    try:
        start_exporter(ShadowMetrics(run), host, port)
    except OSError as exc:
        fail(f"cannot listen on {host}:{port}: {exc.strerror or exc}; choose another --metrics-listen")


async def _alternate(run: ShadowRun, relays: Sequence[Relay]) -> None:
    """Choose whose turn it is at the beginning of each block of time; does nothing if servers take no turns."""
    from loadgen.recorder.shadow_run import LABELS, whose_turn

    while run.seed is not None:
        now_ns = perf_counter_ns()
        turn, within_ns = divmod(now_ns - run.started_ns, run.block_ns)
        for relay in relays:
            relay.choose(LABELS.index(whose_turn(run.seed, turn)))
        await asyncio.sleep((run.block_ns - within_ns) / 1e9)


def _say(_verdict: str, line: str) -> None:
    """Show what is known so far, on a terminal in the place of the last line."""
    typer.echo(f"\r\x1b[K{line}" if sys.stdout.isatty() else line, nl=not sys.stdout.isatty())
