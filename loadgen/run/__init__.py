"""Runs an experiment: servers up, phases in their order, every record stored as it happens."""
