"""Prints what pyproject.toml asks for, one requirement a line: `python requirements.py [EXTRA ...]`.

An image installs it before our own code is copied in, so that a change of code leaves gigabytes of packages alone.
"""

import sys
import tomllib
from pathlib import Path


def main() -> None:
    """The dependencies, then those of each extra named."""
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(line for name in sys.argv[1:] for line in extras[name])]
    sys.stdout.write("\n".join(wanted) + "\n")


if __name__ == "__main__":
    main()
