"""`abserve gpu-info` and `abserve gpu-exporter`: what the GPUs are and do, once or for Prometheus."""

from __future__ import annotations

import json
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import Field
from pydantic_settings import BaseSettings
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from servers.defaults import HOST
from servers.options import checked, settings_of, takes_settings

TIMEOUT_SECONDS = 10.0


def gpu_info(
    target: Annotated[
        str | None, typer.Argument(help="URL of a native or a Triton server; this machine when left out.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the document itself.")] = False,
    model: Annotated[
        str | None, typer.Option("--model", envvar="ABSERVE_MODEL", help="The model that Triton serves.")
    ] = None,
    log: Annotated[
        Path | None,
        typer.Option("--log", exists=True, dir_okay=False, help="Triton's log: only it says where nodes were placed."),
    ] = None,
    exporter: Annotated[
        str | None, typer.Option("--exporter", help="URL of the exporter beside Triton; this machine's driver if not.")
    ] = None,
) -> None:
    """Show the GPUs, and what a server really executes on."""
    from servers.gpu.info import gpu_info as local_info

    try:
        document = local_info(None) if target is None else _remote_info(_url(target), model, log, exporter)
    except _UnreachableError as exc:
        Console(stderr=True, highlight=False, soft_wrap=True).print(escape(str(exc)))
        raise typer.Exit(1) from exc
    console = Console(highlight=False, soft_wrap=True)
    if as_json:
        console.out(json.dumps(document, indent=2), highlight=False)
    else:
        _show(console, document)


class ExporterSettings(BaseSettings):
    """Every field is an option of `abserve gpu-exporter` and a variable ABSERVE_GPU_EXPORTER_…"""

    model_config = settings_of("ABSERVE_GPU_EXPORTER_")

    host: str = Field(HOST, description="Address to listen on.")
    port: int = Field(9445, ge=0, le=65535, description="0 takes a free one.")


@takes_settings(ExporterSettings)
def gpu_exporter(**options: object) -> None:
    """Serve GPU metrics for Prometheus until stopped. Without a GPU it says nvml_up 0 and goes on looking."""
    from servers.gpu.exporter import GpuExporter, GpuPolling
    from servers.gpu.nvml import NvmlReader
    from servers.gpu.readings import SENTENCES

    settings = checked(ExporterSettings, options)
    console = Console(highlight=False, soft_wrap=True)
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    polling = GpuPolling(NvmlReader())
    try:
        running = GpuExporter(polling, settings.host, settings.port)
    except OSError as exc:
        Console(stderr=True, highlight=False, soft_wrap=True).print(
            f"cannot listen on {settings.host}:{settings.port}: {exc.strerror or exc}; choose another --port or --host"
        )
        raise typer.Exit(1) from exc
    console.print(f"GPU metrics on http://{settings.host}:{running.port}/metrics. {SENTENCES[polling.state.status]}")
    ended.wait()
    running.close()


def _url(target: str) -> str:
    """HOST:PORT is taken for HTTP, as `abserve compare` takes it."""
    return (target if "://" in target else f"http://{target}").rstrip("/")


class _UnreachableError(Exception):
    """A server that was asked does not answer, or not as it should; the message says what to do."""


def _remote_info(url: str, model: str | None, log: Path | None, exporter: str | None) -> Mapping[str, Any]:
    """The server's own document, or Triton's made up."""
    from servers.gpu.info import ExporterReader, triton_info
    from servers.models.registry import DEFAULT_MODEL

    own = _get(f"{url}/gpu-info", optional=True)
    if own is not None:
        return _object(own, f"{url}/gpu-info")
    server = _object(_get(f"{url}/v2") or b"", f"{url}/v2")
    name = model or DEFAULT_MODEL
    config = _get(f"{url}/v2/models/{name}/config", optional=True)
    if config is None:
        raise _UnreachableError(f"{url} serves no model {name}; name its model with --model")
    reader = None
    if exporter is not None:
        scraped = f"{_url(exporter).removesuffix('/metrics')}/metrics"
        reader = ExporterReader((_get(scraped) or b"").decode("utf-8", "replace"))
    text = None if log is None else log.read_text(encoding="utf-8", errors="replace")
    return triton_info(server, _object(config, f"{url}/v2/models/{name}/config"), text, reader)


def _get(url: str, *, optional: bool = False) -> bytes | None:
    """The body of a good answer. `optional`: None where the server answers, but has no such route."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # as every other request to a server here
    try:
        with direct.open(url, timeout=TIMEOUT_SECONDS) as answer:
            return bytes(answer.read())
    except urllib.error.HTTPError as exc:
        if optional and exc.code in (400, 404, 405):
            return None
        raise _UnreachableError(f"{url} answers {exc.code}; is it a server of the Open Inference Protocol?") from exc
    except (OSError, ValueError) as exc:
        reason = getattr(exc, "reason", exc)
        said = getattr(reason, "strerror", None) or reason
        raise _UnreachableError(f"{url} does not answer ({said}); start the server or correct the URL") from exc


def _object(body: bytes, url: str) -> Mapping[str, Any]:
    try:
        document = json.loads(body)
    except ValueError as exc:
        raise _UnreachableError(f"{url} answers no JSON; is it a server of the Open Inference Protocol?") from exc
    if not isinstance(document, dict):
        raise _UnreachableError(f"{url} answers no JSON object; is it a server of the Open Inference Protocol?")
    return document


def _show(console: Console, document: Mapping[str, Any]) -> None:
    console.print(document.get("message") or document.get("status"))
    nvml = document.get("nvml") or {}
    if nvml.get("driver_version"):
        console.print(f"driver {nvml['driver_version']}, CUDA {nvml.get('cuda_driver_version') or '–'}")
    devices = document.get("devices") or []
    if devices:
        table = Table("GPU", "name", "UUID", "busy", "power", "memory", "processes")
        for device in devices:
            table.add_row(*_row(device))
        console.print(table)
    runtime = document.get("runtime")
    if runtime:
        placement = runtime.get("placement") or {}
        console.print(
            f"{runtime.get('kind')} {runtime.get('version') or ''} on {runtime.get('device') or 'unknown'}, "
            f"placement: {placement.get('result') or 'unknown'}"
        )
        for name in ("params_by_device", "ep_nodes", "cpu_time_ratio", "cpu_non_shape_ops"):
            if placement.get(name) is not None:
                console.print(f"  {name}: {escape(json.dumps(placement[name]))}")


def _row(device: Mapping[str, Any]) -> tuple[str, ...]:
    def shown(name: str, scale: float, unit: str) -> str:
        value = device.get(name)
        return "–" if value is None else f"{value * scale:.0f} {unit}"

    processes = device.get("processes")
    return (
        str(device.get("index")),
        escape(str(device.get("name") or "–")) + (" (MIG)" if device.get("mig_enabled") else ""),
        str(device.get("uuid") or "–"),
        shown("utilization_ratio", 100, "%"),
        shown("power_watts", 1, "W"),
        f"{shown('memory_used_bytes', 2**-20, 'MiB')} of {shown('memory_total_bytes', 2**-20, 'MiB')}",
        "–" if processes is None else str(len(processes)),
    )
