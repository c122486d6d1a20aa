"""The image tower against open_clip's own module, configuration and checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.utils.flop_counter import FlopCounterMode

from servers.models.registry import UnknownModelError, get_specification
from servers.models.sources.open_clip import ARCHITECTURE, load_image_tower
from servers.models.specification import ModelSpecification
from servers.models.weights import CheckpointWeights, PretrainedWeights, RandomWeights, WeightsError, parse_weights

SMALL = "ViT-S-32-alt"


def clip_of(architecture: str) -> Any:
    """Without memory for its weights, which takes seconds to fill."""
    import open_clip

    with torch.device("meta"):
        return open_clip.CLIP(**open_clip.get_model_config(architecture)).eval()


@pytest.fixture(scope="module")
def clip() -> Any:
    """The text's tower stays without memory."""
    clip = clip_of(ARCHITECTURE)
    clip.visual.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in clip.visual.named_parameters():
            parameter.uniform_(-0.03, 0.03, generator=generator)
            if name.endswith("weight") and parameter.ndim == 1:
                parameter.add_(1)  # a norm's gain
    return clip


@pytest.fixture(scope="module")
def seed_3() -> dict[str, torch.Tensor]:
    """The weights of a small tower with random:3."""
    return load_image_tower(RandomWeights(3), SMALL).state_dict()


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    return torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(1))


def hollow(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same names, shapes and dtypes with one stored number each: kilobytes on disk in place of 350 MB."""
    return {key: torch.zeros((), dtype=value.dtype).expand(value.shape) for key, value in state.items()}


def outputs(module: torch.nn.Module, images: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return module(images)


def test_the_flops_are_those_that_torch_counts(specification: ModelSpecification) -> None:
    module = load_image_tower(RandomWeights(0)).requires_grad_(True)  # with gradients the fused attention is not used
    with FlopCounterMode(display=False) as counter:
        module(torch.zeros(1, 3, 224, 224))
    assert specification.flops_per_item == counter.get_total_flops() == 8_817_623_040


def test_random_weights_depend_on_the_seed_alone_and_leave_the_global_generator(
    seed_3: dict[str, torch.Tensor],
) -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    again = load_image_tower(RandomWeights(3), SMALL).state_dict()
    assert torch.equal(before, torch.random.get_rng_state())
    other = load_image_tower(RandomWeights(4), SMALL).state_dict()
    assert all(torch.equal(value, again[key]) for key, value in seed_3.items())
    assert not torch.equal(seed_3["conv1.weight"], other["conv1.weight"])


def test_random_weights_of_models_that_load_at_the_same_time_are_those_of_one_alone(
    seed_3: dict[str, torch.Tensor],
) -> None:
    with ThreadPoolExecutor(2) as threads:
        both = list(threads.map(load_image_tower, [RandomWeights(3)] * 2, [SMALL] * 2))
    for tower in both:
        state = tower.state_dict()
        assert all(torch.equal(value, state[key]) for key, value in seed_3.items())


@pytest.mark.parametrize("kind", ["whole", "tower", "data-parallel", "safetensors", "half"])
def test_a_checkpoint_gives_open_clips_own_answers(kind: str, clip: Any, images: torch.Tensor, tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    whole = hollow(clip.state_dict()) | clip.visual.state_dict(prefix="visual.")
    if kind == "whole":
        torch.save(whole, path)
    elif kind == "tower":
        torch.save(clip.visual.state_dict(), path)
    elif kind == "data-parallel":  # in a trainer's file
        torch.save({"epoch": 3, "state_dict": {f"module.{key}": value for key, value in whole.items()}}, path)
    elif kind == "safetensors":
        path = tmp_path / "weights.safetensors"
        save_file(clip.visual.state_dict(), path)
    else:
        torch.save({key: value.half() for key, value in clip.visual.state_dict().items()}, path)
    module = load_image_tower(parse_weights(str(path)))
    assert not module.training
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
    tolerance = 2e-2 if kind == "half" else 0.0
    torch.testing.assert_close(outputs(module, images), outputs(clip.visual, images), rtol=tolerance, atol=tolerance)


def test_the_name_of_a_file_chooses_quickgelu(clip: Any, images: torch.Tensor, tmp_path: Path) -> None:
    path = tmp_path / "vit_b_32-quickgelu-mine.pt"
    torch.save(clip.visual.state_dict(), path)
    quick = clip_of("ViT-B-32-quickgelu").visual
    quick.load_state_dict(clip.visual.state_dict(), assign=True)
    answer = outputs(load_image_tower(CheckpointWeights(path)), images)
    torch.testing.assert_close(answer, outputs(quick, images), rtol=0, atol=0)
    assert not torch.allclose(answer, outputs(clip.visual, images), atol=1e-3)


def write_text(path: Path, state: dict[str, torch.Tensor]) -> None:
    path.write_text("no checkpoint")


def write_missing(path: Path, state: dict[str, torch.Tensor]) -> None:
    torch.save({key: value for key, value in state.items() if key != "proj"}, path)


def write_unknown(path: Path, state: dict[str, torch.Tensor]) -> None:
    torch.save(state | {"extra": torch.zeros(1)}, path)


def write_shape(path: Path, state: dict[str, torch.Tensor]) -> None:
    torch.save(state | {"proj": torch.zeros(768, 640)}, path)


def write_list(path: Path, state: dict[str, torch.Tensor]) -> None:
    torch.save([1, 2], path)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (write_text, "unreadable as a checkpoint"),
        (write_missing, "lacks 1 tensors, proj"),
        (write_unknown, "the unknown 1 tensors, extra"),
        (write_shape, "another shape for 1 tensors, proj"),
        (write_list, "has no state dict"),
    ],
)
def test_an_unfit_checkpoint_is_refused_in_one_sentence(
    write: Callable[[Path, dict[str, torch.Tensor]], None], message: str, clip: Any, tmp_path: Path
) -> None:
    path = tmp_path / "weights.pt"
    write(path, hollow(clip.visual.state_dict()))
    with pytest.raises(WeightsError, match=message) as caught:
        load_image_tower(CheckpointWeights(path))
    assert "\n" not in str(caught.value)
    assert str(tmp_path) not in str(caught.value)


def test_a_safetensors_file_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    path.write_bytes(b"\0" * 64)
    with pytest.raises(WeightsError, match="safetensors"):
        load_image_tower(CheckpointWeights(path))


def test_an_unknown_tag_names_the_closest_or_all() -> None:
    with pytest.raises(WeightsError, match="use one of: openai, "):
        load_image_tower(PretrainedWeights("no-such-tag"))
    with pytest.raises(WeightsError, match="did you mean openai"):
        load_image_tower(PretrainedWeights("openia"))


def test_every_tag_of_open_clip_was_trained_with_our_preprocessing(specification: ModelSpecification) -> None:
    import open_clip

    preprocessing = specification.preprocessing
    for tag in specification.pretrained_tags():
        config = open_clip.get_pretrained_cfg(ARCHITECTURE, tag)
        found = (config["mean"], config["std"], config["interpolation"], config["resize_mode"])
        assert found == (preprocessing.mean, preprocessing.std, preprocessing.interpolation, "shortest"), tag


def test_an_unknown_model_names_the_closest() -> None:
    with pytest.raises(UnknownModelError, match=r"did you mean openclip_vit_b32 or "):
        get_specification("openclip_vit")
