"""The load generator's processes: users, arrivals and blocks. Only they and the locustfile import gevent."""
