"""Measures engines without a server: times, answers, kernels, memory, energy. Not in scope: load from clients."""
