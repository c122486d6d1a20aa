"""From settings to a launch plan: checks this machine, lays out the repository, builds tritonserver's command line.

The plan starts the tritonserver binary itself, with no process of ours before it, so that a cold start is measured from
the moment its own process is created.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from servers.engines.factory import KINDS
from servers.engines.processors import cuda_index, nvidia_device_present
from servers.export.triton_config import BatchingSettings
from servers.launch_plan import LaunchPlan, host_in_url
from servers.models.weights import WeightsSource
from servers.triton.errors import PortTakenError, TritonUnavailableError
from servers.triton.leftovers import (
    assert_space,
    new_prefix,
    region_bytes,
    remove_abandoned_folders,
    remove_abandoned_regions,
)
from servers.triton.repository import PlacedModel, Repository, lay_out
from servers.triton.settings import TritonSettings
from servers.triton.wheel import Wheel, assert_environment, find_wheel

STUB_TIMEOUT_SECONDS = 300
EXIT_TIMEOUT_SECONDS = 20
WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def assert_ready(settings: TritonSettings) -> None:
    """Raise `TritonError` for what would keep the server from starting, before anything slow is done.

    A missing libpython alone is no reason: `prepare` may be able to fetch it.
    """
    kind, device = settings.engine, settings.device
    if kind not in KINDS:
        raise TritonUnavailableError(f"unknown engine {kind!r}; use one of: {', '.join(KINDS)}")
    if device not in ("auto", "cpu") and cuda_index(device) is None:
        raise TritonUnavailableError(f"unknown device {device!r}; use auto, cpu or cuda:N")
    if device not in ("auto", "cpu") and not nvidia_device_present():
        raise TritonUnavailableError(f"device {device}: the kernel shows no NVIDIA GPU here; use --device cpu or auto")
    assert_free(
        settings.host,
        {"--http-port": settings.http_port, "--grpc-port": settings.grpc_port, "--metrics-port": settings.metrics_port},
    )
    assert_environment()


def assert_free(host: str, ports: dict[str, int]) -> None:
    """Asked before the server starts, whose own message names neither option nor remedy.

    `ports`: option name, as in `--http-port`, to port. Raises `PortTakenError`, `TritonUnavailableError`.
    """
    options: dict[int, str] = {}
    for option, port in ports.items():
        if port in options:
            raise PortTakenError(f"{options[port]} and {option} are both {port}; give each its own port")
        options[port] = option
        _assert_free(host, port, option)


def _assert_free(host: str, port: int, option: str) -> None:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free for a server
            probe.bind((host, port))
    except OSError as exc:
        if exc.errno == errno.EADDRINUSE:
            raise PortTakenError(
                f"port {port} on {host} is taken; stop what listens there or choose another with {option}"
            ) from exc
        raise TritonUnavailableError(
            f"cannot listen on {host} port {port}: {exc.strerror or exc}; check --host"
        ) from exc


def prepare(
    settings: TritonSettings,
    models: Sequence[PlacedModel],
    weights: WeightsSource,
    announce: Callable[[str], None] = lambda _message: None,
) -> LaunchPlan:
    """Make everything ready but the process. Raises `TritonError`; `announce` tells of slow steps.

    `models` are all served, each by a process of its own; the plan names the first. `weights` are pinned.
    """
    assert_ready(settings)
    wheel = find_wheel(announce=announce)
    engine = settings.resolved_engine()
    remove_abandoned_regions()
    remove_abandoned_folders()
    shared_bytes = max(region_bytes(model.specification, engine.max_batch_size) for model in models)
    assert_space(shared_bytes * len(models))
    repository = lay_out(
        settings.folder,
        wheel,
        models,
        weights,
        engine,
        BatchingSettings(engine.max_batch_size, settings.max_queue_delay_us, settings.queue_size),
        settings.decoding,
    )
    first = models[0]
    address = _address(settings.host)
    reachable = host_in_url(WILDCARDS.get(address, address))
    return LaunchPlan(
        argv=_arguments(settings, wheel, repository, address, shared_bytes, on_gpu=engine.device != "cpu"),
        env=_environment(wheel, repository),
        http_url=f"http://{reachable}:{settings.http_port}",
        grpc_address=f"{reachable}:{settings.grpc_port}",
        metrics_url=f"http://{reachable}:{settings.metrics_port}/metrics",
        model=first.specification.name,
        title=f"Triton {wheel.server_version} python backend, {engine.kind} {engine.precision}",
        artefact=dict(first.manifest) if first.manifest is not None else None,
    )


def _arguments(
    settings: TritonSettings, wheel: Wheel, repository: Repository, address: str, shared_bytes: int, *, on_gpu: bool
) -> tuple[str, ...]:
    """What is not named here stays at Triton's default: it is Triton as it comes that is measured."""
    return (
        str(wheel.binary),
        f"--model-repository={repository.models}",
        f"--backend-directory={repository.backends}",
        f"--http-address={address}",
        f"--grpc-address={address}",
        f"--metrics-address={address}",
        f"--http-port={settings.http_port}",
        f"--grpc-port={settings.grpc_port}",
        f"--metrics-port={settings.metrics_port}",
        # Nobody may load, unload or replace a model over the network; a model that fails to load ends the server.
        "--model-control-mode=none",
        "--exit-on-error=true",
        # The generated config is complete. Completing it would start Python once more before the model's own process.
        "--disable-auto-complete-config",
        # Our own sampler reads the GPU, for both arms alike; a second reader inside one of them would cost that one.
        "--allow-gpu-metrics=false",
        "--allow-cpu-metrics=false",
        # Pinned memory serves copies to a GPU; without one its allocation only fails with a warning.
        *(() if on_gpu else ("--pinned-memory-pool-byte-size=0",)),
        f"--exit-timeout-secs={EXIT_TIMEOUT_SECONDS}",
        "--log-format=ISO8601",
        f"--backend-config=python,shm-default-byte-size={shared_bytes}",
        f"--backend-config=python,shm-region-prefix-name={new_prefix()}",
        # Loading and warming every batch size counts against it; Triton's 30 s is short for a large model on few cores.
        f"--backend-config=python,stub-timeout-seconds={STUB_TIMEOUT_SECONDS}",
    )


def _environment(wheel: Wheel, repository: Repository) -> dict[str, str]:
    """The stub embeds Python: it finds its virtual environment by the `python3` on PATH, and libpython by the loader.

    Our folders come first, what the user has set stays behind them.
    """
    libraries = [str(wheel.libraries), str(repository.libraries), os.environ.get("LD_LIBRARY_PATH", "")]
    executables = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    return {
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, libraries)),
        "PATH": os.pathsep.join(filter(None, executables)),
        "PYTHONUNBUFFERED": "1",  # what the model prints last is what matters when it dies
    }


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`. Raises `TritonUnavailableError` for a name without an address."""
    return ipaddress.ip_address(_address(host)).is_loopback


def _address(host: str) -> str:
    """Triton listens on numeric addresses only; of a name's several, the IPv4 one."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return str(min(found, key=lambda entry: entry[0] != socket.AF_INET)[4][0])
    except OSError as exc:
        raise TritonUnavailableError(f"--host {host} cannot be resolved; give an address such as 127.0.0.1") from exc
