"""Fairness before the load: settings that make arms unlike or do nothing, and a machine that is not fit to measure on.

`settings` and `conditions` judge and are pure; `readings` takes the machine's readings, once, right before the load.
"""
