"""The load generator's processes: users, arrivals and blocks.

Only they, the locustfile and its metrics import gevent.
"""
