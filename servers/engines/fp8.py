"""FP8 by torchao: linear layers multiply FP8 weights with inputs that are converted as they come, a scale per row.

A scale per row makes an answer independent of the other items of its batch. Everything else stays in BF16. The products
exist on GPUs of compute capability 8.9 (Ada) and newer, for sizes that are multiples of 16; other layers stay in BF16.
"""

from __future__ import annotations

import torch
from torch import nn

from servers.engines.interface import EngineError, first_line

MIN_CAPABILITY = (8, 9)
MULTIPLE = 16
INSTALL = "pip install 'abserve[fp8]'"


def to_fp8(module: nn.Module, device: torch.device, *, title: str) -> tuple[int, str]:
    """Convert the linear layers of `module`, which is in BF16 on `device`, in place.

    Returns how many are in FP8, and the description for `kernels`; `title` names the module. Raises `EngineError` where
    the device, the packages or the model have no FP8 products.
    """
    check_capability(torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device))
    try:
        import torchao
        from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, quantize_
    except ImportError as exc:
        raise EngineError(f"precision fp8 needs torchao, and {first_line(exc)}; run: {INSTALL}") from exc
    linear = [one for one in module.modules() if isinstance(one, nn.Linear)]
    if not any(map(fits, linear)):
        raise EngineError(
            f"none of the {len(linear)} linear layers has sizes that are multiples of {MULTIPLE}, which FP8 products "
            "need; use precision bf16"
        )
    # torchao would also change how torch multiplies FP32 and how torch.compile tunes, for the whole process.
    configuration = Float8DynamicActivationFloat8WeightConfig(granularity=PerRow(), set_inductor_config=False)
    quantize_(module, configuration, filter_fn=lambda one, _name: isinstance(one, nn.Linear) and fits(one))
    converted = sum(type(one.weight) is not nn.Parameter for one in linear)  # torchao's weights have their own type
    if not converted:
        raise EngineError(f"torchao {torchao.__version__} left every linear layer in BF16; use precision bf16")
    return converted, f"{title}, {converted} of {len(linear)} linear layers in FP8 by torchao {torchao.__version__}"


def check_capability(found: tuple[int, int], name: str) -> None:
    """Raise `EngineError` for a GPU without FP8 products."""
    if found < MIN_CAPABILITY:
        raise EngineError(
            f"precision fp8 needs a GPU of compute capability 8.9 or newer, and {name} has {found[0]}.{found[1]}; use "
            "precision bf16"
        )


def fits(layer: nn.Linear) -> bool:
    """Whether FP8 products exist for the layer; torchao has none for the last product of nn.MultiheadAttention."""
    of_attention = isinstance(layer, nn.modules.linear.NonDynamicallyQuantizableLinear)
    return not of_attention and layer.in_features % MULTIPLE == 0 and layer.out_features % MULTIPLE == 0
