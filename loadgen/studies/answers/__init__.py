"""Whether the answers under load were those to the same inputs alone."""
