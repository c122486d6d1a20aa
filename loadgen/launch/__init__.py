"""Starts, finds and stops the servers of a comparison: as a child process, in the compose stack, or by URL."""
