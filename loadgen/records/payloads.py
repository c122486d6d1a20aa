"""The payloads of an image, and the name of the model variant that takes each."""

from __future__ import annotations

PAYLOADS = ("fp32", "uint8", "jpeg")
"""The payloads: a float tensor, a byte tensor, a JPEG file."""


def variant_name(model: str, payload: str) -> str:
    """The model's name on a server: `openclip_vit_b32` for fp32, `openclip_vit_b32_uint8`, `…_jpeg`. `model` may be
    any of them."""
    base = base_name(model)
    return base if payload == "fp32" else f"{base}_{payload}"


def base_name(model: str) -> str:
    """The FP32 model's name."""
    for payload in PAYLOADS[1:]:
        model = model.removesuffix(f"_{payload}")
    return model


def implied_payload(model: str) -> str:
    """The payload that a model's name implies; fp32 without a suffix."""
    return next((payload for payload in PAYLOADS[1:] if model.endswith(f"_{payload}")), "fp32")


BACKEND_ENDINGS = ("_onnx", "_tensorrt")
"""Suffixes of the models for Triton's own backends in our model repository."""


def without_backend(name: str) -> str:
    """The name of the model that a backend's variant of it computes."""
    return next((name.removesuffix(ending) for ending in BACKEND_ENDINGS if name.endswith(ending)), name)
