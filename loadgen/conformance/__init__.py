"""Conformance: a corpus of bad input, overload and faults, what each must answer, and who answers otherwise.

In scope: any server of the Open Inference Protocol v2, over HTTP and gRPC. Not in scope: speed.
"""
