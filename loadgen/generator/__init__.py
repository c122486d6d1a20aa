"""The load generator's processes: users, arrivals and blocks. Locust is imported here and in the locustfile only."""
