"""The records that a run writes and that analysis and report read: data without behaviour."""
