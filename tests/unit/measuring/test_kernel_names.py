"""Kernel names in the forms that CUPTI gives, those of published profiles among them, and names of operators."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from servers.measuring.profile import OWN_KERNELS, kernel_category, kernel_label, operator_category

ROOT = Path(__file__).resolve().parents[3]
VIT = ROOT / "servers" / "engines" / "torch"
PROFILES = sorted((ROOT / "docs/results").glob("*/engines/*-fp16-uint8.json"))
PRODUCTS, ATTENTION, NORMALISATION = "matrix products", "attention", "normalisation"
ELEMENTWISE, MOVEMENT = "elementwise and activation", "data movement"

CUTLASS = "cutlass_80_tensorop_f16_s16816gemm_relu_f16_64x64_64x6_tn_align8"
GELU = "at::native::GeluCUDAKernelImpl(at::TensorIteratorBase&, at::native::GeluType)"
LAMBDA = "::{lambda()#2}::operator()() const::{lambda()#4}::operator()() const::{lambda(c10::Half)#1}"
COPY = f"at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&){LAMBDA}"
FLASH = "Flash_fwd_kernel_traits<64, 128, 128, 4, false, false, cutlass::half_t>"
ORT = "onnxruntime::cuda::"
SEEN = [
    ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNN", PRODUCTS, None),
    ("nvjet_sm90_hsh_64x8_64x16_2x4_h_bz_TNT", PRODUCTS, None),
    (
        "sm90_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize128x128x64_warpgroupsize2x1x1_execute_segment_k_off_kernel__5x_cublas",
        PRODUCTS,
        None,
    ),
    (f"void cutlass::Kernel2<{CUTLASS}>({CUTLASS}::Params)", PRODUCTS, CUTLASS),
    (
        "void splitKreduce_kernel<32, 16, int, __half, __half, true>(cublasSplitKParams<__half>)",
        PRODUCTS,
        "splitKreduce_kernel",
    ),
    ("sm80_xmma_fprop_implicit_gemm_f16f16_f16f16_f16_nhwckrsc_nhwc_tilesize128x128x64_cudnn", PRODUCTS, None),
    (
        "fmha_cutlassF_f16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::half_t>::Params)",
        ATTENTION,
        "fmha_cutlassF_f16_aligned_64x64_rf_sm80",
    ),
    (
        f"void pytorch_flash::flash_fwd_kernel<pytorch_flash::{FLASH}, false>(pytorch_flash::Flash_fwd_params)",
        ATTENTION,
        "flash_fwd_kernel<Flash_fwd_kernel_traits>",
    ),
    (
        f"void onnxruntime::flash::flash_fwd_kernel<onnxruntime::flash::{FLASH}>(int)",
        ATTENTION,
        "flash_fwd_kernel<Flash_fwd_kernel_traits>",
    ),
    (
        "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<int> > >(int)",
        ATTENTION,
        "enable_sm90<FlashAttnFwdSm90>",
    ),
    ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64", ATTENTION, None),
    (
        "void (anonymous namespace)::softmax_warp_forward<c10::Half, c10::Half, float, 6, false>(c10::Half*, int)",
        ATTENTION,
        "softmax_warp_forward",
    ),
    (
        "void onnxruntime::contrib::cuda::SkipLayerNormKernelSmall<half, 192u, 4, false>(half*, half*)",
        NORMALISATION,
        "SkipLayerNormKernelSmall",
    ),
    (f"void {ORT}cuApplyLayerNorm<half, float, half, false>(half*, float*)", NORMALISATION, "cuApplyLayerNorm"),
    (
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::Half, float, false>(int)",
        NORMALISATION,
        "vectorized_layer_norm_kernel",
    ),
    (
        f"void {ORT}_UnaryElementWise<half, half, {ORT}OP_Gelu<half>, 256, 4>(half const*, int)",
        ELEMENTWISE,
        "_UnaryElementWise<OP_Gelu>",
    ),
    (
        f"void {ORT}_UnaryElementWise<half, float, {ORT}OP_Cast<half, float>, 256, 4>(half const*)",
        ELEMENTWISE,
        "_UnaryElementWise<OP_Cast>",
    ),
    (
        f"void {ORT}_BinaryElementWiseSimple<true, false, half, half, half, {ORT}OP_Add<half, half, half>, 4>(int)",
        ELEMENTWISE,
        "_BinaryElementWiseSimple<OP_Add>",
    ),
    (
        f"void at::native::vectorized_elementwise_kernel<4, {GELU}{LAMBDA}, std::array<char*, 2ul> >(int, {GELU})",
        ELEMENTWISE,
        "vectorized_elementwise_kernel<GeluCUDAKernelImpl>",
    ),
    (
        "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<"
        "at::native::CUDAFunctor_add<float> >(at::TensorIteratorBase&)::{lambda(int)#1}>(int)",
        ELEMENTWISE,
        "elementwise_kernel<CUDAFunctor_add>",
    ),
    (
        f"void at::native::unrolled_elementwise_kernel<{COPY}, 4, at::native::memory::LoadWithCast<1> >(int)",
        MOVEMENT,
        "unrolled_elementwise_kernel<direct_copy_kernel_cuda>",
    ),
    (
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy_aligned16_contig<unsigned int, 3, 128, 1>(int)",
        MOVEMENT,
        "CatArrayBatchedCopy_aligned16_contig",
    ),
    (
        f"void {ORT}Transpose4DKernelParallelizeOneElementPerThread<2>({ORT}TArray<long, 8>)",
        MOVEMENT,
        "Transpose4DKernelParallelizeOneElementPerThread",
    ),
    ("void onnxruntime::contrib::cuda::AddBiasTransposeQKV<half>(int, half const*)", MOVEMENT, "AddBiasTransposeQKV"),
    (f"void {ORT}_ConcatKernelSameConcatDim<long>(int)", MOVEMENT, "_ConcatKernelSameConcatDim"),
    (f"void {ORT}_SliceKernel<4, long>(int)", MOVEMENT, "_SliceKernel"),
    ("Memcpy HtoD (Pinned -> Device)", MOVEMENT, None),
    ("Memset (Device)", MOVEMENT, None),
    ("triton_per_fused__to_copy_add_native_layer_norm_view_3", NORMALISATION, None),
    ("triton_poi_fused_addmm_gelu_view_5", ELEMENTWISE, None),
    ("triton_poi_fused_cat_1", MOVEMENT, None),
    ("triton_tem_fused_addmm_gelu_7", PRODUCTS, None),
    ("product_kernel", PRODUCTS, None),
    ("attention_kernel", ATTENTION, None),
    ("class_attention_kernel", ATTENTION, None),
    ("row_kernel", NORMALISATION, None),
    ("first_tokens_kernel", NORMALISATION, None),
    ("patches_kernel", MOVEMENT, None),
    ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float> >(int)", "other", "reduce_kernel<ReduceOp>"),
]


@pytest.mark.parametrize(("name", "category", "label"), SEEN, ids=[label or name for name, _, label in SEEN])
def test_a_kernel_has_a_category_and_a_readable_name(name: str, category: str, label: str | None) -> None:
    assert kernel_category(name) == category
    assert kernel_label(name) == (label or name)


def test_every_kernel_of_ours_is_known() -> None:
    launched = {
        node.name
        for path in VIT.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
        and node.name.endswith("_kernel")
        and any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    }
    assert launched == set(OWN_KERNELS)


@pytest.mark.parametrize(
    ("category", "operators"),
    [
        (PRODUCTS, "aten::addmm aten::mm aten::bmm aten::linear aten::mkldnn_convolution MatMul FusedMatMul Gemm Conv"),
        (ATTENTION, "aten::_scaled_dot_product_flash_attention_for_cpu aten::_softmax MultiHeadAttention Softmax"),
        (NORMALISATION, "aten::native_layer_norm aten::layer_norm LayerNormalization SkipLayerNormalization"),
        (ELEMENTWISE, "aten::gelu aten::add_ aten::mul Gelu BiasGelu QuickGelu Add Mul Div Erf Cast"),
        (
            MOVEMENT,
            "aten::copy_ aten::cat aten::transpose aten::t aten::view Transpose Reshape Concat Slice Split Shape",
        ),
        ("other", "aten::mean ReduceMean"),
    ],
)
def test_operators_have_the_same_categories(category: str, operators: str) -> None:
    assert {name: operator_category(name) for name in operators.split()} == dict.fromkeys(operators.split(), category)


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_the_kernels_of_a_published_profile_are_still_what_it_says(path: Path) -> None:
    kernels = {
        kernel["name"]: kernel["category"]
        for batch in json.loads(path.read_text())["profile"]
        for kernel in batch["kernels"]
    }
    assert {name: kernel_category(name) for name in kernels} == kernels
    assert {PRODUCTS, ATTENTION, NORMALISATION, MOVEMENT} <= set(kernels.values())
