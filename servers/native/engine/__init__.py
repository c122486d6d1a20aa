"""The engine's process: batches, the models' life, steps of language models, device memory of clients."""
