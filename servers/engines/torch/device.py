"""A CUDA device through torch: which it is, and the precision of products."""

from __future__ import annotations

import warnings

import torch

from servers.engines.interface import EngineError
from servers.engines.processors import cuda_index
from servers.gpu.cuda_library import device_uuid


def resolve_device(requested: str) -> torch.device:
    """The device for `auto`, `cpu` or `cuda:N`. Raises `EngineError` where it does not exist."""
    if requested == "cpu":
        return torch.device("cpu")
    if requested == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    index = cuda_index(requested)
    assert index is not None  # see EngineSettings.check
    if not torch.cuda.is_available():
        raise EngineError(f"device {requested}: torch {torch.__version__} finds no CUDA device; use device cpu")
    if index >= torch.cuda.device_count():
        raise EngineError(f"device {requested}: torch finds {torch.cuda.device_count()} CUDA device(s)")
    return torch.device("cuda", index)


def set_fp32_products(*, tf32: bool) -> None:
    """Use TF32 in every product and convolution of this process, or in none: torch's default lets cuDNN use it."""
    precision = "tf32" if tf32 else "ieee"
    # torch keeps its older switches beside the newer ones, and torch.export raises where they differ.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.backends.cuda.matmul.allow_tf32 = tf32
        torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cuda.matmul.fp32_precision = precision
    torch.backends.cudnn.conv.fp32_precision = precision  # type: ignore[attr-defined,unused-ignore]
    torch.backends.cudnn.rnn.fp32_precision = precision  # type: ignore[attr-defined,unused-ignore]


def fp32_products() -> dict[str, str]:
    """The precision of FP32 products and convolutions, read back from torch."""
    return {
        "matmul": torch.backends.cuda.matmul.fp32_precision,
        "convolution": torch.backends.cudnn.conv.fp32_precision,  # type: ignore[attr-defined,unused-ignore]
    }


def device_details(device: torch.device) -> dict[str, object]:
    """The details of the card in the description of an engine."""
    details: dict[str, object] = {"cuda_build": torch.version.cuda, "cuda_available": torch.cuda.is_available()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        details |= {
            "device_name": properties.name,
            # torch's UUID has no prefix, which distinguishes a MIG instance from its GPU.
            "device_uuid": device_uuid(device.index or 0) or str(properties.uuid),
            "compute_capability": f"{properties.major}.{properties.minor}",
            "memory_allocated_bytes": torch.cuda.memory_allocated(device),
        }
    return details
