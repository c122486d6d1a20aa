"""Where an engine's time goes: kernels on a GPU, operators on a CPU, by name and by category; not how long it takes."""
