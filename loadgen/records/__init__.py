"""What a run writes while it happens, and all that analysis and report may read: data, no behaviour."""
