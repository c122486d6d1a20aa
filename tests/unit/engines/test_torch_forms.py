"""What the torch engine would execute on a device, built on the CPU: the same function, whatever it is made of."""

from __future__ import annotations

from dataclasses import replace

import open_clip.transformer
import pytest
import torch

from servers.engines.batches import Bucket
from servers.engines.torch.forms import OWN_MODULE, fast_form, plain_form
from servers.engines.torch.runner import Build
from servers.engines.torch.vit_fused import CUBLAS, hopper_plan, portable_plans
from servers.engines.torch.vit_tower import TowerShape
from servers.models.registry import get_variant
from servers.models.specification import ModelSpecification
from servers.models.uint8_module import UInt8Images
from servers.models.weights import RandomWeights

CPU = torch.device("cpu")
VIT_B_32 = TowerShape(224, 32, 768, 12, 12, 3072, 512, quick_gelu=False, epsilon=1e-5)
VIT_L_14 = TowerShape(224, 14, 1024, 16, 24, 4096, 768, quick_gelu=False, epsilon=1e-5)


@pytest.fixture(scope="module", params=["fp32", "uint8"])
def variant(request: pytest.FixtureRequest) -> ModelSpecification:
    return get_variant("openclip_vit_b32", request.param)


def run(build: Build, pixels: torch.Tensor) -> torch.Tensor:
    out = torch.full((len(pixels), 512), float("nan"))
    build(Bucket(len(pixels)))([pixels], [out])
    return out


@torch.no_grad()
def test_every_tower_computes_the_model(variant: ModelSpecification) -> None:
    module = variant.load_module(RandomWeights(0))
    raw = torch.randint(0, 256, (2, 224, 224, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    pixels = raw if variant.payload == "uint8" else torch.randn(2, 3, 224, 224)
    owner = UInt8Images(module, variant.preprocessing) if variant.payload == "uint8" else module
    expected = owner(pixels)
    own = plain_form(module, variant, CPU, torch.float32)
    fast = fast_form(module, variant, CPU, torch.float32, 2, compiled=False)
    assert own.kernels == OWN_MODULE
    assert fast.kernels.startswith("lean tower")
    assert fast.gelu == "erf"
    torch.testing.assert_close(run(own.build, pixels), expected)
    torch.testing.assert_close(run(fast.build, pixels), expected, atol=2e-5, rtol=1e-4)


def test_a_model_that_is_no_plain_tower_runs_as_its_own_module(specification: ModelSpecification) -> None:
    for module in (
        torch.nn.Flatten(),
        open_clip.transformer.VisionTransformer(
            image_size=64, patch_size=32, width=64, layers=1, heads=1, mlp_ratio=4.0, output_dim=16, pool_type="avg"
        ).requires_grad_(False),
    ):
        assert fast_form(module, specification, CPU, torch.float32, 2, compiled=False).kernels == OWN_MODULE


def test_only_a_specification_that_names_it_gets_the_lean_tower(specification: ModelSpecification) -> None:
    plain = replace(specification, fused_tower=False)
    module = plain.load_module(RandomWeights(0))
    assert fast_form(module, plain, CPU, torch.float32, 2, compiled=False).kernels == OWN_MODULE


@pytest.mark.parametrize("images", [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128])
def test_the_table_fits_the_model_that_it_was_measured_on(images: int) -> None:
    assert hopper_plan(images).fits(VIT_B_32)
    assert all(plan.fits(VIT_B_32) for plan in portable_plans(images))


def test_a_plan_that_does_not_divide_another_model_is_seen() -> None:
    assert not hopper_plan(1).fits(VIT_L_14)
    assert CUBLAS.fits(VIT_L_14)
