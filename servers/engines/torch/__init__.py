"""Engines that execute through torch: the model's module, CUDA graphs, the fused vision tower."""

import os

# Triton 3.10 no longer makes one instruction of a product and a sum unless it is asked to: its kernels would be slower.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
