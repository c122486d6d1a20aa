"""The parameters in Triton's config: the launch writes model, engine and weights, the model reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from servers.engines.interface import EngineDescription
from servers.engines.padding import pad_to_text, parse_pad_to
from servers.engines.settings import EngineSettings, parse_spinning
from servers.models.image_decoder import DecodingSettings
from servers.models.specification import ModelSpecification
from servers.models.weights import WeightsSource

VERIFIED = ("engine", "precision", "mode", "device", "weights", "threads", "spinning", "max_batch_size")
"""The parameters that the model compares with the loaded engine; decoding cannot turn out otherwise."""
_OPEN = (("mode", "auto"), ("spinning", None))


class EngineFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of engine.json: paths that the model needs and clients must not see."""

    model: str
    """The reference, which may be a path; the config's parameter `payload` names the variant."""
    weights: str
    """In the form of `--weights`; a checkpoint with its path."""
    artefact: str | None
    """Absolute path of the exported file."""


def parameters_from_settings(
    engine: EngineSettings, weights: WeightsSource, artefact: Path | None, artefact_sha256: str | None
) -> dict[str, str]:
    """The engine as the config shows it. Names without paths, since clients read the config and people publish it.

    `engine` is resolved (see `servers.triton.settings.resolve_engine`).
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


def parameters_from_model(
    specification: ModelSpecification, pad_to: Sequence[int], decoding: DecodingSettings
) -> dict[str, str]:
    """The model with its payload, the sizes of a padded axis and, for JPEG, the decoding settings."""
    parameters: dict[str, str] = {"model": specification.label, "payload": specification.payload}
    if specification.padded_axis is not None:
        parameters["pad_to"] = pad_to_text(pad_to)
    if specification.payload == "jpeg":
        parameters["decode_threads"] = str(decoding.thread_count)
        parameters["max_image_pixels"] = str(decoding.max_pixels)
    return parameters


def decoding_from_parameters(parameters: Mapping[str, str]) -> DecodingSettings:
    """The decoding settings of a JPEG model. Raises `KeyError` for a missing parameter."""
    return DecodingSettings(int(parameters["decode_threads"]), int(parameters["max_image_pixels"]))


def settings_from_parameters(parameters: Mapping[str, str], max_batch_size: int) -> EngineSettings:
    """The engine of a config, where `max_batch_size` is a separate field. Raises `KeyError` for a missing parameter."""
    return EngineSettings(
        kind=parameters["engine"],
        precision=parameters["precision"],
        mode=parameters["mode"],
        device=parameters["device"],
        threads=int(parameters.get("threads", "0")),
        max_batch_size=max_batch_size,
        pad_to=parse_pad_to(parameters.get("pad_to", "")),
        spinning=parse_spinning(parameters.get("spinning", "")),
    )


def contradictions(parameters: Mapping[str, str], max_batch_size: int, in_effect: EngineDescription) -> tuple[str, ...]:
    """A phrase for each difference between config and engine; with mode "auto" the engine may choose, and spinning may
    be left out."""
    config = {**parameters, "max_batch_size": str(max_batch_size)}
    differences = []
    for name in VERIFIED:
        found = getattr(in_effect, "kind" if name == "engine" else name)
        found = None if found is None else str(found)
        if found != config.get(name) and (name, config.get(name)) not in _OPEN:
            differences.append(f"{name} is {found!r}, the config says {config.get(name)!r}")
    return tuple(differences)
