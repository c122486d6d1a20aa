"""Standard output contains only the result; the help has a group for every option."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import typer

from servers.gpu.command import gpu_exporter, gpu_info
from servers.triton.command import serve_triton

CODE = """
import os
from servers.triton.command import _stdout_for_results as stdout_for_results
with stdout_for_results() as results:
    print("an exporter's progress")
    os.write(1, b"a C library's warning\\n")
    results.write(b"the result\\n")
print("afterwards")
"""


def test_only_results_reach_stdout() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "the result\nafterwards\n"
    assert sorted(done.stderr.splitlines()) == ["a C library's warning", "an exporter's progress"]


@pytest.mark.parametrize("command", [serve_triton, gpu_exporter, gpu_info])
def test_every_option_has_a_group_and_a_sentence(command: Any) -> None:
    app = typer.Typer()
    app.command()(command)
    options: list[Any] = [one for one in typer.main.get_command(app).params if one.param_type_name == "option"]
    assert options
    for option in options:
        if option.name not in ("help", "install_completion", "show_completion"):
            assert option.rich_help_panel, option.name
            assert option.help.endswith("."), option.name
