"""`abserve record` and `abserve shadow`: a relay that copies what passes to a folder or another server.

In scope: relaying bytes, reading requests in them, writing or copying them, and comparing the answers to copies. Not in
scope: the format (`loadgen.records.traffic`) and replays.
"""
