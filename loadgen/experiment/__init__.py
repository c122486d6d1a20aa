"""From options or an experiment file to the workloads, rounds and order of a run."""
