"""What `locust -f loadgen/scenarios.py` runs: the users, one test's session, its workers, its Prometheus metrics."""
