"""`abserve gpu-info` and `abserve gpu-exporter`: the GPUs and the device of a server, once or for Prometheus."""

from __future__ import annotations

import http.client
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
from rich.table import Table

from servers.models.specification import choose_from
from servers.options import defaults
from servers.options.command_line import checked, fail, settings_of, takes_settings
from servers.options.defaults import HOST, OptionError
from servers.options.launch import check_exposure
from servers.protocol.examples import in_path

HELP_GROUP = "Machine"

TIMEOUT_SECONDS = 10.0
IS_IT_A_SERVER = "is it a server of the Open Inference Protocol?"


def gpu_info(
    target: Annotated[
        str | None, typer.Argument(help="URL of a native or Triton server; without it, this machine.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the document.", rich_help_panel="Output")] = False,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", envvar="ABSERVE_MODEL", help="Model of a Triton that serves several.", rich_help_panel="Target"
        ),
    ] = None,
    log: Annotated[
        Path | None,
        typer.Option(
            "--log", exists=True, dir_okay=False, rich_help_panel="Target",
            help="Triton's log; only it shows which device executes each node.",
        ),
    ] = None,
    exporter: Annotated[
        str | None,
        typer.Option(
            "--exporter", rich_help_panel="Target",
            help="URL of the GPU exporter on Triton's machine; without it, this machine's driver.",
        ),
    ] = None,
) -> None:  # fmt: skip
    """Show the GPUs, and the device that a server executes on."""
    from servers.gpu.info import gpu_info as local_info

    document = local_info(None) if target is None else _remote_info(_url(target), model, log, exporter)
    if as_json:
        typer.echo(json.dumps(document, indent=2))
    else:
        _show(document)


class ExporterSettings(BaseSettings):
    """Every field is an option of `abserve gpu-exporter` and a variable ABSERVE_GPU_EXPORTER_…"""

    model_config = settings_of("ABSERVE_GPU_EXPORTER_")

    host: str = Field(HOST, title="Target", description="Address to listen on.")
    anyone: bool = Field(False, title="Target", description=defaults.ANYONE)
    port: int = Field(9445, ge=0, le=65535, title="Target", description="Port to listen on; 0 takes a free one.")


@takes_settings(ExporterSettings)
def gpu_exporter(**options: object) -> None:
    """Serve GPU and host metrics for Prometheus until stopped. Without a GPU it reports nvml_up 0 and keeps trying."""
    from servers.gpu.exporter import GpuExporter, GpuPolling
    from servers.gpu.nvml import NvmlReader
    from servers.gpu.readings import SENTENCES

    settings = checked(ExporterSettings, options)
    try:
        check_exposure(settings.host, anyone=settings.anyone)
    except OptionError as exc:
        fail(str(exc), exc, status=2)
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    polling = GpuPolling(NvmlReader())
    try:
        running = GpuExporter(polling, settings.host, settings.port)
    except OSError as exc:
        message = f"cannot listen on {settings.host}:{settings.port}: {exc.strerror or exc}"
        fail(f"{message}; choose another --port or --host, for example --port {settings.port + 1}", exc, status=2)
    typer.echo(f"GPU metrics on http://{settings.host}:{running.port}/metrics. {SENTENCES[polling.status]}")
    ended.wait()
    running.close()


def _url(target: str) -> str:
    """HOST:PORT means HTTP, as in `abserve compare`."""
    return (target if "://" in target else f"http://{target}").rstrip("/")


def _remote_info(url: str, model: str | None, log: Path | None, exporter: str | None) -> Mapping[str, Any]:
    """The document of a native server, or the one assembled for a Triton."""
    from servers.gpu.info import gpu_info as local_info
    from servers.gpu.info import triton_info
    from servers.models.registry import DEFAULT_MODEL

    document = _get(f"{url}/gpu-info", optional=True)
    if document is not None:
        return _object(document, f"{url}/gpu-info")
    server = _object(_get(f"{url}/v2") or b"", f"{url}/v2")
    served = [] if model else _models(url)
    name = model or (served[0] if len(served) == 1 else DEFAULT_MODEL)
    config_url = f"{url}/v2/models/{in_path(name)}/config"
    config = _get(config_url, optional=True)
    if config is None:
        fail(f"{url} serves no model {name!r}; {choose_from(name, served or _models(url))}", status=2)
    machine: Mapping[str, Any] = local_info(None)
    if exporter is not None:
        source = f"{_url(exporter).removesuffix('/metrics')}/gpu-info"
        machine = _object(_get(source) or b"", source)
        devices = machine.get("devices")
        if not isinstance(devices, list) or not all(
            isinstance(device, dict) and "uuid" in device for device in devices
        ):
            fail(f"{source} is not a /gpu-info document; give --exporter the URL of abserve gpu-exporter")
    text = None if log is None else log.read_text(encoding="utf-8", errors="replace")
    return triton_info(server, _object(config, config_url), text, machine)


def _models(url: str) -> list[str]:
    """The models in Triton's repository; empty if it does not list them."""
    try:
        models = json.loads(_get(f"{url}/v2/repository/index", data=b"{}", optional=True) or b"[]")
        return [str(model["name"]) for model in models]
    except (ValueError, TypeError, KeyError):
        return []


def _get(url: str, *, data: bytes | None = None, optional: bool = False) -> bytes | None:
    """The body of a good response. `optional`: None if the server has no such route."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy, as for every server here
    try:
        with direct.open(url, data, timeout=TIMEOUT_SECONDS) as response:
            return bytes(response.read())
    except urllib.error.HTTPError as exc:
        if optional and exc.code in (400, 404, 405):
            return None
        fail(f"{url} answers {exc.code}; {IS_IT_A_SERVER}", exc)
    except (OSError, ValueError, http.client.InvalidURL) as exc:
        reason = getattr(exc, "reason", exc)
        text = getattr(reason, "strerror", None) or reason
        fail(f"{url} does not answer ({text}); start the server or correct the URL", exc)
    except http.client.HTTPException as exc:  # a port of gRPC, for example
        fail(f"{url} does not answer with HTTP; {IS_IT_A_SERVER}", exc)


def _object(body: bytes, url: str) -> Mapping[str, Any]:
    try:
        document = json.loads(body)
    except ValueError as exc:
        fail(f"{url} does not answer with JSON; {IS_IT_A_SERVER}", exc)
    if not isinstance(document, dict):
        fail(f"{url} does not answer with a JSON object; {IS_IT_A_SERVER}")
    return document


def _show(document: Mapping[str, Any]) -> None:
    console = Console(highlight=False, soft_wrap=True, markup=False)  # the texts come from another program
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
                console.print(f"  {name}: {json.dumps(placement[name])}")


def _row(device: Mapping[str, Any]) -> tuple[str, ...]:
    def shown(name: str, scale: float, unit: str) -> str:
        value = device.get(name)
        return "–" if value is None else f"{value * scale:.0f} {unit}"

    processes = device.get("processes")
    return (
        str(device.get("index")),
        str(device.get("name") or "–") + (" (MIG)" if device.get("mig_enabled") else ""),
        str(device.get("uuid") or "–"),
        shown("utilization_ratio", 100, "%"),
        shown("power_watts", 1, "W"),
        f"{shown('memory_used_bytes', 2**-20, 'MiB')} of {shown('memory_total_bytes', 2**-20, 'MiB')}",
        "–" if processes is None else str(len(processes)),
    )
