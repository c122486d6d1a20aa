"""torchvision's image classifiers, such as torchvision:resnet50."""

from __future__ import annotations

from typing import TYPE_CHECKING

from servers.contract.tensors import TensorSpec
from servers.models.specification import ModelSpecification, Preprocessing
from servers.models.weights import RandomWeights, WeightsError, WeightsSource, seeded

if TYPE_CHECKING:
    import torch


def names() -> tuple[str, ...]:
    """The well-known models of this source; every classifier of torchvision has a specification."""
    return ("resnet50", "vit_b_16")


def specify(name: str) -> ModelSpecification | None:
    """The specification of a classifier; None if torchvision has none of that name."""
    from torchvision import models

    if name not in models.list_models(module=models):
        return None
    weights = models.get_model_weights(name).DEFAULT
    transform = weights.transforms()
    size, classes = transform.crop_size[0], len(weights.meta["categories"])

    def load(source: WeightsSource) -> torch.nn.Module:
        if not isinstance(source, RandomWeights):
            raise WeightsError("only random weights yet")
        with seeded(source.seed):
            module: torch.nn.Module = models.get_model(name, weights=None)
        return module.eval().requires_grad_(False)

    return ModelSpecification(
        name=f"torchvision_{name}",
        reference=f"torchvision:{name}",
        title=f"torchvision {name}",
        version="1",
        inputs=(TensorSpec("pixel_values", "FP32", (-1, 3, size, size)),),
        outputs=(TensorSpec("logits", "FP32", (-1, classes)),),
        kinds={"logits": "logits"},
        item="image",
        max_batch_size=32,
        flops_per_item=round(2e9 * weights.meta["_ops"]),
        image=Preprocessing(
            size=size,
            mean=tuple(transform.mean),
            std=tuple(transform.std),
            interpolation=transform.interpolation.value,
            resize=transform.resize_size[0],
        ),
        load_module=load,
        payload="fp32",
    )
