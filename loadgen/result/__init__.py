"""From a stored run to its result: measures, compares, checks, concludes; writes nothing."""
