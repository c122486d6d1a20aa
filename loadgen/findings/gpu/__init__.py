"""GPU verification: from stored GPU readings to the processor that executed each arm's model."""
