"""Engines that execute through torch: the model's module, CUDA graphs, the fused vision tower."""
