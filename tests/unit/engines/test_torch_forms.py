"""What the torch engine would execute on a device, built on the CPU: the same function, whatever it is made of."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from servers.engines.batches import Bucket
from servers.engines.choice import Call
from servers.engines.interface import PLANS_FOLDER
from servers.engines.torch import forms, vit_fused
from servers.engines.torch.forms import OWN_MODULE, fast_form, plain_form
from servers.engines.torch.runner import Build
from servers.engines.torch.vit_fused import CUBLAS, TilePlan, chosen_plans, hopper_plan, portable_plans
from servers.engines.torch.vit_tower import TowerShape, UnsupportedTowerError
from servers.models.registry import get_specification, payload_variants
from servers.models.specification import ModelSpecification
from servers.models.uint8_module import UInt8Images
from servers.models.weights import RandomWeights
from tests.small_tower import EMBEDDING, small_tower, with_small_tower

CPU = torch.device("cpu")
VIT_B_32 = TowerShape(224, 32, 768, 12, 12, 3072, 512, quick_gelu=False, epsilon=1e-5)
VIT_L_14 = TowerShape(224, 14, 1024, 16, 24, 4096, 768, quick_gelu=False, epsilon=1e-5)


@pytest.fixture(scope="module", params=["fp32", "uint8"])
def variant(request: pytest.FixtureRequest) -> ModelSpecification:
    return payload_variants(with_small_tower(get_specification("openclip_vit_b32")))[request.param == "uint8"]


def run(build: Build, pixels: torch.Tensor) -> torch.Tensor:
    out = torch.full((len(pixels), EMBEDDING), float("nan"))
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
    fast = fast_form(module, variant, CPU, torch.float32, [1, 2], compiled=False)
    assert own.kernels == OWN_MODULE
    assert fast.kernels.startswith("lean tower")
    assert fast.gelu == "erf"
    torch.testing.assert_close(run(own.build, pixels), expected)
    torch.testing.assert_close(run(fast.build, pixels), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("failure", [RuntimeError("no kernel image"), UnsupportedTowerError("too many tokens")])
def test_fused_kernels_that_fail_give_way_to_the_lean_tower(
    failure: Exception, specification: ModelSpecification, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_arguments: object) -> None:
        raise failure

    monkeypatch.setattr(forms, "_fused_form", fails)
    form = fast_form(small_tower(), specification, CPU, torch.float16, [1, 2], compiled=False)
    assert form.kernels.startswith("lean tower")


def test_a_tower_s_plan_is_chosen_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a card without a table; a plan that fails there is left out, whatever it raises."""
    monkeypatch.setenv(PLANS_FOLDER, str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (8, 6))
    weights = SimpleNamespace(device=CPU, shape=VIT_B_32, bytes_in=True)

    def chosen(library_ms: float) -> list[tuple[TilePlan, str]]:
        ran = list[TilePlan]()

        def tower(_weights: object, _space: object, images: int, plan: TilePlan) -> SimpleNamespace:
            if images == 8 and plan != CUBLAS:
                raise LookupError("Triton's compiler failed")
            return SimpleNamespace(run=lambda *_: ran.append(plan))

        def times(calls: Iterable[tuple[str, Call]], *_: object) -> dict[str, float]:
            measured = {}
            for title, call in calls:
                with suppress(LookupError):
                    call()
                    measured[title] = 1.0 if ran[-1] == CUBLAS else library_ms
            return measured

        monkeypatch.setattr(vit_fused, "FusedVisionTower", tower)
        monkeypatch.setattr(vit_fused, "graph_times_ms", times)
        plans = chosen_plans(weights, None, (224, 224, 3), (1, 8))  # type: ignore[arg-type]
        return [plans[images] for images in (1, 8)]

    first = chosen(0.5)
    assert first == [(portable_plans(1)[1], "measured"), (CUBLAS, "measured")]
    assert chosen(2.0) == first
    (path,) = tmp_path.glob("*.json")
    path.write_text("[]")
    assert chosen(2.0) == [(CUBLAS, "measured")] * 2


def test_a_model_that_is_no_plain_tower_runs_as_its_own_module(specification: ModelSpecification) -> None:
    from open_clip.transformer import VisionTransformer

    for module in (
        torch.nn.Flatten(),
        VisionTransformer(
            image_size=64, patch_size=32, width=64, layers=1, heads=1, mlp_ratio=4.0, output_dim=16, pool_type="avg"
        ).requires_grad_(False),
    ):
        assert fast_form(module, specification, CPU, torch.float32, [1, 2], compiled=False).kernels == OWN_MODULE


def test_only_a_specification_that_names_it_gets_the_lean_tower(specification: ModelSpecification) -> None:
    plain = replace(specification, fused_tower=False)
    assert fast_form(small_tower(), plain, CPU, torch.float32, [1, 2], compiled=False).kernels == OWN_MODULE


@pytest.mark.parametrize("images", [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128])
def test_the_table_fits_the_model_that_it_was_measured_on(images: int) -> None:
    assert hopper_plan(images).fits(VIT_B_32)
    assert all(plan.fits(VIT_B_32) for plan in portable_plans(images))


def test_a_plan_that_does_not_divide_another_model_is_seen() -> None:
    assert not hopper_plan(1).fits(VIT_L_14)
    assert CUBLAS.fits(VIT_L_14)
