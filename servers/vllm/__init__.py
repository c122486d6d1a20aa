"""`abserve serve vllm`: vLLM, where it is installed, with a language model's folder. Imports neither vllm nor torch."""
