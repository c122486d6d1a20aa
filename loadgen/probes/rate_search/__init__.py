"""The highest rate within a latency bound, and the throughput at saturation."""
