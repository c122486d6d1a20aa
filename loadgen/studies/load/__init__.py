"""The load itself: rounds of blocks on every arm, and what the servers executed."""
