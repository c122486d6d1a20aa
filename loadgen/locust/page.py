"""Who may use Locust's web page, which starts load at any host and has no password.

A browser sends requests to it for any other page that is open there: from another origin, which the request names, or
to a name of that page's own that now means this machine, which only `Host` tells.
"""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

FOREIGN = "this page takes no requests of other pages"
UNKNOWN_HOST = (
    "this page is not called so here; open it by its IP address, or start locust with this name as its --web-host"
)


def guard_page(app: Any, web_host: str) -> None:
    """Refuse such requests with 403 before Locust sees them; `app` is Flask's, `web_host` Locust's option."""
    from flask import request

    own = {"localhost", socket.gethostname().lower(), web_host.lower()}

    def check() -> tuple[str, int] | None:
        if not _is_ours(_name_of(f"//{request.host}"), own):
            return UNKNOWN_HOST, 403
        here = request.host.lower()
        origin = request.headers.get("Origin")
        if origin is not None and urlsplit(origin).netloc.lower() != here:
            return FOREIGN, 403
        if request.path.rstrip("/") and request.headers.get("Sec-Fetch-Site") in ("cross-site", "same-site"):
            return FOREIGN, 403  # a picture or a link of another page, which has no origin
        return None

    app.before_request(check)


def _name_of(url: str) -> str:
    with suppress(ValueError):
        return (urlsplit(url).hostname or "").lower()
    return ""


def _is_ours(name: str, own: set[str]) -> bool:
    """Whether a host's name cannot be one that a foreign page has given to this machine."""
    with suppress(ValueError):
        ipaddress.ip_address(name)
        return True
    return name in own
