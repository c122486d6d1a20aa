"""Why the arms differ: what taking one thing away at a time has saved, ranked."""
