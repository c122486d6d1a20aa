"""From no process to the first answer."""
