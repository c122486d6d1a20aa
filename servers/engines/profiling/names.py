"""Names of CUDA kernels and of CPU operators: their category of work, and a short label.

A kernel counts by its main work: a product with GELU in its epilogue is a product. Convolutions are products too, and a
separate softmax is attention, where the served models have most of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

PRODUCTS = "matrix products"
ATTENTION = "attention"
NORMALISATION = "normalisation"
ELEMENTWISE = "elementwise and activation"
MOVEMENT = "data movement"
OTHER = "other"
CATEGORIES = (PRODUCTS, ATTENTION, NORMALISATION, ELEMENTWISE, MOVEMENT, OTHER)

OWN_KERNELS = {
    "product_kernel": PRODUCTS,
    "attention_kernel": ATTENTION,
    "class_attention_kernel": ATTENTION,
    "row_kernel": NORMALISATION,
    "first_tokens_kernel": NORMALISATION,
    "patches_kernel": MOVEMENT,
}
"""The Triton kernels of `servers.engines.vit`."""

_NORM = r"layer_?norm|rms_?norm|batch_?norm|group_?norm|instance_?norm|normalization"

# The first pattern that matches the lower-case name counts.
_COMPILED = (  # torch.compile's Triton kernels: triton_{kind}_fused_{every operator that went into it}_{number}
    (r"_tem_.*attention", ATTENTION),
    (r"_tem_", PRODUCTS),
    (_NORM, NORMALISATION),
    (r"_(per|red)_.*(softmax|attention)", ATTENTION),
    (r"gelu|relu|sigmoid|tanh|erf|mul|div|add(?!mm)|sub", ELEMENTWISE),
    (r"clone|cat|permute|transpose|slice|select|unbind|constant_pad|convolution|attention", MOVEMENT),
    (r"_poi_", ELEMENTWISE),
)
_KERNELS = (
    (_NORM, NORMALISATION),
    (r"transpose_?(qkv|ctx)|biastranspose", MOVEMENT),  # ONNX Runtime's layouts for attention
    (r"fmha|(?<![a-z])mha|flash|attention|sdpa|softmax", ATTENTION),
    (r"gemm|gemv|gemmk1|splitk|cublas|cutlass|nvjet|xmma|matmul|conv2d|convolve|fprop|winograd|dot_kernel", PRODUCTS),
    (r"copy_kernel|copybroadcast|fillfunctor", MOVEMENT),  # before the elementwise kernel that carries them
    (
        r"element_?wise|pointwise|gelu|relu|silu|sigmoid|tanh|(?<!broad)cast|add_?bias|bias_?add|transform_bias",
        ELEMENTWISE,
    ),
    (r"memcpy|memset|transpose|permute|copy|concat|catarray|slice|split|pad_?kernel|gather|scatter|expand", MOVEMENT),
    (r"_fill|fill_?kernel|reshape|im2col|unfold|nchw|nhwc|index_?select|tensortransform", MOVEMENT),
)
_OPERATORS = (  # torch's (aten::addmm) and ONNX Runtime's (MatMul)
    (_NORM, NORMALISATION),
    (r"attention|softmax", ATTENTION),
    (r"matmul|gemm|conv(?!ert)|addmm|baddbmm|::b?mm$|::linear$|einsum", PRODUCTS),
    (r"copy|clone|contiguous|transpose|permute|view|reshape|reorder|resize|expand|as_strided|::t$|::to$", MOVEMENT),
    (r"cat$|concat|slice|split|select|squeeze|gather|scatter|chunk|narrow|unbind|flatten|pad$|tile|shape", MOVEMENT),
    (r"empty|zeros|fill|constant|identity|detach|resolve_|range", MOVEMENT),
    (r"gelu|relu|sigmoid|tanh|erf|add|sub|mul|div|sqrt|pow|cast|clamp|where|equal|exp|neg|transform_bias", ELEMENTWISE),
)


def kernel_category(name: str) -> str:
    """The category of a CUDA kernel, copy or fill, by CUPTI's full name."""
    return OWN_KERNELS.get(name) or _first(_COMPILED if name.startswith("triton_") else _KERNELS, name)


def operator_category(name: str) -> str:
    """The category of an operator of torch or ONNX Runtime on a CPU."""
    return _first(_OPERATORS, name)


def _first(rules: tuple[tuple[str, str], ...], name: str) -> str:
    lower = name.lower()
    return next((category for pattern, category in rules if re.search(pattern, lower)), OTHER)


_WRAPPERS = {"Kernel", "Kernel2", "device_kernel", "kernel"}
"""Kernels named by their template argument, as in CUTLASS."""

_PLAIN_TYPES = re.compile(
    r"(const |unsigned |signed )*(void|bool|true|false|char|short|int|long|float|double|half|half2|__half|__half2"
    r"|__nv_bfloat16|nv_bfloat16|Half|BFloat16|half_t|bfloat16_t|u?int\d+_t|MLFloat16)( const| long| int|[*&])*"
)


def kernel_label(name: str) -> str:
    """A C++ kernel without namespaces, parameters and most template arguments.

    An argument that identifies the function stays: `vectorized_elementwise_kernel<GeluCUDAKernelImpl>`.
    """
    bare = name.removeprefix("void ").replace("(anonymous namespace)::", "").replace("<unnamed>::", "")
    if bare.startswith(("Memcpy", "Memset")):
        return bare
    signature = next(_parts(bare, "("), bare)
    head = next(_parts(signature, "<"), signature)
    base = head.rpartition("::")[2].strip()
    if len(head) == len(signature):
        return base
    telling = next(filter(None, map(_telling, _arguments(signature, head))), None)
    if telling is None:
        return base
    return telling if base in _WRAPPERS else f"{base}<{next(_parts(telling, '<'))}>"


def _arguments(signature: str, head: str) -> Iterator[str]:
    return _parts(signature[len(head) + 1 : signature.rfind(">")], ",")


def _telling(argument: str) -> str | None:
    """The label of a template argument; None for numbers, plain types and containers of them."""
    signature = next(_parts(argument.strip(), "("), "")
    head = next(_parts(signature, "<"), "").strip()
    last = head.rpartition("::")[2]
    if not re.fullmatch(r"[A-Za-z_]\w*", last) or _PLAIN_TYPES.fullmatch(last) or head.startswith("std::"):
        return None
    if last.startswith("gpu_kernel_impl"):  # torch's launcher of elementwise kernels: its argument is the function
        return next(filter(None, map(_telling, _arguments(signature, head))), last)
    return kernel_label(signature)


def _parts(text: str, separator: str) -> Iterator[str]:
    """The pieces of `text` between separators outside all brackets."""
    depth = start = 0
    for index, character in enumerate(text):
        if character == separator and depth == 0:
            yield text[start:index]
            start = index + 1
        if character in "<({[":
            depth += 1
        elif character in ">)}]" and text[index - 1 : index + 1] != "->":
            depth -= 1
    yield text[start:]
