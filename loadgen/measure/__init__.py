"""A run: its servers, its context, the load, the probes, and what this machine's earlier measurements say."""
