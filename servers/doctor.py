"""For installed metadata of before the move to `servers.cli`; goes when the package is installed again."""

from servers.cli.doctor import doctor as doctor
