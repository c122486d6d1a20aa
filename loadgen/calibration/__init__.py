"""Measures the load generator itself against a server that does nothing."""
