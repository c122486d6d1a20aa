"""Tensors and Open Inference Protocol V2 bodies as data. No I/O, no web framework, no import of another room."""
