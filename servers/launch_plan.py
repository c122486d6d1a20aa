"""A launch plan: data to start a server process. `abserve serve … --print-launch` prints it for any supervisor."""

from __future__ import annotations

import re
from collections.abc import Iterable
from urllib.parse import quote

import msgspec


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
    """None where only the running server tells."""
    cannot_pad: str | None = None
    """Why requests of different lengths cannot share a padded batch there, as a clause; None: the server takes
    `--pad-to`."""
    cannot_measure: str | None = None
    """Why the load generator cannot measure the model, as a sentence; None: it can."""
    artefact: dict[str, object] | None = None
    """The manifest of the exported file, if the server executes one."""
    tuning: dict[str, str] = {}
    """Settings that only affect the server's speed and differ from its own defaults, with their values."""
    causes: tuple[str, ...] = ()
    """Regular expressions, the most telling first: where one matches in the log of a server that ended, its group
    `cause` says why."""

    def to_json(self) -> bytes:
        """One line of JSON."""
        return msgspec.json.encode(self) + b"\n"


def cause_in(log: str, causes: Iterable[str]) -> str | None:
    """Why a server ended, by its log and the `causes` of its plan; None if the log does not say."""
    found = (re.search(pattern, log, re.MULTILINE) for pattern in causes)
    return next((match["cause"].strip() for match in found if match), None)


def in_path(name: str) -> str:
    """A model's name as one segment of a URL's path, whatever characters it holds."""
    return quote(name, safe="!$&'()*+,;=:@")


def host_in_url(host: str) -> str:
    """The host as it precedes a port, in a URL and for gRPC: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host
