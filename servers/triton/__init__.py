"""A real tritonserver without a container: find it in its wheel, lay out a repository, launch it, watch it.

Not in scope: the native onnxruntime and tensorrt backends of NVIDIA's image; `triton_model_repo/` holds their configs.
"""
