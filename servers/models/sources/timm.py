"""timm's image models: NAME or NAME.TAG, such as vit_base_patch16_224.augreg_in21k.

Input size, preprocessing and number of classes are those of timm's configuration of the tag, without one of the model's
default tag. A model without a classifier answers with an embedding.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from servers.models.modules import (
    hub_file,
    load_images_network,
    option_of,
    read_state,
    ready,
    refuse_other_preprocessing,
    refuse_unknown_tag,
)
from servers.models.specification import (
    ModelSpecification,
    OutputKind,
    Preprocessing,
    UnknownModelError,
    image_specification,
    refuse_tag,
)
from servers.models.weights import PretrainedWeights, RandomWeights, WeightsError, WeightsSource
from servers.protocol.tensors import TensorSpec

if TYPE_CHECKING:
    import torch

_FILES = ("model.safetensors", "pytorch_model.bin")


def names() -> tuple[str, ...]:
    """The well-known models of this source; every model of timm that takes square RGB images has a specification."""
    return ("vit_base_patch16_224", "resnet50", "convnext_tiny", "swin_tiny_patch4_window7_224")


def all_names() -> tuple[str, ...]:
    """Every model of timm; each also takes a tag after a dot."""
    import timm

    return tuple(timm.list_models())


def specify(name: str) -> ModelSpecification | None:
    """The specification of NAME or NAME.TAG; None if timm has no such model."""
    import timm
    from timm.models import get_arch_pretrained_cfgs, get_pretrained_cfg

    architecture, _, tag = name.partition(".")
    if not timm.is_model(architecture):
        return None
    tags = {key.partition(".")[2]: config for key, config in get_arch_pretrained_cfgs(architecture).items()}
    if tag and tag not in tags:
        refuse_tag(f"timm:{architecture}", tag, tags)
    config = tags[tag] if tag else get_pretrained_cfg(architecture)
    served = None if config is None else _preprocessing(config)
    if served is None:
        raise UnknownModelError(f"timm:{name} takes other inputs than square RGB images; serve it from a FILE.py")

    def find(source: PretrainedWeights) -> Path:
        refuse_unknown_tag(source.tag, "timm", architecture, tags)
        refuse_other_preprocessing(source, _preprocessing(tags[source.tag]), served, f"timm:{architecture}")
        weights = tags[source.tag]
        if not weights.hf_hub_id:
            raise WeightsError(f"{option_of(source)}: timm does not load this tag from a hub; give a checkpoint file")
        return hub_file(source, weights.hf_hub_id, [weights.hf_hub_filename] if weights.hf_hub_filename else _FILES)

    def load(source: WeightsSource) -> torch.nn.Module:
        if isinstance(source, PretrainedWeights):
            overlay = {"state_dict": read_state(source, find)}
            try:  # timm's own loader knows how to convert each tag's file
                model = timm.create_model(f"{architecture}.{source.tag}", True, pretrained_cfg_overlay=overlay)
            except RuntimeError as exc:
                raise WeightsError(f"{option_of(source)}: timm cannot load the tag's file into {architecture}") from exc
            return ready(model)
        build = partial(timm.create_model, name)
        return load_images_network(source, build, find, served.size, f"timm {architecture}")

    classes = config.num_classes
    output: tuple[TensorSpec, OutputKind] = (TensorSpec("logits", "FP32", (-1, classes)), "logits")
    if not classes:
        output = _features(load, served.size)
    return image_specification(
        f"timm:{name}",
        served,
        *output,
        load,
        default_weights=tag or "random:0",
        pretrained_tags=lambda: tuple(name for name, weights in tags.items() if weights.hf_hub_id),
        find_pretrained=find,
    )


def _preprocessing(config: Any) -> Preprocessing | None:
    """From timm's configuration of a tag; None for images that are not square, not RGB or framed with a border."""
    channels, height, width = config.input_size
    share = config.crop_pct or 0.875
    if channels != 3 or height != width or config.crop_mode not in ("center", "squash") or share > 1:
        return None
    return Preprocessing(
        size=height,
        mean=tuple(config.mean),
        std=tuple(config.std),
        interpolation=config.interpolation if config.interpolation != "random" else "bilinear",
        resize=math.floor(height / share),
        squash=config.crop_mode == "squash",
    )


def _features(load: Any, size: int) -> tuple[TensorSpec, OutputKind]:
    """The output of a model without a classifier, whose shape timm's configuration does not give."""
    import torch

    with torch.device("meta"), torch.no_grad():
        features = load(RandomWeights(0))(torch.zeros(1, 3, size, size))
    kind: OutputKind = "embedding" if features.ndim == 2 else "tensor"
    return TensorSpec("embedding" if kind == "embedding" else "features", "FP32", (-1, *features.shape[1:])), kind
