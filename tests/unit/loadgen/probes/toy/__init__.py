"""A study as a contributor would add it: the temperature of the machine."""
