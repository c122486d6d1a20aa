"""The engine as Triton's config tells it: parameters written at launch, read and verified by the model at load.

So with the decoding of images, which is not verified: there is nothing in it that could turn out otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from servers.engines.interface import EngineDescription
from servers.engines.settings import EngineSettings
from servers.models.image_decoder import DecodingSettings
from servers.models.specification import ModelSpecification
from servers.models.weights import WeightsSource


class EngineFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of engine.json: what the model needs and its public parameters do not say."""

    weights: str
    """As `--weights` takes it; a checkpoint with its path."""
    artefact: str | None
    """Absolute path of the exported file."""


def parameters_from_settings(
    engine: EngineSettings, weights: WeightsSource, artefact: Path | None, artefact_sha256: str | None
) -> dict[str, str]:
    """What the config tells about the engine. Names without paths: a config is read by clients and gets published.

    `engine` has nothing left to choose (see `servers.triton.settings.resolve_engine`).
    """
    parameters = {
        "engine": engine.kind,
        "precision": engine.precision,
        "mode": engine.mode,
        "device": engine.device,
        "weights": "none" if engine.kind == "null" else weights.label,
    }
    if engine.device == "cpu":
        parameters["threads"] = str(engine.threads)
    if artefact is not None:
        parameters["artefact"] = artefact.name
    if artefact_sha256 is not None:
        parameters["artefact_sha256"] = artefact_sha256
    return parameters


def parameters_from_payload(specification: ModelSpecification, decoding: DecodingSettings) -> dict[str, str]:
    """The payload, and for JPEG how it is decoded."""
    if specification.payload != "jpeg":
        return {"payload": specification.payload}
    return {
        "payload": specification.payload,
        "decode_threads": str(decoding.thread_count),
        "max_image_pixels": str(decoding.max_pixels),
    }


def decoding_from_parameters(parameters: Mapping[str, str]) -> DecodingSettings:
    """The inverse for JPEG. Raises `KeyError` for a missing parameter."""
    return DecodingSettings(int(parameters["decode_threads"]), int(parameters["max_image_pixels"]))


def settings_from_parameters(parameters: Mapping[str, str], max_batch_size: int) -> EngineSettings:
    """The inverse; `max_batch_size` is a field of the config itself. Raises `KeyError` for a missing parameter."""
    return EngineSettings(
        kind=parameters["engine"],
        precision=parameters["precision"],
        mode=parameters["mode"],
        device=parameters["device"],
        threads=int(parameters.get("threads", "0")),
        max_batch_size=max_batch_size,
    )


def contradictions(parameters: Mapping[str, str], max_batch_size: int, in_effect: EngineDescription) -> tuple[str, ...]:
    """Where the engine is not what the config says, one phrase each; a mode "auto" leaves the engine its choice."""
    told: dict[str, str | None] = {
        "engine": parameters["engine"],
        "precision": parameters["precision"],
        "device": parameters["device"],
        "weights": parameters["weights"],
        "threads": parameters.get("threads"),
        "max_batch_size": str(max_batch_size),
    }
    found: dict[str, str | None] = {
        "engine": in_effect.kind,
        "precision": in_effect.precision,
        "device": in_effect.device,
        "weights": in_effect.weights,
        "threads": None if in_effect.threads is None else str(in_effect.threads),
        "max_batch_size": str(in_effect.max_batch_size),
    }
    if parameters["mode"] != "auto":
        told["mode"], found["mode"] = parameters["mode"], in_effect.mode
    return tuple(
        f"{name} is {found[name]!r}, the config says {told[name]!r}" for name in told if told[name] != found[name]
    )
