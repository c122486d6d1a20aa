"""From what is asked for (options, an experiment file) to the cells, pairs and order of a run."""
