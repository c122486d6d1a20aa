"""The parts of `locust -f loadgen/scenarios.py`: one test's session, its workers, its Prometheus metrics."""
