"""From a stored run to its result: checks, noise floor, thresholds and verdict; pure functions of the records."""
