"""GPU verification: from stored GPU readings to a verdict on where each arm ran."""
