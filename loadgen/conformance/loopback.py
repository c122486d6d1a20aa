"""Whether a URL leads to this machine alone."""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import urlsplit


def is_loopback(url: str) -> bool:
    """True when every address that the host name stands for is a loopback address."""
    host = urlsplit(url if "://" in url else f"http://{url}").hostname
    if not host:
        return False
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return bool(found) and all(ipaddress.ip_address(entry[4][0]).is_loopback for entry in found)
