"""The sections of a report: each function makes one of them from a result, or None if there is nothing to show."""
