"""The probes: each answers one question about a run, with its own records, analysis and sections."""
