"""OpenCLIP's image towers: their specifications and the loading of their weights.

NAME is an architecture of open_clip, or ARCHITECTURE.TAG, whose default weights and preprocessing are the tag's. The
embedding is the output of open_clip's `visual`: for ViT-B-32 the projected class token, not L2-normalised (open_clip
normalises only in `encode_image(normalize=True)`).
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from importlib import import_module, reload
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from servers.models.modules import (
    downloaded,
    hollow,
    load_strictly,
    option_of,
    read_state,
    ready,
    refuse_other_preprocessing,
    refuse_unknown_tag,
)
from servers.models.specification import ModelSpecification, Preprocessing, image_specification, refuse_tag
from servers.models.weights import FindPretrained, PretrainedWeights, RandomWeights, WeightsError, WeightsSource, seeded
from servers.options.libraries import called_later, import_library
from servers.protocol.tensors import TensorSpec

if TYPE_CHECKING:
    import torch

ARCHITECTURE = "ViT-B-32"
"""The default model's."""
PREFIX = "visual."
OF_DEFAULT_MODEL = {"name": "openclip_vit_b32", "flops_per_item": 8_817_623_040}
"""Its name on servers, and its operations per image in matrix products, a multiply-add counted as two."""


def load_image_tower(
    source: WeightsSource, architecture: str = ARCHITECTURE, find: FindPretrained | None = None
) -> torch.nn.Module:
    """The FP32 tower in eval mode on the CPU: (n, 3, s, s) → (n, embedding). Raises `WeightsError`. Random weights
    depend on the seed alone and leave torch's global generator as it was. Pretrained and checkpoint weights may be a
    whole CLIP state dict, of which the tower's part is taken, or the tower's alone."""
    vision = (_architecture(architecture) or {}).get("vision_cfg", {})
    if vision.get("timm_model_name") and _module("timm_model").timm is None:
        with _quiet_root_logger():
            reload(_module("timm_model"))  # it was imported as where timm is not installed
    if isinstance(source, RandomWeights):
        with seeded(source.seed):
            return ready(_build(architecture, quick_gelu=False))
    state = read_state(source, find or find_pretrained)
    if isinstance(source, PretrainedWeights):
        # OpenAI's weights and some others were trained with QuickGELU.
        quick_gelu = bool(_configuration(architecture, source.tag).get("quick_gelu", False))
    else:
        # A file does not store the activation, which is not a tensor; open_clip puts it into its file names.
        quick_gelu = "quickgelu" in source.path.name.lower()
    tower = hollow(partial(_build, architecture, quick_gelu=quick_gelu))
    visual = {key.removeprefix(PREFIX): value for key, value in state.items() if key.startswith(PREFIX)}
    return load_strictly(tower, visual or state, option_of(source), f"a {architecture} image tower")


def pretrained_tags(architecture: str = ARCHITECTURE) -> tuple[str, ...]:
    """open_clip's tags for an architecture; importing open_clip takes seconds."""
    return tuple(_module("pretrained").list_pretrained_tags_by_model(architecture))


def _build(architecture: str, *, quick_gelu: bool) -> torch.nn.Module:
    """The image tower without CLIP's text tower, which is as large."""
    config = _architecture(architecture)
    assert config is not None
    vision = {**config["vision_cfg"], "timm_model_pretrained": False}
    tower: torch.nn.Module = _module("model")._build_vision_tower(
        config["embed_dim"], vision, quick_gelu or config.get("quick_gelu", False)
    )
    return tower


def find_pretrained(source: PretrainedWeights, architecture: str = ARCHITECTURE) -> Path:
    """The tag's file in the cache of the hub or of open_clip, downloaded when it is missing. Raises `WeightsError`."""
    pretrained = _module("pretrained")
    config, option = _configuration(architecture, source.tag), option_of(source)
    repository, _, name = str(config.get("hf_hub") or "").rpartition("/")
    if source.revision is not None and not repository:
        raise WeightsError(
            f"{option}: this tag is not on a hub and has no revisions; pin it with @sha256: and its hash"
        )

    def find() -> Path:
        if source.revision is None:
            path = pretrained.download_pretrained(config)
        else:
            path = pretrained.download_pretrained_from_hf(repository, filename=name or None, revision=source.revision)
        if not path:
            raise WeightsError(f"{option}: open_clip found no file to download; give a checkpoint file")
        return Path(path)

    return downloaded(source, find)


def _configuration(architecture: str, tag: str) -> dict[str, Any]:
    """open_clip's configuration of a tag. Raises `WeightsError` for an unknown one."""
    config: dict[str, Any] = _module("pretrained").get_pretrained_cfg(architecture, tag)
    if not config:
        refuse_unknown_tag(tag, "open_clip", architecture, pretrained_tags(architecture))
    return config


def _module(name: str) -> ModuleType:
    """One of open_clip's modules, without those that it does not need."""
    with _quiet_root_logger(), called_later("huggingface_hub", "hf_hub_download"):
        import_library("open_clip")
        return import_module(f"open_clip.{name}")


@cache
def _architecture(name: str) -> dict[str, Any] | None:
    """open_clip's configuration of an architecture, as `get_model_config` has it; None for another name."""
    path = Path(_module("model").__file__ or "").parent / "model_configs" / f"{name}.json"
    if path.stem != name or not path.is_file():
        return None
    config: dict[str, Any] = json.loads(path.read_bytes())
    return config if {"embed_dim", "vision_cfg", "text_cfg"} <= config.keys() else None


@contextmanager
def _quiet_root_logger() -> Iterator[None]:
    """open_clip and its imports log to the root logger, where the first message installs a handler on stderr."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def names() -> tuple[str, ...]:
    """The well-known models of this source; every architecture of open_clip has a specification."""
    return (ARCHITECTURE, "ViT-B-16", "ViT-L-14", "RN50", "convnext_base_w", "ViT-B-16-SigLIP")


def all_names() -> tuple[str, ...]:
    """Every architecture of open_clip; each also takes a tag after a dot."""
    return tuple(_module("factory").list_models())


def specify(name: str) -> ModelSpecification | None:
    """The specification of ARCHITECTURE or ARCHITECTURE.TAG; None if open_clip has no such architecture."""
    if _architecture(name) is not None:
        return _specify(name)
    architecture, _, tag = name.rpartition(".")
    if _architecture(architecture) is None:
        return None
    if tag not in pretrained_tags(architecture):
        refuse_tag(f"open_clip:{architecture}", tag, pretrained_tags(architecture))
    return replace(_specify(architecture, tag), default_weights=tag)


def _specify(architecture: str, tag: str | None = None) -> ModelSpecification:
    config = _architecture(architecture)
    assert config is not None
    vision, size = config["vision_cfg"], config["vision_cfg"].get("image_size", 224)
    trained = {
        known_tag: _preprocessing(_configuration(architecture, known_tag), size)
        for known_tag in pretrained_tags(architecture)
    }
    ((usual, _),) = Counter(
        trained.values() or [_preprocessing(vars(_module("transform").PreprocessCfg()), size)]
    ).most_common(1)
    served = trained[tag] if tag else usual

    def find(source: PretrainedWeights) -> Path:
        refuse_other_preprocessing(source, trained.get(source.tag, served), served, f"open_clip:{architecture}")
        return find_pretrained(source, architecture)

    return image_specification(
        f"open_clip:{architecture}{f'.{tag}' if tag else ''}",
        served,
        TensorSpec("embedding", "FP32", (-1, config["embed_dim"])),
        "embedding",
        partial(load_image_tower, architecture=architecture, find=find),
        title=f"OpenCLIP {architecture} image tower",
        pretrained_tags=partial(pretrained_tags, architecture),
        find_pretrained=find,
        fused_tower=not vision.get("timm_model_name") and isinstance(vision.get("layers", 12), int),
        **(OF_DEFAULT_MODEL if (architecture, tag) == (ARCHITECTURE, None) else {}),
    )


def _preprocessing(config: Mapping[str, Any], size: int) -> Preprocessing:
    """From open_clip's configuration of a tag, or its default."""
    return Preprocessing(
        size=size,
        mean=tuple(config["mean"]),
        std=tuple(config["std"]),
        interpolation=config["interpolation"],
        squash=config["resize_mode"] == "squash",
    )
