"""From settings to a launch plan: checks this machine, lays out the repository, builds tritonserver's command line.

The plan starts the tritonserver binary itself, without a wrapper process, so that a cold start begins with the
creation of that process.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from servers.engines.settings import EngineError
from servers.export.triton_config import BatchingSettings
from servers.launch_plan import LaunchPlan, host_in_url
from servers.listener import ListenerError, check_free
from servers.models.weights import WeightsSource
from servers.triton.errors import TritonOptionError
from servers.triton.leftovers import (
    assert_space,
    new_prefix,
    region_bytes,
    remove_abandoned_folders,
    remove_abandoned_regions,
)
from servers.triton.repository import PlacedModel, assert_usable, lay_out
from servers.triton.settings import TritonSettings
from servers.triton.wheel import assert_environment, find_wheel

STUB_TIMEOUT_SECONDS = 300
EXIT_TIMEOUT_SECONDS = 20
WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def assert_ready(settings: TritonSettings) -> None:
    """Raise `TritonError` for anything that would keep the server from starting, before anything slow or written.

    A missing libpython does not count: `prepare` may be able to fetch it.
    """
    try:
        settings.engine_settings(settings.max_batch_size or 1).check_here()
    except EngineError as exc:
        raise TritonOptionError(str(exc)) from exc
    assert_free(
        settings.host,
        {"--http-port": settings.http_port, "--grpc-port": settings.grpc_port, "--metrics-port": settings.metrics_port},
    )
    assert_usable(settings.folder)
    assert_environment()


def assert_free(host: str, ports: Mapping[str, int]) -> None:
    """Raise `TritonOptionError` for a port in use; tritonserver's own message names neither option nor remedy.

    `ports` maps an option, as in `--http-port`, to its port.
    """
    options: dict[int, str] = {}
    for option, port in ports.items():
        if port in options:
            raise TritonOptionError(f"{options[port]} and {option} are both {port}; use two different ports")
        options[port] = option
        try:
            check_free(host, port, option)
        except ListenerError as exc:
            raise TritonOptionError(str(exc)) from exc


def prepare(
    settings: TritonSettings,
    models: Sequence[PlacedModel],
    weights: WeightsSource,
    announce: Callable[[str], None] = lambda _message: None,
) -> LaunchPlan:
    """Prepare everything except the process. `weights` are pinned; `announce` is called before a slow step.

    Each model gets its own process; the plan names the first model. Raises `TritonError`.
    """
    assert_ready(settings)
    installation = find_wheel(announce=announce)
    engine = settings.resolved_engine()
    remove_abandoned_regions()
    remove_abandoned_folders()
    shared_bytes = max(region_bytes(model.specification, engine.max_batch_size) for model in models)
    assert_space(shared_bytes * len(models))
    batching = BatchingSettings(engine.max_batch_size, settings.max_queue_delay_us, settings.queue_size)
    repository = lay_out(settings.folder, installation, models, weights, engine, batching, settings.decoding)
    address = _address(settings.host)
    reachable = host_in_url(WILDCARDS.get(address, address))
    first = models[0]
    # Triton keeps its default for everything that is not named here.
    argv = (
        str(installation.binary),
        f"--model-repository={repository.models}",
        f"--backend-directory={repository.backends}",
        f"--http-address={address}",
        f"--grpc-address={address}",
        f"--metrics-address={address}",
        f"--http-port={settings.http_port}",
        f"--grpc-port={settings.grpc_port}",
        f"--metrics-port={settings.metrics_port}",
        # No client may load, unload or replace a model; a model that fails to load ends the server.
        "--model-control-mode=none",
        "--exit-on-error=true",
        # The generated config is complete. Completing it would start Python once more before the model's own process.
        "--disable-auto-complete-config",
        # The sampler of `abserve compare` reads the GPU for both arms; a second reader would cost one arm.
        "--allow-gpu-metrics=false",
        "--allow-cpu-metrics=false",
        # Pinned memory is for copies to a GPU; without one its allocation only fails with a warning.
        *(("--pinned-memory-pool-byte-size=0",) if engine.device == "cpu" else ()),
        f"--exit-timeout-secs={EXIT_TIMEOUT_SECONDS}",
        "--log-format=ISO8601",
        f"--backend-config=python,shm-default-byte-size={shared_bytes}",
        f"--backend-config=python,shm-region-prefix-name={new_prefix()}",
        # Includes loading and warming up every batch size; Triton's 30 s are too short for a large model on few cores.
        f"--backend-config=python,stub-timeout-seconds={STUB_TIMEOUT_SECONDS}",
    )
    # The stub embeds Python: it finds its virtual environment by the `python3` on PATH, and libpython by the loader.
    environment = {
        "LD_LIBRARY_PATH": _path(installation.libraries, repository.libraries, os.environ.get("LD_LIBRARY_PATH")),
        "PATH": _path(Path(sys.executable).parent, os.environ.get("PATH")),
        "PYTHONUNBUFFERED": "1",  # the last output of a dying model explains its death
    }
    return LaunchPlan(
        argv=argv,
        env=environment,
        http_url=f"http://{reachable}:{settings.http_port}",
        grpc_address=f"{reachable}:{settings.grpc_port}",
        metrics_url=f"http://{reachable}:{settings.metrics_port}/metrics",
        model=first.specification.name,
        title=f"{installation.title} python backend, {engine.kind} {engine.precision}",
        max_batch_size=engine.max_batch_size,
        artefact=dict(first.manifest) if first.manifest is not None else None,
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`. Raises `TritonOptionError` for a name without an address."""
    return ipaddress.ip_address(_address(host)).is_loopback


def _path(*parts: Path | str | None) -> str:
    """A search path; folders named first, such as this project's, come before the user's."""
    return os.pathsep.join(str(part) for part in parts if part)


def _address(host: str) -> str:
    """A numeric address, IPv4 if there is one: Triton listens on no names."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return str(min(found, key=lambda entry: entry[0] != socket.AF_INET)[4][0])
    except OSError as exc:
        raise TritonOptionError(f"--host {host} cannot be resolved; use an address such as 127.0.0.1") from exc
