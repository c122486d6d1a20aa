"""Engine ceilings: the throughput of the engines alone, and how much of it the arms serve."""
