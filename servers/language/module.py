"""A language model's torch module, of transformers' own class, with its weights on a device; and folders for servers
that load one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from servers.language.specification import LanguageModel
from servers.language.weights import draw_tensor, weights_sha256
from servers.models.files import atomic_folder, exclusive, remove_abandoned
from servers.models.modules import quiet_transformers, refuse_misfits
from servers.models.specification import UnknownModelError
from servers.models.weights import RandomWeights, WeightsError

if TYPE_CHECKING:
    import torch

ABOUT = "abserve.json"
"""In a folder that was written: the model, the digest of its weights and the precision."""
TOKENIZER = "tokenizer"
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def build_module(model: LanguageModel, device: str | torch.device = "cpu", precision: str = "fp32") -> Any:
    """The module of transformers in eval mode on the device, its parameters in `precision`: fp32, bf16 or fp16. Its
    attention is torch's scaled dot-product attention, or transformers' own code for a class without it. Raises
    `WeightsError` and `UnknownModelError`."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    dtype = getattr(torch, DTYPES[precision])
    attention = "sdpa" if getattr(_class_of(model), "_supports_sdpa", False) else "eager"
    if isinstance(model.weights, RandomWeights):
        module = _empty(model, dtype, attention)
        draw_part(module, "", model, device, dtype)
        module.tie_weights()
        return module.to(device).eval().requires_grad_(False)
    weights_sha256(model.weights, model.fields)
    path = model.weights.path
    try:
        with quiet_transformers():
            module, report = _class_of(model).from_pretrained(
                None if path.is_file() else str(path),
                config=model.config,
                dtype=dtype,
                attn_implementation=attention,
                output_loading_info=True,
                **(
                    {"state_dict": load_file(path)}
                    if path.is_file()
                    else {"use_safetensors": True, "local_files_only": True}
                ),
            )
    except (OSError, ValueError, RuntimeError, SafetensorError) as exc:
        raise WeightsError(f"--weights {path.name}: transformers cannot load them into {model.title}: {exc}") from exc
    refuse_misfits(
        f"--weights {path.name}", model.title, set(report["missing_keys"]), set(), set(report["mismatched_keys"])
    )
    return module.to(device).eval().requires_grad_(False)


def empty_module(model: LanguageModel) -> Any:
    """The module with parameters on the meta device, to count what it has."""
    import torch

    return _empty(model, torch.float32, "eager")


def count_parameters(model: LanguageModel) -> int:
    """How many numbers the weights are; tied ones count once."""
    if model.known_parameters is not None:
        return model.known_parameters
    return sum(parameter.numel() for parameter in empty_module(model).parameters())


def describe_language_model(model: LanguageModel) -> dict[str, Any]:
    """What `abserve models` and a load box say of a model. Reads the files of its weights for their digest; imports
    transformers only for a model of the user."""
    return {
        "reference": model.label,
        "name": model.name,
        "title": model.title,
        "architecture": model.architecture,
        "parameters": count_parameters(model),
        "vocabulary": model.vocabulary,
        "eos": model.eos,
        "max_length": model.max_length,
        "prompt_ids": model.prompt_ids,
        "weights": model.weights.label,
        "weights_sha256": weights_sha256(model.weights, model.fields),
    }


def write_folder(model: LanguageModel, folder: Path, precision: str, device: str = "cpu") -> None:
    """Write config.json, the safetensors files and, in a folder in it, the tokenizer t0 … tN, as vLLM loads them. The
    folder must exist; write into `servers.models.files.atomic_folder`. Takes the memory of the weights once."""
    from servers.language.tokenizer import write_tokenizer

    module = build_module(model, device, precision)
    with quiet_transformers():
        module.save_pretrained(folder, safe_serialization=True, max_shard_size="4GB")
    about = {
        "reference": model.label,
        "weights": model.weights.label,
        "weights_sha256": weights_sha256(model.weights, model.fields),
        "precision": precision,
    }
    (folder / ABOUT).write_text(json.dumps(about, indent=2) + "\n")
    # Beside the configuration, transformers would take the tokenizer of the model's type, whatever is named here.
    (folder / TOKENIZER).mkdir()
    write_tokenizer(folder / TOKENIZER, model.vocabulary, model.max_length)


def served_folder(
    model: LanguageModel, precision: str, device: str, artefacts: Path, announce: Callable[[str], None]
) -> Path:
    """A folder from which other servers load the model: the user's own if it has the weights and a tokenizer, else one
    below `artefacts`, which is written once for these weights in this precision. Raises `FolderError`."""
    own = model.folder
    if own is not None and getattr(model.weights, "path", None) == own and (own / "tokenizer.json").is_file():
        return own
    digest = weights_sha256(model.weights, model.fields)
    folder = artefacts.absolute() / "language" / f"{model.name}-{precision}-{digest[:16]}"
    with exclusive(folder):
        if (folder / ABOUT).is_file():
            return folder
        remove_abandoned(folder)
        announce(f"writing {model.title} to {folder}")
        bytes_each = 4 if precision == "fp32" else 2
        with atomic_folder(folder, count_parameters(model) * bytes_each) as fresh:
            write_folder(model, fresh, precision, device)
    return folder


def _class_of(model: LanguageModel) -> Any:
    import transformers

    found = getattr(transformers, model.architecture, None)
    if found is None:
        raise UnknownModelError(f"{model.title}: this release of transformers has no {model.architecture}")
    return found


def _empty(model: LanguageModel, dtype: torch.dtype, attention: str) -> Any:
    """The module with parameters without memory and with buffers that have their values."""
    with _parameters_without_memory(), quiet_transformers():
        return _class_of(model)._from_config(model.config, dtype=dtype, attn_implementation=attention)


@contextmanager
def _parameters_without_memory() -> Iterator[None]:
    """Modules made in the block have their parameters on the meta device, so that nothing is drawn in vain. On torch's
    own meta device the buffers, such as the frequencies of rotary positions, would lose their values."""
    import torch

    module_class: Any = torch.nn.Module
    register = module_class.register_parameter

    def register_without_memory(self: Any, name: str, parameter: Any) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = torch.nn.Parameter(parameter.to("meta"), requires_grad=False)
        register(self, name, parameter)

    module_class.register_parameter = register_without_memory
    try:
        yield
    finally:
        module_class.register_parameter = register


def draw_part(part: Any, name: str, model: LanguageModel, device: str | torch.device, dtype: torch.dtype) -> None:
    """Draw the random parameters without memory of one part of a module, which has this name in it."""
    import torch

    assert isinstance(model.weights, RandomWeights)
    with torch.no_grad():
        for below, parameter in list(part.named_parameters()):
            if not parameter.is_meta:
                continue
            parent, _, leaf = below.rpartition(".")
            full = f"{name}.{below}" if name else below
            drawn = draw_tensor(full, tuple(parameter.shape), model.hidden_size, model.weights.seed, device)
            setattr(part.get_submodule(parent), leaf, torch.nn.Parameter(drawn.to(dtype), requires_grad=False))
