"""From settings to a running server: wires the engine's construction to the service and the service to the door."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module

import structlog

from servers.engines.interface import Engine
from servers.engines.settings import EngineSettings
from servers.models.image_decoder import DecodingSettings
from servers.models.specification import ModelSpecification
from servers.models.weights import WeightsSource
from servers.native.inference import BatchingSettings, InferenceService
from servers.native.served_models import ServedModels
from servers.native.server import serve
from servers.native.settings import NativeSettings

log = structlog.get_logger("abserve.server")


def run(
    settings: NativeSettings,
    specifications: Sequence[ModelSpecification],
    weights: WeightsSource,
    listener: socket.socket,
) -> int:
    """Serve the models until told to stop; the process's exit status."""
    services = [_service(settings, specification, weights) for specification in specifications]
    if settings.added_delay_ms:
        log.warning("every answer is delayed, as asked for a test", added_delay_ms=settings.added_delay_ms)
    return serve(settings, ServedModels(services), listener)


def _service(settings: NativeSettings, specification: ModelSpecification, weights: WeightsSource) -> InferenceService:
    executed = specification.executed
    engine = EngineSettings(
        kind=settings.engine,
        precision=settings.precision,
        mode=settings.mode,
        device=settings.device,
        threads=settings.threads,
        max_batch_size=settings.max_batch_size,
    )

    def build() -> Engine:
        from servers.engines.factory import LIBRARIES, build_engine  # in the engine thread, after the port answers

        for library in LIBRARIES[settings.engine]:  # so that the account of a start tells imports from weights
            with suppress(ImportError):  # loading the engine says what to install
                import_module(library)
        artefact = settings.artefact if executed.payload == "fp32" else settings.artefact_uint8
        return build_engine(executed, weights, engine, artefact)

    batching = BatchingSettings(
        max_batch_size=settings.max_batch_size,
        max_queue_delay_us=settings.max_queue_delay_us,
        queue_size=settings.queue_size,
        queue_timeout_us=settings.queue_timeout_us,
        pipeline=settings.pipeline,
    )
    decoding = DecodingSettings(settings.decode_threads, settings.max_image_pixels)
    return InferenceService(specification, build, batching, decoding=decoding, added_delay_ms=settings.added_delay_ms)
