"""The servers under comparison, their model, engines and artefacts.

In scope: everything that runs in a server's process. Not in scope: load, measuring, judging (`loadgen`).
"""
