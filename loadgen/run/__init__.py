"""A run: its servers, its context, the load, the stored folder, and what this machine's earlier measurements say."""
