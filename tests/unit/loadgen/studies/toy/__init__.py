"""A study as somebody would add it: how long the run took to get here."""
