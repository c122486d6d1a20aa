"""Weights from files: found on a hub, read without executing anything, and loaded only if every tensor fits."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from servers.models.script_archive import is_script_archive, script_state
from servers.models.specification import Preprocessing
from servers.models.weights import CheckpointWeights, FindPretrained, PretrainedWeights, WeightsError, verify

if TYPE_CHECKING:
    import torch

State = Mapping[str, "torch.Tensor"]


def option_of(source: CheckpointWeights | PretrainedWeights) -> str:
    """How a message names the weights."""
    return f"--weights {source.tag if isinstance(source, PretrainedWeights) else source.path.name}"


def read_state(
    source: CheckpointWeights | PretrainedWeights, find: FindPretrained | None = None
) -> tuple[dict[str, torch.Tensor], bool]:
    """The state dict on the CPU and whether its file is a TorchScript archive. Executes nothing that is in the file.

    The file must be the pinned one; `find` finds that of a tag. A state dict under the key `state_dict` is taken from
    there; the prefix `module.` of DataParallel goes. Raises `WeightsError`.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    option = option_of(source)
    if isinstance(source, CheckpointWeights):
        path = source.path
    elif find is None:
        raise WeightsError(f"{option}: this model has no tags; give a checkpoint file, or random:SEED")
    else:
        path = find(source)
    verify(path, option, source.sha256)
    try:
        if path.suffix == ".safetensors":
            return load_file(path), False
        if is_script_archive(path):
            return script_state(path), True
        loaded: object = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, OSError, ValueError, EOFError, KeyError) as exc:
        raise WeightsError(f"{option}: unreadable as a checkpoint ({type(exc).__name__})") from exc
    if isinstance(loaded, Mapping) and isinstance(loaded.get("state_dict"), Mapping):
        loaded = loaded["state_dict"]
    if not isinstance(loaded, Mapping) or not all(isinstance(value, torch.Tensor) for value in loaded.values()):
        raise WeightsError(f"{option}: the file has no state dict (names of parameters with their tensors)")
    return {key.removeprefix("module."): value for key, value in loaded.items()}, False


def load_strictly(module: torch.nn.Module, state: State, option: str, title: str) -> torch.nn.Module:
    """`module` with exactly these tensors, in FP32 and eval mode, without gradients.

    A module on the meta device takes the tensors over instead of copying them. Raises `WeightsError` if names or shapes
    differ.
    """
    expected = module.state_dict()
    shapes = {key for key in expected.keys() & state.keys() if expected[key].shape != state[key].shape}
    refuse_misfits(option, title, expected.keys() - state.keys(), state.keys() - expected.keys(), shapes)
    module.load_state_dict(state, strict=True, assign=any(value.is_meta for value in expected.values()))
    return ready(module)


def refuse_misfits(option: str, title: str, missing: set[str], unexpected: set[str], shapes: set[str]) -> None:
    """Raises `WeightsError` if tensors are missing, unexpected or of another shape."""
    for problem, keys in (("lacks", missing), ("has the unknown", unexpected), ("has another shape for", shapes)):
        if keys:
            raise WeightsError(
                f"{option}: not the weights of {title}: it {problem} {len(keys)} tensors, {min(keys)} among them"
            )


def ready(module: torch.nn.Module) -> torch.nn.Module:
    """The module, ready to serve: FP32, eval mode, no gradients."""
    return module.float().eval().requires_grad_(False)


def fill_zero_weights(module: torch.nn.Module) -> torch.nn.Module:
    """Draw weights for layers that their library initialises with zeros, from torch's generator.

    With them a model would answer zeros, or leave out whole branches, and a wrong answer could not be told from a right
    one. Biases may stay zero.
    """
    import torch

    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("weight") and not parameter.is_meta and not parameter.any():
                parameter.normal_(std=0.02 if parameter.ndim > 1 else 0.1)
    return module


def hub_file(source: PretrainedWeights, repository: str, names: Sequence[str]) -> Path:
    """The first of the files that the hub's repository has, downloaded if it is missing. Raises `WeightsError`."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    def find() -> Path:
        for name in names:
            try:
                return Path(hf_hub_download(repository, name, revision=source.revision))
            except LocalEntryNotFoundError as exc:  # no network; another name may be in the cache
                missing = exc
            except EntryNotFoundError as exc:
                missing = exc  # type: ignore[assignment]
        raise missing

    return downloaded(source, find)


def downloaded(source: PretrainedWeights, find: Callable[[], Path]) -> Path:
    """The file that `find` returns. Whatever it raises becomes a `WeightsError`: each hub's client raises its own."""
    which = "" if source.revision is None else f" of revision {source.revision}"
    try:
        return find()
    except WeightsError:
        raise
    except Exception as exc:
        raise WeightsError(
            f"{option_of(source)}: the download{which} failed ({type(exc).__name__}); check the network, or give a "
            "checkpoint file"
        ) from exc


def refuse_other_preprocessing(
    source: PretrainedWeights, trained: Preprocessing | None, served: Preprocessing | None, reference: str
) -> None:
    """Raises `WeightsError` if a tag's weights were trained with other images than the model is served with."""
    if trained != served:
        raise WeightsError(
            f"{option_of(source)}: these weights were trained with another preprocessing; use --model "
            f"{reference}.{source.tag}"
        )
