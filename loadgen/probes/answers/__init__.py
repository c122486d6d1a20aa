"""Whether the answers under load were those to the same inputs sent alone."""
