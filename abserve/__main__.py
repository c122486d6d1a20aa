"""`python -m abserve`: the command line, and `python -m abserve -m MODULE`: a program of `loadgen` or `servers`."""

from __future__ import annotations

import runpy
import sys

from abserve.packages import FOLDER


def main() -> None:
    """Run what the arguments name, in a process whose imports of these packages are ours."""
    sys.path.insert(0, FOLDER)
    if sys.argv[1:2] == ["-m"]:
        del sys.argv[:2]
        try:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        except ModuleNotFoundError as error:
            from loadgen.entry import what_to_install

            sys.exit(f"error: {what_to_install(error)}")
    else:
        from loadgen.entry import main

        main()


if __name__ == "__main__":
    main()
