"""`abserve record`: a relay before a server, which copies what passes into a folder of traffic.

In scope: relaying bytes, reading requests in them, writing them. Not in scope: the format (`loadgen.records.traffic`)
and replays.
"""
