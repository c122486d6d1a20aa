"""GPU verification: from stored GPU readings to a verdict on the device that executed each arm's model."""
