"""Percentiles, ratios of pairs, intervals and tests: pure functions of numbers."""
