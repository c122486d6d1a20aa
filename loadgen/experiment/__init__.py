"""From what is asked for (options, an experiment file) to the cells, rounds and order of a run."""
