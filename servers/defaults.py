"""Default values that several servers and commands share. Imports no other module of the project."""

from typing import Final

HOST = "127.0.0.1"
PRECISION: Final = "auto"
MODE = "auto"
DEVICE = "auto"
MAX_BATCH_SIZE = 32
MAX_QUEUE_DELAY_US = 0
QUEUE_SIZE = 512
ARTEFACTS = ".artefacts"

ENGINES = "torch, onnxruntime, tensorrt, openvino, jax, another installed engine, or null (no model)"
PRECISIONS = "auto (fp16 on a GPU, fp32 on a CPU), fp32, tf32, fp16, bf16, int8 or fp8, as the engine offers them."
SPINNING = (
    "Whether the threads of torch and onnxruntime spin on the CPU while they wait for each other. auto: on, as both do "
    "by default; off suits cores that other programs use."
)
"""The help of `--engine`, `--precision` and `--spinning`."""
