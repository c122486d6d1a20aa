"""How a server process is started, as data: `abserve serve … --print-launch` prints it, any supervisor may run it."""

from __future__ import annotations

import msgspec


class LaunchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a supervisor needs to start one server and to find it.

    `env` holds only what must be added to or changed in the supervisor's own environment.
    """

    schema: str = "abserve.launch/1"
    argv: tuple[str, ...]
    env: dict[str, str]
    http_url: str
    grpc_address: str | None
    metrics_url: str
    model: str
    title: str
    """For people, before the server runs: "native torch fp32", "Triton 2.51 python backend, onnxruntime fp32"."""
    artefact: dict[str, object] | None = None
    """The manifest of the exported file that the server executes, where it executes one."""

    def to_json(self) -> bytes:
        """One line of JSON."""
        return msgspec.json.encode(self) + b"\n"


def host_in_url(host: str) -> str:
    """An IPv6 address stands in brackets there, and before gRPC's port."""
    return f"[{host}]" if ":" in host else host
