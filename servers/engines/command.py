"""For installed metadata of before the move to `servers.measuring`; goes when the package is installed again."""

from servers.measuring.command import engine as engine
