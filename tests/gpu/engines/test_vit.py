"""The fused tower and its graph runner on a real GPU: parity with FP32, replays that repeat, staging that is read."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from open_clip.transformer import VisionTransformer

from servers.engines.torch_device import Enqueue, GraphRunner
from servers.engines.vit.fused import FusedVisionTower, FusedWeights, Workspace
from servers.engines.vit.plans import CUBLAS, Plan, Tile
from servers.engines.vit.tower import LeanVisionTower
from servers.models.sources.open_clip import SPECIFICATION

pytestmark = pytest.mark.gpu

BUCKETS = (1, 2, 5)
PLANS = {
    "pointers": Plan(*(Tile(64, 64),) * 9),
    "descriptors": Plan(*(Tile(64, 64, descriptors=True),) * 9),
    "split": Plan(*(Tile(64, 32, 64, split=2),) * 9),
    "cublas": CUBLAS,
}


@pytest.fixture(scope="module")
def tower() -> LeanVisionTower:
    torch.manual_seed(0)
    visual = VisionTransformer(
        image_size=224, patch_size=32, width=768, layers=3, heads=12, mlp_ratio=4.0, output_dim=512
    )
    with torch.no_grad():
        for parameter in visual.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return LeanVisionTower(visual.eval(), SPECIFICATION.preprocessing)


@pytest.fixture(scope="module", params=list(PLANS))
def runner(request: pytest.FixtureRequest, tower: LeanVisionTower) -> GraphRunner:
    weights = FusedWeights(tower, "cuda")
    workspace = Workspace(tower.shape, BUCKETS[-1], weights.device)

    def build(images: int) -> Enqueue:
        return FusedVisionTower(weights, workspace, images, PLANS[request.param]).run

    return GraphRunner(
        build, item=(224, 224, 3), dtype=torch.uint8, width=512, buckets=BUCKETS, device=torch.device("cuda", 0)
    )


def _images(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 224, 224, 3), dtype=np.uint8)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_every_batch_matches_fp32(runner: GraphRunner, tower: LeanVisionTower, count: int) -> None:
    pixels = _images(count, seed=count)
    reference = tower(torch.from_numpy(pixels))
    out = torch.from_numpy(runner.infer(pixels))
    assert torch.nn.functional.cosine_similarity(out, reference).min() > 0.9995
    assert (out - reference).norm() / reference.norm() < 5e-3


def test_answers_repeat_and_stay_the_callers(runner: GraphRunner) -> None:
    pixels = _images(4, seed=11)
    first = runner.infer(pixels)
    kept = first.copy()
    for seed in range(20):
        runner.infer(_images(5, seed))
        assert np.array_equal(runner.infer(pixels), first)
    assert np.array_equal(first, kept)


def test_what_lies_in_the_staging_is_executed_from_there(runner: GraphRunner) -> None:
    for seed in range(30):
        batch = _images(1 + seed % 5, seed)
        expected = runner.infer(batch)
        runner.staging[:] = 0
        runner.staging[: len(batch)] = batch
        assert np.array_equal(runner.infer(runner.staging[: len(batch)]), expected)


def test_a_batch_beyond_the_largest_bucket_is_refused(runner: GraphRunner) -> None:
    with pytest.raises(ValueError, match="largest bucket, 5"):
        runner.infer(_images(6, seed=0))
