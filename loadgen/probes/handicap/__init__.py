"""Whether an arm that abserve starts is slower than the same server with its own defaults."""
