"""The load generator's processes: users, arrivals, blocks; Locust and gevent live here and in the locustfile."""
