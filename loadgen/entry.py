"""The `abserve` command: finds the command groups that are installed, mounts them, runs."""

from __future__ import annotations

from importlib.metadata import entry_points

import typer

GROUP = "abserve.commands"


def build() -> typer.Typer:
    """The whole command line. Each package registers a function `commands(app)` under the entry points of GROUP."""
    app = typer.Typer(
        name="abserve",
        help="PyTorch or Triton: which should serve this model, by how much, why, and is that true?",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    for point in sorted(entry_points(group=GROUP), key=lambda p: p.name):
        point.load()(app)
    return app


def main() -> None:
    """Run the command line; a package's own errors end as one sentence on standard error and exit status 1."""
    build()(prog_name="abserve")


if __name__ == "__main__":
    main()
