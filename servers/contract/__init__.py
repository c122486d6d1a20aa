"""Tensors and Open Inference Protocol V2 bodies as data. Pure: no I/O, no web framework, nothing else of ours."""
