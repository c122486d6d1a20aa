"""Fairness before the load: settings that make arms unlike or do nothing, and a machine not fit to measure on."""
