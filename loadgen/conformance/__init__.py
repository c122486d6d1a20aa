"""Conformance: invalid input, overload and faults, the answer that each must get, and where a server's answers differ.

In scope: any server of the Open Inference Protocol v2, over HTTP and gRPC. Not in scope: speed.
"""
