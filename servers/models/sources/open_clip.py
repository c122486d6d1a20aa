"""OpenCLIP's ViT-B-32 image tower: its specification, its operation count and the loading of its weights.

The embedding is the output of open_clip's `visual`: the projected class token, not L2-normalised (open_clip normalises
only in `encode_image(normalize=True)`).
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from servers.contract.tensors import TensorSpec
from servers.models.specification import ModelSpecification, Preprocessing, choose_from
from servers.models.weights import (
    CheckpointWeights,
    PretrainedWeights,
    RandomWeights,
    WeightsError,
    WeightsSource,
    seeded,
    verify,
)

if TYPE_CHECKING:
    import torch

ARCHITECTURE = "ViT-B-32"
PREFIX = "visual."

DIMENSIONS = {"image_size": 224, "patch_size": 32, "width": 768, "layers": 12, "heads": 12, "output_dim": 512}
MLP_RATIO = 4
"""Both are as in open_clip's `model_configs/ViT-B-32.json`; a test compares them."""


def tower_flops() -> int:
    """Operations per image in matrix products, a multiply-add counted as two: 8,817,623,040.

    With p patches, t = p + 1 tokens, width w, L layers, patch side s and embedding e:

        patch embedding  2·p·w·3s²
        each layer       2·t·w·3w  (q, k, v)  +  2·2·t²·w  (scores, weighted sum)
                         + 2·t·w·w  (output)  +  2·2·t·w·4w  (MLP)
        projection       2·w·e

    Normalisation, softmax, activation and bias are left out (below 1 %), as is usual.
    """
    w, side = DIMENSIONS["width"], DIMENSIONS["patch_size"]
    patches = (DIMENSIONS["image_size"] // side) ** 2
    tokens = patches + 1
    attention = 2 * tokens * w * 3 * w + 2 * 2 * tokens**2 * w + 2 * tokens * w * w
    layers = DIMENSIONS["layers"] * (attention + 2 * 2 * tokens * w * MLP_RATIO * w)
    return 2 * patches * w * 3 * side**2 + layers + 2 * w * DIMENSIONS["output_dim"]


def load_image_tower(source: WeightsSource) -> torch.nn.Module:
    """The FP32 tower in eval mode on the CPU: (n, 3, 224, 224) → (n, 512). Raises `WeightsError`.

    Random weights depend on the seed alone and leave torch's global generator as it was. Pretrained and checkpoint
    weights may be a whole CLIP state dict, of which the tower's part is taken, or the tower's alone.
    """
    match source:
        case RandomWeights(seed):
            with seeded(seed):
                return _build(quick_gelu=False)
        case PretrainedWeights(tag):
            path = find_pretrained(source)
            verify(path, f"--weights {tag}", source.sha256)
            # OpenAI's weights and some others were trained with QuickGELU.
            return _tower_from_file(path, f"--weights {tag}", bool(_configuration(tag).get("quick_gelu", False)))
        case CheckpointWeights(path):
            verify(path, f"--weights {path.name}", source.sha256)
            # A file does not store the activation, which is not a tensor; open_clip puts it into its file names.
            return _tower_from_file(path, f"--weights {path.name}", "quickgelu" in path.name.lower())


def pretrained_tags() -> tuple[str, ...]:
    """open_clip's tags for this architecture; importing open_clip takes seconds."""
    with _quiet_root_logger():
        from open_clip import list_pretrained_tags_by_model  # type: ignore[attr-defined,unused-ignore]
    return tuple(list_pretrained_tags_by_model(ARCHITECTURE))


def _build(*, quick_gelu: bool) -> torch.nn.Module:
    """The image tower without CLIP's text tower, which is as large."""
    with _quiet_root_logger():
        import torch
        from open_clip.transformer import LayerNorm, QuickGELU, VisionTransformer
    tower: torch.nn.Module = VisionTransformer(
        **DIMENSIONS,
        mlp_ratio=MLP_RATIO,
        act_layer=QuickGELU if quick_gelu else torch.nn.GELU,
        norm_layer=LayerNorm,
    )
    return tower.eval().requires_grad_(False)


def find_pretrained(source: PretrainedWeights) -> Path:
    """The tag's file in the cache of the hub or of open_clip, downloaded when it is missing. Raises `WeightsError`."""
    with _quiet_root_logger():
        from open_clip.pretrained import download_pretrained, download_pretrained_from_hf
    config, option = _configuration(source.tag), f"--weights {source.tag}"
    repository, _, name = str(config.get("hf_hub") or "").rpartition("/")
    if source.revision is not None and not repository:
        raise WeightsError(
            f"{option}: this tag is not on a hub and has no revisions; pin it with @sha256: and its hash"
        )
    try:
        if source.revision is None:
            path = download_pretrained(config)
        else:
            path = download_pretrained_from_hf(repository, filename=name or None, revision=source.revision)
    except Exception as exc:  # urllib, huggingface_hub and httpx each raise their own
        which = "" if source.revision is None else f" of revision {source.revision}"
        raise WeightsError(
            f"{option}: the download{which} failed ({type(exc).__name__}); check the network, or give a checkpoint file"
        ) from exc
    if not path:
        raise WeightsError(f"{option}: open_clip found no file to download; give a checkpoint file")
    return Path(path)


def _configuration(tag: str) -> dict[str, Any]:
    """open_clip's configuration of a tag. Raises `WeightsError` for an unknown one."""
    with _quiet_root_logger():
        from open_clip.pretrained import get_pretrained_cfg
    config: dict[str, Any] = get_pretrained_cfg(ARCHITECTURE, tag)
    if not config:
        raise WeightsError(
            f"--weights {tag}: open_clip has no such tag for {ARCHITECTURE}; {choose_from(tag, pretrained_tags())}"
        )
    return config


def _tower_from_file(path: Path, option: str, quick_gelu: bool) -> torch.nn.Module:
    import torch

    state, is_archive = _read_state(path, option)
    # TorchScript archives are OpenAI's own releases, which use QuickGELU.
    with torch.device("meta"):
        tower = _build(quick_gelu=quick_gelu or is_archive)
    state = {key.removeprefix("module."): value for key, value in state.items()}
    visual = {key.removeprefix(PREFIX): value for key, value in state.items() if key.startswith(PREFIX)}
    state = visual or state
    expected = tower.state_dict()
    shapes = {key for key in expected.keys() & state.keys() if expected[key].shape != state[key].shape}
    missing, unexpected = expected.keys() - state.keys(), state.keys() - expected.keys()
    for problem, keys in (("lacks", missing), ("has the unknown", unexpected), ("has another shape for", shapes)):
        if keys:
            raise WeightsError(
                f"{option}: not the weights of a {ARCHITECTURE} image tower: it {problem} {len(keys)} tensors, "
                f"{min(keys)} among them"
            )
    tower.load_state_dict(state, strict=True, assign=True)
    return tower.float().eval().requires_grad_(False)


def _read_state(path: Path, option: str) -> tuple[dict[str, torch.Tensor], bool]:
    """The file's state dict on the CPU and whether it was a TorchScript archive. Executes no pickled code."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        if path.suffix == ".safetensors":
            return load_file(path), False
        try:
            loaded: object = torch.load(path, map_location="cpu", weights_only=True)
        except RuntimeError as exc:
            if "TorchScript" not in str(exc):
                raise
            return dict(torch.jit.load(path, map_location="cpu").state_dict()), True  # type: ignore[no-untyped-call]
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, OSError, ValueError, EOFError, KeyError) as exc:
        raise WeightsError(f"{option}: unreadable as a checkpoint ({type(exc).__name__})") from exc
    if isinstance(loaded, Mapping) and isinstance(loaded.get("state_dict"), Mapping):
        loaded = loaded["state_dict"]
    if not isinstance(loaded, Mapping) or not all(isinstance(value, torch.Tensor) for value in loaded.values()):
        raise WeightsError(f"{option}: the file has no state dict (names of parameters with their tensors)")
    return dict(loaded), False


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


SPECIFICATION = ModelSpecification(
    name="openclip_vit_b32",
    reference=f"open_clip:{ARCHITECTURE}",
    title="OpenCLIP ViT-B-32 image tower",
    version="1",
    inputs=(TensorSpec("pixel_values", "FP32", (-1, 3, DIMENSIONS["image_size"], DIMENSIONS["image_size"])),),
    outputs=(TensorSpec("embedding", "FP32", (-1, DIMENSIONS["output_dim"])),),
    kinds={"embedding": "embedding"},
    item="image",
    max_batch_size=32,
    flops_per_item=tower_flops(),
    image=Preprocessing(
        size=DIMENSIONS["image_size"],
        mean=(0.48145466, 0.4578275, 0.40821073),
        std=(0.26862954, 0.26130258, 0.27577711),
    ),
    load_module=load_image_tower,
    pretrained_tags=pretrained_tags,
    find_pretrained=find_pretrained,
    fused_tower=True,
    payload="fp32",
)


def names() -> tuple[str, ...]:
    """The well-known models of this source."""
    return (ARCHITECTURE,)


def specify(name: str) -> ModelSpecification | None:
    """The specification of an architecture; None if there is none of that name."""
    return SPECIFICATION if name == ARCHITECTURE else None
