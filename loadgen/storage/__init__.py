"""A run's folder: writes the records as they happen, reads them back whole or partial."""
