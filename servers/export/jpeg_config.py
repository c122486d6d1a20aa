"""JPEG for Triton's native backends: a python model that decodes, and an ensemble that joins it to one that executes.

<model>_preprocess      python backend: image BYTES → pixel_values UINT8, the code of the native server
<model>_jpeg_onnx       ensemble of that and <model>_uint8_onnx; <model>_jpeg_tensorrt likewise
"""

from __future__ import annotations

from servers.export.model_config import HEADER, quote, signature_text, tensor_text
from servers.models.preprocessing import MAX_PIXELS
from servers.models.specification import ModelSpecification

MODEL_PY = """# What decodes is servers.triton.preprocess_model, so this package must be installed beside Triton.
from servers.triton.preprocess_model import TritonPythonModel as TritonPythonModel
"""


def preprocess_name(specification: ModelSpecification) -> str:
    """Of the model that decodes for all ensembles."""
    return f"{specification.base}_preprocess"


def preprocess_config(specification: ModelSpecification) -> str:
    """`specification` is the JPEG variant. A bad image is an INVALID_ARG of this step, so the ensemble answers 400."""
    return f"""{HEADER}name: {quote(preprocess_name(specification))}
backend: "python"
max_batch_size: {specification.max_batch_size}
input [ {", ".join(map(tensor_text, specification.inputs))} ]
output [ {", ".join(map(tensor_text, specification.executed.inputs))} ]
# Decoding is the CPU's work, on the threads of one process.
instance_group [ {{ kind: KIND_CPU count: 1 }} ]
# What waits already is decoded together; nothing waits for company here, only in the next step.
dynamic_batching {{ max_queue_delay_microseconds: 0 }}
parameters {{ key: "model" value: {{ string_value: {quote(specification.name)} }} }}
# 0: one thread a core, at most four.
parameters {{ key: "decode_threads" value: {{ string_value: "0" }} }}
parameters {{ key: "max_image_pixels" value: {{ string_value: "{MAX_PIXELS}" }} }}
"""


def ensemble_config(specification: ModelSpecification, name: str, executing: str) -> str:
    """The ensemble `name`: the step that decodes, then the model `executing`, which takes the UINT8 pixels."""
    (image,), (pixels,), (output,) = specification.inputs, specification.executed.inputs, specification.outputs
    return f"""{HEADER}name: {quote(name)}
platform: "ensemble"
{signature_text(specification, specification.max_batch_size)}
ensemble_scheduling {{ step [
  {{
    model_name: {quote(preprocess_name(specification))} model_version: -1
    input_map {{ key: {quote(image.name)} value: {quote(image.name)} }}
    output_map {{ key: {quote(pixels.name)} value: {quote(pixels.name)} }}
  }},
  {{
    model_name: {quote(executing)} model_version: -1
    input_map {{ key: {quote(pixels.name)} value: {quote(pixels.name)} }}
    output_map {{ key: {quote(output.name)} value: {quote(output.name)} }}
  }}
] }}
"""
