"""`abserve record`: passes traffic on to a server and records it."""

from __future__ import annotations

import asyncio
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from loadgen.base.exposure import ANYONE, exposure
from loadgen.base.quantities import counted
from loadgen.cli.output import complain, fail

if TYPE_CHECKING:
    from loadgen.client.connection import Address
    from loadgen.recorder.grpc import GrpcTap
    from loadgen.recorder.http import HttpTap
    from loadgen.recorder.recorder import Observer
    from loadgen.recorder.relay import Relay

HELP_GROUP = "Compare"
Listen = Annotated[str, typer.Option("--listen", metavar="HOST:PORT", help="Where clients connect.")]
GrpcListen = Annotated[str, typer.Option("--grpc-listen", metavar="HOST:PORT", help="Where clients of gRPC connect.")]
Anyone = Annotated[bool, typer.Option("--anyone", help=ANYONE)]


def record(
    out: Annotated[Path, typer.Option(help="A new folder for the traffic.", show_default=False)],
    to: Annotated[
        str | None, typer.Option(metavar="URL", help="The server that gets the requests.", show_default=False)
    ] = None,
    listen: Listen = "127.0.0.1:9000",
    grpc_to: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="The server's gRPC address.", show_default=False),
    ] = None,
    grpc_listen: GrpcListen = "127.0.0.1:9001",
    anyone: Anyone = False,
    to_ca: Annotated[
        str | None, typer.Option(metavar="FILE", help="Trust these CA certificates.", show_default="system")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0.001, help="Record so long.", show_default="until stopped")
    ] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="Record so many.", show_default="no limit")] = None,
    max_bytes: Annotated[
        int | None,
        typer.Option(
            min=1,
            show_default="no limit",
            help="The largest size of the folder. Stretches of 10 s are left out at random, the same chance for each.",
        ),
    ] = None,
    share: Annotated[float, typer.Option(min=1e-6, max=1.0, help="Record this share of all requests.")] = 1.0,
    contents: Annotated[bool, typer.Option("--contents/--no-contents", help="Store what the requests contain.")] = True,
    answers: Annotated[bool, typer.Option("--answers/--no-answers", help="Store what the server answers.")] = False,
    shown: Annotated[
        int | None, typer.Option(hidden=True, help="The socket of a server that shows its connections.")
    ] = None,
) -> None:
    """Pass all traffic on to a server and record the inference requests in it, for `abserve compare --traffic`.

    Clients connect to --listen in place of the server and notice nothing; if recording fails, their traffic goes on.
    Other requests pass unrecorded. Credentials, cookies and addresses are never stored.

    After --minutes or --requests the traffic still passes; Ctrl-C ends it.

    Exit status: 0 ended, 1 the recording failed, 2 an option is wrong.
    """  # fmt: skip
    from loadgen.client.tls import TlsError
    from loadgen.measure.machine import installed_versions, utc_now
    from loadgen.recorder.recorder import Recorder
    from loadgen.recorder.relay import Relay, Upstream
    from loadgen.recorder.shown import ShownBytes
    from loadgen.records.traffic import TrafficError, TrafficRecording, TrafficWriter

    if to is None and grpc_to is None and shown is None:
        fail("give the server that gets the requests with --to URL, --grpc-to HOST:PORT, or both")
    try:
        ways = [] if to is None else [parse_way([to], listen, [to_ca], anyone=anyone)]
        ways += [] if grpc_to is None else [parse_way([grpc_to], grpc_listen, [to_ca], is_grpc=True, anyone=anyone)]
        started = TrafficRecording(
            started_at=utc_now(),
            abserve=installed_versions(["abserve"]).get("abserve", ""),
            share=share,
            contents=contents,
            answers=answers,
            max_bytes=max_bytes,
        )
        writer = TrafficWriter(out, started)
    except (TlsError, TrafficError, ValueError) as exc:
        fail(str(exc))
    sys.setswitchinterval(0.0005)  # the thread that writes gives way to the traffic
    source = None if shown is None else ShownBytes(shown)

    def say_ended(why: str) -> None:
        complain(f"the recording has ended: {why}", kind="note", style="yellow")
        if source is not None:
            source.end()

    recorder = Recorder(writer, minutes=minutes, requests=requests, ended=say_ended)
    if source is not None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        source.read(recorder)
    else:
        relays = [(Relay(Upstream(way.servers[0], way.tap(recorder), way.contexts[0])), way.place) for way in ways]
        asyncio.run(serve(relays, f"recorded in {out}"))
    written = recorder.stop("it was stopped", 2.0 if source is None else 10.0)  # nobody waits for a server's
    state = writer.recording
    typer.echo(f"{counted(state.requests, 'request')} in {out}, {state.lost} lost")
    if not written or recorder.failed:
        raise typer.Exit(1)


async def serve(
    relays: list[tuple[Relay, tuple[str, int]]], what: str, beside: Coroutine[Any, Any, None] | None = None
) -> None:
    """Pass traffic on until the process is told to end, and run `beside` as long."""
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    task = None if beside is None else asyncio.get_running_loop().create_task(beside)
    for relay, (host, port) in relays:
        relay.on_refused = partial(complain, kind="warning", style="yellow")
        try:
            bound = await relay.listen(host, port)
        except OSError as exc:
            fail(f"cannot listen on {host}:{port}: {exc.strerror or exc}; choose another --listen or --grpc-listen")
        typer.echo(f"{host}:{bound} → {' and '.join(each.address.authority for each in relay.servers)}, {what}")
    await ended.wait()
    if task is not None:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


class Way(NamedTuple):
    """The servers of one protocol, the first of which gets the requests, and where their clients connect."""

    servers: list[Address]
    contexts: list[ssl.SSLContext | None]
    """For connections with TLS."""
    place: tuple[str, int]
    is_grpc: bool

    def tap(self, observer: Observer) -> Callable[[], HttpTap | GrpcTap]:
        """Makes what looks at a connection for an observer."""
        from loadgen.recorder.grpc import GrpcTap
        from loadgen.recorder.http import HttpTap

        return partial(GrpcTap if self.is_grpc else HttpTap, observer)


def parse_way(
    urls: Sequence[str], listen: str, cas: Sequence[str | None], *, is_grpc: bool = False, anyone: bool = False
) -> Way:
    """Raises `ValueError`, `TlsError`."""
    from loadgen.client.connection import Address
    from loadgen.client.grpc import parse_grpc_address
    from loadgen.client.tls import tls_context
    from loadgen.records.run import Access

    servers = [parse_grpc_address(url) if is_grpc else Address.parse(url) for url in urls]
    for url, address in zip(urls, servers, strict=True):
        if address.base_path:
            raise ValueError(f"{url}: give the address without a path, because the paths of requests pass unchanged")
    contexts = [
        tls_context(Access(ca=ca), "h2" if is_grpc else "http/1.1") if address.tls else None
        for address, ca in zip(servers, cas, strict=True)
    ]
    place = parse_place(listen, "--grpc-listen" if is_grpc else "--listen", anyone=anyone)
    return Way(servers, contexts, place, is_grpc)


def parse_place(value: str, option: str, *, anyone: bool) -> tuple[str, int]:
    """Host and port. Raises `ValueError`, also if other machines reach it and `anyone` does not say that they may, and
    if the port is taken: then nothing is written yet that would be in the way of another try."""
    host, _, port = value.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise ValueError(f"{value} is not an address to listen on; give one like 127.0.0.1:9000")
    host = host.strip("[]")
    if reason := exposure(option, host, anyone=anyone):
        raise ValueError(reason)
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM):
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(address)
    except OSError as exc:
        raise ValueError(f"cannot listen on {host}:{port}: {exc.strerror or exc}; choose another {option}") from exc
    return host, int(port)
