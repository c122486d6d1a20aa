"""The time of an engine by kernel on a GPU and by operator on a CPU, and by category of work."""
