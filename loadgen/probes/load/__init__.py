"""The load: rounds of blocks on every arm, and the batches that the servers executed."""
