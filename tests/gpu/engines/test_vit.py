"""The fused tower and its graph runner on a real GPU: parity with FP32, and replays that repeat."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from open_clip.transformer import VisionTransformer

from servers.engines.batches import Bucket
from servers.engines.torch.runner import Enqueue, GraphRunner
from servers.engines.torch.vit_fused import CUBLAS, FusedVisionTower, FusedWeights, Tile, TilePlan, Workspace
from servers.engines.torch.vit_tower import LeanVisionTower
from servers.models.registry import DEFAULT_MODEL, get_specification, get_variant

pytestmark = pytest.mark.gpu

BUCKETS = (1, 2, 5)
PLANS = {
    "pointers": TilePlan(*(Tile(64, 64),) * 9),
    "descriptors": TilePlan(*(Tile(64, 64, descriptors=True),) * 9),
    "split": TilePlan(*(Tile(64, 32, 64, split=2),) * 9),
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
    return LeanVisionTower(visual.eval(), get_specification(DEFAULT_MODEL).preprocessing)


@pytest.fixture(scope="module", params=list(PLANS))
def runner(request: pytest.FixtureRequest, tower: LeanVisionTower) -> GraphRunner:
    weights = FusedWeights(tower, "cuda")
    workspace = Workspace(tower.shape, BUCKETS[-1], weights.device)

    def build(bucket: Bucket) -> Enqueue:
        run = FusedVisionTower(weights, workspace, bucket.rows, PLANS[request.param]).run
        return lambda inputs, outputs: run(inputs[0], outputs[0])

    return GraphRunner(get_variant("openclip_vit_b32", "uint8"), torch.device("cuda", 0), BUCKETS, build=build)


def infer(runner: GraphRunner, pixels: np.ndarray) -> np.ndarray:
    embeddings: np.ndarray = runner.infer({"pixel_values": pixels})["embedding"]
    return embeddings


def _images(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 224, 224, 3), dtype=np.uint8)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_every_batch_matches_fp32(runner: GraphRunner, tower: LeanVisionTower, count: int) -> None:
    pixels = _images(count, seed=count)
    reference = tower(torch.from_numpy(pixels))
    out = torch.from_numpy(infer(runner, pixels))
    assert torch.nn.functional.cosine_similarity(out, reference).min() > 0.9995
    assert (out - reference).norm() / reference.norm() < 5e-3


def test_answers_repeat_and_stay_the_callers(runner: GraphRunner) -> None:
    pixels = _images(4, seed=11)
    first = infer(runner, pixels)
    kept = first.copy()
    for seed in range(20):
        infer(runner, _images(5, seed))
        assert np.array_equal(infer(runner, pixels), first)
    assert np.array_equal(first, kept)


def test_a_batch_beyond_the_largest_bucket_is_refused(runner: GraphRunner) -> None:
    with pytest.raises(ValueError, match="largest bucket, 5"):
        infer(runner, _images(6, seed=0))
