"""A server of a comparison: how it is started, found and stopped, wherever it runs; and a server at a URL."""

from __future__ import annotations

import os
import re
import socket
import struct
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from time import monotonic, perf_counter_ns, sleep
from typing import Any

import psutil

from loadgen.base.child_process import cpu_ns, tree
from loadgen.base.documents import one_line
from loadgen.client.connection import Address, ConnectionRefused, TlsRefused
from loadgen.client.endpoint import (
    CompletionsEndpoint,
    Endpoint,
    Signature,
    model_names,
    nothing_ready,
    ready_models,
    unmeasurable,
    versioned,
)
from loadgen.client.grpc import GrpcConnection, parse_grpc_address
from loadgen.client.http import MALFORMED, HttpConnection
from loadgen.client.tls import speaks_tls
from loadgen.records.model_config import pad_sizes, reported_padding
from loadgen.records.payloads import without_backend
from loadgen.records.run import DEFAULT_ACCESS, Access

RUNNING_READY_SECONDS = 5.0
"""How long a server at a URL, which runs already, may take to be ready."""
_POLL_SECONDS = 0.005

RELAYS = frozenset(
    {"docker-proxy", "rootlessport", "slirp4netns", "pasta", "gvproxy", "ssh", "sshd", "nginx", "haproxy", "envoy",
     "traefik", "caddy", "kubectl", "socat"}
)  # fmt: skip
"""Programs that only forward requests: the process that listens is not the one that computes."""
_NO_SUCH_ROUTE = frozenset({404, 405, 501})
REFUSED_ACCESS = frozenset({401, 403, 407})
Roots = tuple[psutil.Process, ...]


class DeploymentError(Exception):
    """A server cannot be started, is not ready in time or has died; the message says why and what to do."""


def batch_sentence(limit: int, largest: int) -> str:
    """Why a server does not take the batches of the load."""
    return (
        f"the load has batches of {largest}, but it accepts at most {limit}; raise its max-batch-size or leave them out"
    )


class Deployment:
    """One server. Life: `start` → `wait_ready` → … → `stop`; it may be started again after that. This base class knows
    only its URL: it starts and stops nothing, and its processes are unknown."""

    launched = False
    """Whether `start` starts the server and `stop` ends it."""
    url: str
    """The URL where it answers HTTP; set by `start` for a launched server, like the rest."""
    grpc_address: str | None = None
    """Address where it answers gRPC."""
    access: Access = DEFAULT_ACCESS
    """How its URL is reached."""
    model: str | None = None
    """The name under which a launched server serves the model, by its launch plan; known after `check` or `start`."""
    title: str | None = None
    """The name in its launch plan."""
    argv: tuple[str, ...] | None = None
    artefact: dict[str, object] | None = None
    """The manifest of the exported file that it executes."""
    tuning: Mapping[str, str] = {}
    """Settings of a launched server that only affect its speed and differ from its own defaults."""
    cannot_pad: str | None = None
    """Why abserve cannot make it pad batches, as a clause; None: it takes the option pad-to. Known after `check`."""
    pads_to: tuple[int, ...] = ()
    """The sizes to which a running server pads by its configuration."""
    started_ns: int | None = None
    processes_unknown: str | None = None
    """Why `pids` is empty, as the end of a sentence."""
    largest_batch = 1
    """The largest batch of the load."""
    completions_only = False
    """Whether the server speaks OpenAI's API and not the Open Inference Protocol."""

    def endpoint(self, timeout_s: float = 10.0) -> Endpoint:
        """Where the server answers about itself."""
        kind = CompletionsEndpoint if self.completions_only else Endpoint
        return kind(self.url, timeout_s=timeout_s, access=self.access)

    def check(self, model: str) -> None:
        """Find what would keep the server from serving the load, before a run begins. Raises `DeploymentError`."""

    def plan(self) -> None:
        """Find how the next `start` creates the process, which may take seconds; from any thread. Raises
        `DeploymentError`."""

    def start(self) -> None:
        """Create the process, on fresh ports, and return at once. It ends with the thread that calls this. Raises
        `DeploymentError`."""

    def wait_ready(self, model: str, timeout_s: float) -> tuple[int, int, int]:
        """Ask `live`, then `ready`, every 5 ms until the model is ready. Returns when the server was started, was live
        and was ready, by `perf_counter_ns`. Raises `DeploymentError` when the server ends or the time is up."""
        started_ns = perf_counter_ns() if self.started_ns is None else self.started_ns
        endpoint = self.endpoint(timeout_s)
        deadline_s = monotonic() + timeout_s
        late = f"after {timeout_s:g} s"
        self.wait_until(
            endpoint.live,
            deadline_s,
            lambda: f"the server at {self.url} is not live {late} ({endpoint.why_not_live()})",
        )
        live_ns = perf_counter_ns()
        model_text = versioned(model, endpoint.address.access.version)
        self.wait_until(
            lambda: endpoint.ready(model),
            deadline_s,
            lambda: f"the server at {self.url} is live, but {model_text} is not ready {late}",
        )
        return started_ns, live_ns, perf_counter_ns()

    def wait_until(self, condition: Callable[[], bool], deadline_s: float, problem: Callable[[], str]) -> None:
        """Poll a condition of the running server. Raises `DeploymentError` when the server ends, and with `problem` at
        the deadline (`time.monotonic`)."""
        while not condition():
            failure = self.failure()
            if failure is not None:
                raise DeploymentError(f"the server {failure}")
            if monotonic() > deadline_s:
                raise DeploymentError(problem())
            sleep(_POLL_SECONDS)

    def failure(self) -> str | None:
        """How the server ended; None while it runs, or when that cannot be known."""
        return None

    def pids(self) -> tuple[int, ...]:
        """Its processes; empty where they are unknown, with the reason in `processes_unknown`."""
        return ()

    def cpu_ns(self) -> int | None:
        """CPU time that its processes have used so far; None where they are unknown."""
        return None

    def stop(self) -> None:
        """End a launched server. Bounded and idempotent."""


def stop_all(deployments: Iterable[Deployment]) -> None:
    """Stop them at the same time, since each may take seconds to end; all of them, whatever one raises."""
    deployments = list(deployments)
    with ThreadPoolExecutor(max(1, len(deployments))) as pool:
        stopping = [pool.submit(deployment.stop) for deployment in deployments]
    for stopped in stopping:
        stopped.result()


class RemoteDeployment(Deployment):
    """A server at a URL that is already running. Cold starts cannot be measured on it."""

    def __init__(
        self,
        url: str,
        grpc_address: str | None = None,
        access: Access = DEFAULT_ACCESS,
        *,
        model_option: str = "--model",
    ) -> None:
        """`model_option` names the model on this server. Raises `AddressError` for anything but HTTP."""
        self._address = Address.parse(url, access)
        self.url = self._address.url
        self.grpc_address = grpc_address
        self.access = access
        self._model_option = model_option
        self._listeners: Roots | None = None

    def check(self, model: str) -> None:
        """Wait a moment for a server that was started just now, then read its configuration if it has one, and connect
        to its gRPC."""
        self.wait_ready(model, RUNNING_READY_SECONDS)
        endpoint = Endpoint(self.url, access=self.access)
        config = endpoint.config(model)
        if fault := unmeasurable(config, model):
            raise DeploymentError(fault)
        self._read_padding(config)
        limit = (config or {}).get("max_batch_size")
        if self.largest_batch > 1 and not self.signature(model).batched:
            raise DeploymentError(
                f"the load has batches of {self.largest_batch}, but model {model} has no batch dimension; leave "
                "batched out of --scenarios"
            )
        if isinstance(limit, int) and 0 < limit < self.largest_batch:
            raise DeploymentError(batch_sentence(limit, self.largest_batch))
        if self.grpc_address is not None:
            grpc = GrpcConnection(self.grpc_address, timeout_s=RUNNING_READY_SECONDS, access=self.access)
            try:
                grpc.connect()
            except ConnectionRefused as exc:
                remedy = tls_remedy(parse_grpc_address(self.grpc_address), "grpcs")
                raise DeploymentError(f"gRPC: {exc}{remedy}") from exc
            finally:
                grpc.close()

    def signature(self, model: str) -> Signature:
        """The model's metadata. Raises `EndpointError`."""
        return Endpoint(self.url, access=self.access).signature(model)

    def _read_padding(self, config: Mapping[str, Any] | None) -> None:
        rule = reported_padding(config)
        self.pads_to = pad_sizes(rule or "")
        if rule is None:
            self.cannot_pad = "its server does not report whether it pads"
        else:
            self.cannot_pad = f"its server {f'pads to {rule}' if self.pads_to else 'merges only equal lengths'}"

    def wait_ready(self, model: str, timeout_s: float) -> tuple[int, int, int]:
        """Wait until the server is ready; the error says what its owner can do."""
        self._check_protocol()
        try:
            return super().wait_ready(model, timeout_s)
        except DeploymentError as exc:
            if other := self._other_models(model):
                raise DeploymentError(other) from exc
            remedy = tls_remedy(self._address, "https") or f"; start it, or correct the URL or {self._model_option}"
            raise DeploymentError(f"{exc}{remedy}") from exc

    def wait_live(self) -> Endpoint:
        """The server's endpoint, once it is live. Raises `DeploymentError`."""
        self._check_protocol()
        endpoint, deadline_s = Endpoint(self.url, access=self.access), monotonic() + RUNNING_READY_SECONDS
        late = f"after {RUNNING_READY_SECONDS:g} s"
        self.wait_until(
            endpoint.live,
            deadline_s,
            lambda: (
                f"the server at {self.url} is not live {late} ({endpoint.why_not_live()})"
                f"{tls_remedy(self._address, 'https') or '; start it, or correct the URL'}"
            ),
        )
        return endpoint

    def _other_models(self, model: str) -> str | None:
        """What the server serves instead of a model, and the option to give; None if it does not say."""
        rows = self.endpoint(RUNNING_READY_SECONDS).repository_index()
        if rows is None or any(row.name == model and row.state in (None, "READY") for row in rows):
            return None
        if row := next((row for row in rows if row.name == model), None):
            state = one_line(": ".join(filter(None, (row.state, row.reason))))
            return f"model {model} of the server at {self.url} is not ready: {state}"
        served = ready_models(rows)
        if not served:
            return nothing_ready(self.url, rows, model)
        alike = [name for name in served if without_backend(name) == model]
        close = alike or get_close_matches(model, served, n=1) or served
        remedy = f"add {self._model_option} {model_names(close)}"
        if len(close) > 1:
            remedy = f"name one of them with {self._model_option}"
        return f"the server at {self.url} serves {model_names(served)}, not {model}; {remedy}"

    def pids(self) -> tuple[int, ...]:
        """The processes that listen on its port, if it runs on this machine, with their descendants."""
        return tuple(process.pid for process in tree(self._find_listeners()))

    def cpu_ns(self) -> int | None:
        return cpu_ns(tree(self._find_listeners()))

    def _find_listeners(self) -> Roots:
        """Search once, and again after a restart of the server: a search reads all processes of the machine."""
        if self._listeners is None or not all(process.is_running() for process in self._listeners):
            self._listeners, self.processes_unknown = find_listeners(self._address)
        return self._listeners

    def _check_protocol(self) -> None:
        """Raises `DeploymentError` for what would fail on every request, without waiting for the server."""
        self.check_tls()
        endpoint = Endpoint(self.url, timeout_s=RUNNING_READY_SECONDS, access=self.access)
        status = endpoint.status(endpoint.live_path)
        if status in REFUSED_ACCESS:
            remedy = access_remedy(f"{self._model_option.removesuffix('model')}header", given=bool(self.access.header))
            raise DeploymentError(f"the server at {self.url} refuses access ({endpoint.why_not_live()}); {remedy}")
        if status is None and endpoint.why_not_live().startswith(MALFORMED):
            raise DeploymentError(
                f"the server at {self.url} does not answer in HTTP/1.1{tls_remedy(self._address, 'https')}; if this "
                "is its gRPC port, give its HTTP port as the URL"
            )
        if status in _NO_SUCH_ROUTE:
            raise DeploymentError(
                f"the server at {self.url} is not one of the Open Inference Protocol (GET /v2/health/live answers "
                f"{status}); give the URL of its inference port, without /v2"
            )

    def check_tls(self) -> None:
        """Raises `DeploymentError` if a TLS handshake fails, where the address asks for one."""
        if not self._address.tls:
            return
        connection = HttpConnection(self._address, timeout_s=RUNNING_READY_SECONDS)
        try:
            connection.connect()
        except TlsRefused as exc:
            raise DeploymentError(str(exc)) from exc
        except ConnectionRefused:
            return
        finally:
            connection.close()


class RemoteLanguageDeployment(RemoteDeployment):
    """A server of a language model at a URL that is already running."""

    def check(self, model: str) -> None:
        """Wait a moment for a server that was started just now."""
        self.wait_ready(model, RUNNING_READY_SECONDS)

    def _check_protocol(self) -> None:
        self.check_tls()
        self.completions_only = not Endpoint(self.url, access=self.access).live()


def access_remedy(option: str, *, given: bool = False) -> str:
    """What to do about a server that refuses access, by the option that adds a header."""
    return f"check the value of {option}" if given else f"add {option} 'Authorization: Bearer $KEY'"


def tls_remedy(address: Address, scheme: str) -> str:
    """The end of a sentence about a server that was asked in plain text and speaks TLS; empty for others."""
    if address.tls or not speaks_tls(address.host, address.port, RUNNING_READY_SECONDS):
        return ""
    return f"; it speaks TLS: give {scheme}://{address.authority}{address.base_path}"


def find_listeners(address: Address) -> tuple[Roots, str | None]:
    """The processes that listen at an address; without any, the reason as the end of a sentence."""
    if not is_here(address.host):
        return (), "it runs on another machine"
    try:
        entries = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        listening = _listening(address.port)
        sockets = next((those for entry in entries if (those := _accepting(listening, str(entry[4][0])))), set())
        if not sockets:
            return (), f"no process that this program can see listens on port {address.port}"
        held = {pid: mine for pid in psutil.pids() if (mine := _held(pid, sockets))}
        if set().union(*held.values()) != sockets:
            return (), f"the process on port {address.port} belongs to another user or is in another container"
        roots = {_root(psutil.Process(pid), sockets) for pid in held}
        names = {root.name() for root in roots}
    except (psutil.Error, OSError) as exc:
        return (), f"the processes of this machine cannot be read ({exc})"
    if RELAYS & names:
        return (), f"{min(RELAYS & names)} listens on port {address.port} and only forwards requests"
    if os.getpid() in {process.pid for process in tree(roots)}:  # as with a socket of systemd
        return (), f"the process on port {address.port} is this program or a parent of it"
    return tuple(sorted(roots, key=lambda root: root.pid)), None


def is_here(host: str) -> bool:
    """Whether an address belongs to this machine: a socket can only be bound to its addresses."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def _listening(port: int) -> dict[str, set[str]]:
    """The sockets that listen on a port, as their processes' descriptors name them, by the address that they are bound
    to. psutil decodes all connections of the machine, of which a load leaves thousands behind."""
    found: dict[str, set[str]] = {}
    row = re.compile(rf": ([0-9A-F]+):{port:04X} 0+:0000 0A (?:\S+ +){{5}}(\d+) ")
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(FileNotFoundError):  # of a kernel without IPv6
            for digits, inode in row.findall(Path(table).read_text()):
                words = [int(digits[start : start + 8], 16) for start in range(0, len(digits), 8)]
                family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
                ip = socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words))
                found.setdefault(ip, set()).add(f"socket:[{inode}]")
    return found


def _accepting(sockets: Mapping[str, set[str]], ip: str) -> set[str]:
    """The sockets that take connections to an address: those bound to it, else to all addresses."""
    wildcards = ["::"] if ":" in ip else ["0.0.0.0", "::"]
    return next((sockets[bound] for bound in (ip, *wildcards) if bound in sockets), set())


def _held(pid: int, sockets: set[str]) -> set[str]:
    """Those of the sockets that a process has; none of one whose descriptors this user may not see."""
    held = set()
    with suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # closed since
                held.add(str(descriptor.readlink()))
    return held & sockets


def _root(process: psutil.Process, sockets: set[str]) -> psutil.Process:
    """The topmost of the parents that share a socket: a server's workers inherit it."""
    with suppress(psutil.Error):
        while (parent := process.parent()) is not None and _held(parent.pid, sockets):
            process = parent
    return process
