"""Ranks engines and servers over several machines by throughput, latency, cost and energy, from stored results.

In scope: reading a price file, telling machines apart, costs, the Pareto front, the report. Not in scope: measuring,
fetching prices, converting currencies.
"""
