"""Engines execute a model inside a process. Not in scope: protocols, queues, measurements."""
