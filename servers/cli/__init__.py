"""What the commands of all servers share: options, launch plans, default values; and `abserve doctor` and `serve`."""

from typing import Any


def __getattr__(name: str) -> Any:
    """For installed metadata that name `servers.cli:serve`; goes when the package is installed again."""
    if name == "serve":
        from servers.cli.commands import serve

        return serve
    raise AttributeError(name)
