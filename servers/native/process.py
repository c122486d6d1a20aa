"""From settings to a running server: wires the engine's construction to the service and the service to the door."""

from __future__ import annotations

import socket

import structlog

from servers.engines.interface import Engine
from servers.engines.settings import EngineSettings
from servers.models.specification import ModelSpecification
from servers.models.weights import WeightsSource
from servers.native.inference import BatchingSettings, InferenceService
from servers.native.server import serve
from servers.native.settings import NativeSettings

log = structlog.get_logger("abserve.server")


def run(
    settings: NativeSettings, specification: ModelSpecification, weights: WeightsSource, listener: socket.socket
) -> int:
    """Serve until told to stop; the process's exit status."""
    engine = EngineSettings(
        kind=settings.engine,
        precision=settings.precision,
        mode=settings.mode,
        device=settings.device,
        threads=settings.threads,
        max_batch_size=settings.max_batch_size,
    )

    def build() -> Engine:
        from servers.engines.factory import build_engine  # in the engine thread, after the port answers

        return build_engine(specification, weights, engine, settings.artefact)

    batching = BatchingSettings(
        max_batch_size=settings.max_batch_size,
        max_queue_delay_us=settings.max_queue_delay_us,
        queue_size=settings.queue_size,
        queue_timeout_us=settings.queue_timeout_us,
    )
    service = InferenceService(specification, build, batching, added_delay_ms=settings.added_delay_ms)
    if settings.added_delay_ms:
        log.warning("every answer is delayed, as asked for a test", added_delay_ms=settings.added_delay_ms)
    return serve(settings, service, listener)
