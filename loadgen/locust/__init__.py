"""The parts of `locust -f loadgen/scenarios.py`: its session and its workers."""
