"""torchvision's image classifiers: NAME, such as resnet50, or NAME.TAG with one of torchvision's tags of weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

from servers.models.modules import (
    downloaded,
    load_images_network,
    option_of,
    refuse_other_preprocessing,
    refuse_unknown_tag,
)
from servers.models.specification import ModelSpecification, Preprocessing, image_specification, refuse_tag
from servers.models.weights import PretrainedWeights, WeightsError, WeightsSource
from servers.options.libraries import import_library
from servers.protocol.tensors import TensorSpec

if TYPE_CHECKING:
    import torch

_TRANSFORMING = {"init_weights": False, "transform_input": True}
_ARGUMENTS = {"googlenet": _TRANSFORMING, "inception_v3": _TRANSFORMING}
"""Arguments that torchvision uses for its own weights; the default initialisation takes a minute."""


def names() -> tuple[str, ...]:
    """The well-known models of this source; every classifier of torchvision has a specification."""
    return ("resnet50", "vit_b_16", "convnext_tiny", "efficientnet_b0", "mobilenet_v3_large")


def all_names() -> tuple[str, ...]:
    """Every classifier of torchvision; each also takes a tag after a dot."""
    models = import_library("torchvision").models
    return tuple(models.list_models(module=models))


def specify(name: str) -> ModelSpecification | None:
    """The specification of NAME or NAME.TAG; None if torchvision has no such classifier."""
    models = import_library("torchvision").models
    architecture, _, tag = name.partition(".")
    if architecture not in all_names():
        return None
    weights = models.get_model_weights(architecture)
    if tag and tag not in weights.__members__:
        refuse_tag(f"torchvision:{architecture}", tag, weights.__members__)
    chosen = weights[tag] if tag else weights.DEFAULT
    served, classes = _preprocessing(chosen), len(chosen.meta["categories"])

    def find(source: PretrainedWeights) -> Path:
        refuse_unknown_tag(source.tag, "torchvision", architecture, weights.__members__)
        refuse_other_preprocessing(source, _preprocessing(weights[source.tag]), served, f"torchvision:{architecture}")
        return _find_pretrained(source, weights[source.tag].url)

    def load(source: WeightsSource) -> torch.nn.Module:
        arguments: dict[str, Any] = {"num_classes": classes, **_ARGUMENTS.get(architecture, {})}
        if architecture.startswith("vit_"):
            arguments["image_size"] = served.size
        build = partial(models.get_model, architecture, weights=None, **arguments)
        return load_images_network(source, build, find, served.size, f"torchvision {architecture}")

    return image_specification(
        f"torchvision:{name}",
        served,
        TensorSpec("logits", "FP32", (-1, classes)),
        "logits",
        load,
        flops_per_item=round(2e9 * chosen.meta["_ops"]),
        default_weights=tag or "random:0",
        pretrained_tags=lambda: tuple(weights.__members__),
        find_pretrained=find,
    )


def _preprocessing(weights: Any) -> Preprocessing:
    transform = weights.transforms()
    return Preprocessing(
        size=transform.crop_size[0],
        mean=tuple(transform.mean),
        std=tuple(transform.std),
        interpolation=transform.interpolation.value,
        resize=transform.resize_size[0],
    )


def _find_pretrained(source: PretrainedWeights, url: str) -> Path:
    """The file in torch's cache, downloaded when it is missing; its name ends with the start of its hash."""
    import torch

    if source.revision is not None:
        raise WeightsError(f"{option_of(source)}: torchvision's weights have no revisions; pin them with @sha256:")
    name = Path(urlparse(url).path).name
    path = Path(torch.hub.get_dir()) / "checkpoints" / name

    def find() -> Path:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            prefix = path.stem.rpartition("-")[2]
            torch.hub.download_url_to_file(url, str(path), prefix, progress=False)
        return path

    return downloaded(source, find)
