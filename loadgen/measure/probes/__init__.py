"""The probes: each answers one question about a run, by measuring."""
