"""The best configuration of each arm under the user's load and limit, then the verdict between the winners.

In scope: the space of settings, the search, the order and budget of the measurements, what the user gets. Not in scope:
how servers are measured and compared, which is `loadgen.measure` and `loadgen.verdict`.
"""
