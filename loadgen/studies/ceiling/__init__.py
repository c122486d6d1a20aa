"""Engine ceilings: what the engines do alone, and how much of it the arms serve."""
