"""The load generator: schedules, clients, samples, statistics, verdict and report.

In scope: everything on the client's side of the wire. Not in scope: `servers`, which it meets only as processes
and through the Open Inference Protocol, as a user's client would.
"""
