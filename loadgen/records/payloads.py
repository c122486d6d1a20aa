"""How the inputs of a model travel, and the names of models on servers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal, get_args

from loadgen.records.targets import Kind

ImagePayload = Literal["fp32", "uint8", "jpeg"]
IMAGE_PAYLOADS: tuple[ImagePayload, ...] = get_args(ImagePayload)
"""The payloads of an image: the model's own float tensor, a byte tensor, a JPEG file."""
Payload = Literal["tensors", "fp32", "uint8", "jpeg"]
PAYLOADS: tuple[Payload, ...] = get_args(Payload)
"""All payloads; of a model that takes no images only its own tensors."""
TOKENS = "tokens"
"""What a language model's requests carry: token ids, or words for a server that takes text only."""
OWN_TENSORS = ("tensors", "fp32", TOKENS)
"""The payloads that send a model's own tensors, or its tokens."""
LANGUAGE = "language:"
"""How references to language models begin."""

DEFAULT_MODEL, DEFAULT_NAME = "open_clip:ViT-B-32", "openclip_vit_b32"
"""The default model, and the name under which it is served."""
_PAYLOADS_OF = {"language": TOKENS, "open_clip": "fp32", "torchvision": "fp32", "timm": "fp32"}
"""The default payload by a reference's source; of others a model's own tensors."""


def variant_name(model: str, payload: str) -> str:
    """The default model's name on a server: `openclip_vit_b32` for fp32, `openclip_vit_b32_uint8`, `…_jpeg`. `model`
    may be any of them."""
    base = base_name(model)
    return base if payload in OWN_TENSORS else f"{base}_{payload}"


def base_name(model: str) -> str:
    """The FP32 model's name."""
    for payload in IMAGE_PAYLOADS[1:]:
        model = model.removesuffix(f"_{payload}")
    return model


def is_default(model: str) -> bool:
    """Whether a reference or a name on a server is that of the default model or of its variants."""
    return model == DEFAULT_MODEL or base_name(model) == DEFAULT_NAME


def reference(model: str, inputs: str | None = None) -> str:
    """The model as `abserve` takes it with the payload beside it. A module of the user's may be described by the arrays
    of `inputs`, FILE.npz, if its own file has no sample."""
    if is_default(model):
        return base_name(model)
    if inputs is not None and inputs.endswith(".npz") and re.search(r"\.py:\w+$", model):
        return f"{model}:{Path(inputs).absolute()}"
    return model


def is_language(model: str) -> bool:
    """Whether a reference is that of a language model, which streams tokens."""
    return model.startswith(LANGUAGE)


def kind_of_model(model: str) -> Kind:
    """What the model of a reference gives."""
    return Kind.TOKENS if is_language(model) else Kind.TENSORS


def served_as(model: str) -> str:
    """The name under which abserve serves a model, given by reference or already by that name. A language model is
    served without its source: demo for language:demo, and by the folder's name for language:/path/to/folder."""
    if is_language(model):
        model = model.removeprefix(LANGUAGE).rstrip("/").rpartition("/")[2]
    return DEFAULT_NAME if is_default(model) else re.sub(r"[^a-z0-9]+", "_", model.lower()).strip("_")


def is_reference(model: str) -> bool:
    """Whether `--model` is a reference, SOURCE:NAME or a path, and not a name on a server."""
    return ":" in model or "/" in model or model.endswith((".py", ".onnx"))


def served_name(model: str, payload: str) -> str | None:
    """The model's name on a server that abserve does not start; None for a reference, which does not tell it, unless
    it is that of a language model."""
    if is_language(model):
        return served_as(model)
    if is_default(model):
        return variant_name(DEFAULT_NAME if model == DEFAULT_MODEL else model, payload)
    return None if is_reference(model) else model


def implied_payload(model: str) -> str:
    """The default payload: for a model of images fp32 or the one in its name, for a language model its tokens, for any
    other model its tensors."""
    if is_default(model):
        return next((payload for payload in IMAGE_PAYLOADS[1:] if model.endswith(f"_{payload}")), "fp32")
    source, colon, _ = model.partition(":")
    return _PAYLOADS_OF.get(source, "tensors") if colon else "tensors"


GUESSED = ", 0 or 1 for "
"""Behind the kind of generated inputs: of the integers that follow nobody says what the model takes."""


def takes_images(model: str) -> bool:
    """Whether a model's name says that it takes images, so that a matrix has all their payloads."""
    return implied_payload(model) not in ("tensors", TOKENS)


def inputs_in_brief(about: Mapping[str, str | int], swept: Iterable[int] = ()) -> str:
    """What is sent, from the stored description: "token ids of length 32, 128". `swept` are the lengths of a sweep.
    Empty if nothing was recorded."""
    kind = str(about.get("kind", ""))
    if "token_lengths" in about:
        lengths, trace = about["token_lengths"], about.get("trace")
        sizes = [f"{lengths} tokens"] if lengths else []
        return f"{kind} of {' and '.join([*sizes, *([f'the trace {trace}'] if trace else [])])}"
    kind = {"synthetic": "random values", "given": "your own inputs"}.get(kind, kind)
    lengths = ", ".join(map(str, sorted(set(swept))))
    if not lengths and "length_max" in about:
        low, middle, high = (about[f"length_{name}"] for name in ("min", "median", "max"))
        if low != high:
            return f"{kind} of length {low} to {high} (median {middle})"
        lengths = str(high)
    return f"{kind} of length {lengths}" if lengths else kind


def inputs_in_words(about: Mapping[str, str | int]) -> str:
    """The stored description of the inputs in one line: what they are, how many, of which lengths, where from."""
    parts = [f"{about.get('count', '?')} {about.get('item', 'item')}s: {inputs_in_brief(about) or 'unknown'}"]
    if "token_lengths" in about:
        parts = [f"{inputs_in_brief(about)}, new ones for every request, token ids {about['token_ids']}"]
    parts += [f"seed {about['seed']}"] if "seed" in about else []
    parts += [f"from {about['source']}"] if "source" in about else []
    return ", ".join(parts)


BACKEND_ENDINGS: Mapping[str, str] = {"onnxruntime": "_onnx", "tensorrt": "_tensorrt"}
"""Triton's own backends, each with the suffix of its models in our model repository."""


def without_backend(name: str) -> str:
    """The name of the model that a backend's variant of it computes."""
    return next((name.removesuffix(ending) for ending in BACKEND_ENDINGS.values() if name.endswith(ending)), name)
