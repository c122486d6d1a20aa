"""An INT8 file from an FP32 one: static quantisation in QDQ form, by ONNX Runtime's own tool.

Weights are INT8 with a scale per output channel, activations UINT8 with one range per tensor. The ranges are fixed by
calibration, so an answer does not depend on the other items of its batch. Dynamic quantisation, which measures each
batch, is not used for any model: OpenVINO executes its MatMulInteger in FP32, although the file says INT8.
Convolutions and products with constant weights are quantised; the products within an attention stay in FP32.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from servers.engines.onnxruntime import mark_precision, ort_reason
from servers.export.manifest import ExportError
from servers.export.parity import BATCHES
from servers.models.files import load_onnx
from servers.models.items import jpeg_paths, valid_items
from servers.models.samples import photographs
from servers.models.specification import ModelSpecification
from servers.protocol.tensors import Array

OPERATORS = ("Conv", "Gemm", "MatMul")
"""What is quantised, where the weights are constants."""

ITEMS = 32
"""Random items of a calibration."""
BATCH = 4
SEED = 1000
"""Far from those of the parity check, which gets other items."""


def quantise(specification: ModelSpecification, source: Path, path: Path) -> str:
    """Write `source`, the model's FP32 file with standard operators, to `path` in INT8. Returns how it was quantised,
    for a reader. Raises `ExportError` for a model without a convolution or product that can be
    quantised."""
    import onnx
    from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static

    model = load_onnx(source)
    chosen = _quantised_nodes(model.graph)
    if not chosen:
        raise ExportError(
            f"{specification.name} has no convolution and no product with constant weights, so nothing of it would run "
            "in INT8; use --precision fp32"
        )
    for node, name in chosen:
        node.name = name
    items, described = calibration(specification)
    counts = Counter(node.op_type for node, _ in chosen)
    try:
        with _quiet():
            quantize_static(
                model,
                str(path),
                SimpleNamespace(get_next=partial(next, iter(items), None)),
                quant_format=QuantFormat.QDQ,
                op_types_to_quantize=list(OPERATORS),
                nodes_to_quantize=[name for _, name in chosen],
                per_channel=True,
                activation_type=QuantType.QUInt8,
                weight_type=QuantType.QInt8,
                calibrate_method=CalibrationMethod.MinMax,
            )
    except Exception as exc:  # the tool has no errors of its own
        raise ExportError(
            f"ONNX Runtime cannot quantise {specification.name}: {ort_reason(exc)}; use --precision fp32"
        ) from exc
    quantised = onnx.load(path)
    mark_precision(quantised, "int8")
    onnx.save(quantised, path)
    listed = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    return f"static QDQ of {listed}: INT8 weights per channel, UINT8 activations, ranges (min-max) from {described}"


def calibration(specification: ModelSpecification) -> tuple[list[Mapping[str, Array]], str]:
    """The batches whose activations set the ranges, and what they are: none of them is in the parity check."""
    if specification.image is not None:
        ((name, pictures),) = photographs(specification, len(jpeg_paths())).items()
        sent = pictures[sum(BATCHES) :]
        return [{name: sent[start : start + BATCH]} for start in range(0, len(sent), BATCH)], f"{len(sent)} photographs"
    axis = specification.main_axis
    longest = 1 if axis is None else axis.default
    lengths = np.linspace(max(1, longest // BATCH), longest, BATCH).astype(int).tolist()
    if axis is not None and not axis.padded:
        lengths = [longest] * BATCH
    return [valid_items(specification, SEED + seed, lengths) for seed in range(ITEMS // BATCH)], f"{ITEMS} random items"


def _quantised_nodes(graph: Any) -> list[tuple[Any, str]]:
    """The nodes to quantise with their names, which must be unique for the tool."""
    constants = {tensor.name for tensor in graph.initializer} | {
        output for node in graph.node if node.op_type == "Constant" for output in node.output
    }
    return [
        (node, f"{node.op_type}_{place}")
        for place, node in enumerate(graph.node)
        if node.op_type in OPERATORS and len(node.input) > 1 and node.input[1] in constants
    ]


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the tool's advice about its own preprocessing, which it sends to the root logger."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
