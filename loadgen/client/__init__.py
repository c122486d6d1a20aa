"""The client's side of the wire: transports, prepared bodies, and the load generator's processes and users.

No servers are started here (`loadgen.launch`), and nothing here knows about arms or rounds.
"""
