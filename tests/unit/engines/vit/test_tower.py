"""The lean tower computes open_clip's function: same weights, FP32, tight tolerance."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from servers.engines.torch.vit_tower import LeanVisionTower, UnsupportedTowerError, read_shape
from servers.models.registry import DEFAULT_MODEL, get_specification
from tests.small_tower import small_tower

PREPROCESSING = get_specification(DEFAULT_MODEL).preprocessing


@pytest.fixture(scope="module", params=[False, True], ids=["GELU", "QuickGELU"])
def visual(request: pytest.FixtureRequest) -> torch.nn.Module:
    return small_tower(quick_gelu=request.param)


def _relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    return float((out.double() - reference.double()).norm() / reference.double().norm())


@torch.no_grad()
def test_floats_and_bytes_match_open_clip(visual: torch.nn.Module) -> None:
    raw = torch.randint(0, 256, (2, 224, 224, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    pixels = ((raw / 255 - torch.tensor(PREPROCESSING.mean)) / torch.tensor(PREPROCESSING.std)).permute(0, 3, 1, 2)
    reference = visual(pixels)
    tower = LeanVisionTower(visual)
    assert _relative_error(tower(pixels), reference) < 3e-6
    assert _relative_error(LeanVisionTower(visual, PREPROCESSING)(raw), reference) < 3e-6
    # The tolerance discriminates: one gain of the last block off by 1 % is seen.
    last: Any = tower.blocks[-1]
    last.mlp_in.weight[:, 5].mul_(1.01)
    assert _relative_error(tower(pixels), reference) > 3e-6


@torch.no_grad()
def test_the_tower_owns_its_weights_and_leaves_the_module_alone(visual: torch.nn.Module) -> None:
    before = {name: value.clone() for name, value in visual.state_dict().items()}
    tower = LeanVisionTower(visual, PREPROCESSING)
    for tensor in (*tower.parameters(), *tower.buffers()):
        tensor.zero_()
    assert all(torch.equal(value, before[name]) for name, value in visual.state_dict().items())


@pytest.mark.parametrize("architecture", ["ViT-B-32", "ViT-B-32-quickgelu"])
def test_the_shape_is_that_of_the_module(architecture: str) -> None:
    import open_clip

    with torch.device("meta"):
        clip = open_clip.CLIP(**open_clip.get_model_config(architecture))
    shape = read_shape(clip.visual)
    assert (shape.tokens, shape.width, shape.heads, shape.layers, shape.mlp_width) == (50, 768, 12, 12, 3072)
    assert (shape.output_width, shape.patch_elements, shape.head_width, shape.epsilon) == (512, 3072, 64, 1e-5)


@pytest.mark.parametrize(
    "options", [{"pool_type": "avg"}, {"ls_init_value": 0.1}, {"no_ln_pre": True}, {"output_tokens": True}]
)
def test_a_tower_that_computes_something_else_is_refused(options: dict[str, object]) -> None:
    from open_clip.transformer import VisionTransformer

    visual = VisionTransformer(
        image_size=64, patch_size=32, width=64, layers=1, heads=1, mlp_ratio=4.0, output_dim=16, **options
    )
    with pytest.raises(UnsupportedTowerError, match="mode eager"):
        LeanVisionTower(visual, PREPROCESSING)


def test_what_is_not_a_tower_at_all_is_refused_like_one_that_is_not_covered() -> None:
    for module in (torch.nn.Linear(3, 4), torch.nn.Sequential(torch.nn.Conv2d(3, 4, 32), torch.nn.Flatten())):
        with pytest.raises(UnsupportedTowerError, match="mode eager"):
            read_shape(module)
