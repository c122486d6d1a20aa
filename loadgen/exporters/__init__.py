"""Prometheus metrics of the load generator and of finished runs. Verdicts do not use them."""
