"""`abserve engine` for installations whose entry points are older than `servers.measuring`."""

from servers.measuring.command import engine as engine
