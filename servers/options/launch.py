"""What it takes to start a server: its launch plan, a free port, and conditions of this machine with their remedies.

`abserve serve … --print-launch` prints the plan for any supervisor. A port is bound or tried before anything slow
happens, so that a port in use is reported at once.
"""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
import sys
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from servers.options.defaults import OptionError

PROGRAM = (sys.executable, "-P", "-m", "abserve", "-m")
"""The start of a command line: the name of a module of ours and its arguments follow."""


class LaunchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a supervisor needs to start and find one server. `env` extends the supervisor's environment."""

    schema: str = "abserve.launch/1"
    argv: tuple[str, ...]
    env: dict[str, str]
    http_url: str
    grpc_address: str | None
    metrics_url: str | None = None
    model: str
    title: str
    """A name for people, such as "native torch fp32" or "Triton 2.51, python backend, onnxruntime fp32"."""
    max_batch_size: int | None
    """None if only the running server knows it."""
    cannot_pad: str | None = None
    """Why requests of different lengths cannot share a padded batch there, as a clause; None: the server takes
    `--pad-to`."""
    cannot_measure: str | None = None
    """Why the load generator cannot measure the model, as a sentence; None: it can."""
    artefact: dict[str, object] | None = None
    """The manifest of the exported file, if the server executes one."""
    tuning: dict[str, str] = {}
    """Settings that only affect the server's speed and differ from its own defaults, with their values."""
    examples: tuple[str, ...] = ()
    """Commands for a shell that send it one request."""
    causes: tuple[str, ...] = ()
    """Regular expressions, the most telling first: where one matches in the log of a server that ended, its group
    `cause` says why."""

    def to_json(self) -> bytes:
        """One line of JSON."""
        return msgspec.json.encode(self) + b"\n"


def cause_in(log: str, causes: Iterable[str]) -> str | None:
    """Why a server ended, by its log and the `causes` of its plan; None if the log does not say."""
    matches = (re.search(pattern, log, re.MULTILINE) for pattern in causes)
    return next((match["cause"].strip() for match in matches if match), None)


def host_in_url(host: str) -> str:
    """The host as it precedes a port, in a URL and for gRPC: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def bind(host: str, port: int, option: str = "--http-port") -> socket.socket:
    """A bound TCP socket that does not listen yet. Raises `OptionError`, which names `option`."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # also a port in TIME_WAIT is free
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as exc:
        if exc.errno == errno.EADDRINUSE:
            raise OptionError(
                f"port {port} on {host} is taken; stop what listens there or choose another with {option}"
            ) from exc
        raise OptionError(f"cannot listen on {host} port {port}: {exc.strerror or exc}; check --host") from exc
    return listener


def check_exposure(host: str, *, anyone: bool, keys: str = "") -> None:
    """Raise `OptionError` for an address that lets other machines in, unless `anyone` says that they may; `keys` is how
    the server would get keys."""
    if not anyone and not is_loopback(host):
        remedy = f"{keys}, or --anyone" if keys else "--anyone"
        raise OptionError(
            f"--host {host} lets other machines in without a key: add {remedy} if something in front protects it"
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address; True for a name that has none, which cannot be bound either."""
    if host in ("", "*"):
        return False
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return True
    addresses = (ipaddress.ip_address(str(address[0]).partition("%")[0]) for *_, address in found)
    return all((getattr(address, "ipv4_mapped", None) or address).is_loopback for address in addresses)


def check_free(host: str, port: int, option: str) -> None:
    """Check a port that the server binds later; 0 means none. Raises `OptionError`, which names `option`."""
    if port:
        bind(host, port, option).close()


@dataclass(frozen=True, slots=True)
class MachineCheck:
    """`detail` is the observation; `remedy` is the exact command or change that helps, None if all is well."""

    name: str
    ok: bool
    detail: str
    remedy: str | None = None
    needed_for: str | None = None
    """What an optional thing is needed for; None: every comparison here needs it."""

    @property
    def fails(self) -> bool:
        """Whether a comparison cannot be made here before the remedy."""
        return not self.ok and self.needed_for is None


def machine_check(name: str, ok: bool, detail: str, remedy: str) -> MachineCheck:
    """A check with its remedy, which counts only if the condition is not met."""
    return MachineCheck(name, ok, detail, None if ok else remedy)
