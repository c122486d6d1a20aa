"""Whether an address lets other machines in, asked before anything listens there.

`servers.options.launch` has the same rule: the two sides meet only on the wire.
"""

from __future__ import annotations

import ipaddress
import socket

ANYONE = "Listen beyond loopback without keys: something in front protects it."
"""The help of `--anyone`."""


def exposure(option: str, host: str, *, anyone: bool) -> str | None:
    """Why nothing may listen there, as a sentence with its remedy; None: it may, or `anyone` says so."""
    if anyone or is_loopback(host):
        return None
    return f"{option} {host} lets other machines in without a key: add --anyone if something in front protects it"


def is_loopback(host: str, *, unknown: bool = True) -> bool:
    """Whether only this machine reaches the address; `unknown`: of a name without one, which cannot be bound."""
    if host in ("", "*"):
        return False
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return unknown
    return all(ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback for *_, address in found)
