"""What `locust -f loadgen/scenarios.py` is made of: its session, its open loop, its workers."""
