"""Cold starts: from starting the process to the first answer."""
