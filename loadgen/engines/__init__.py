"""The engine matrix: models × engines × precisions × modes × threads × batches × lengths, measured without a server."""
