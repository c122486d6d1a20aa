"""The root of the command line: what it imports, how help is grouped, what a mistake looks like."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import entry_points, version
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from loadgen.entry import PanelledCommand, build

HEAVY = {"numpy", "scipy", "pydantic", "rich", "torch", "gevent", "locust", "msgspec", "plotly", "tritonclient"}


def imported_by(*arguments: str) -> tuple[list[str], set[str]]:
    """What a command prints, and the modules that it imports for it."""
    program = (
        "import sys\nfrom loadgen.entry import build\n"
        f"try:\n    build()({list(arguments)})\nexcept SystemExit:\n    print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    *shown, modules = done.stdout.splitlines()
    return shown, set(modules.split())


def test_the_version_is_shown_without_importing_what_a_command_needs() -> None:
    shown, modules = imported_by("--version")
    assert shown == [f"abserve {version('abserve')}"]
    assert HEAVY & modules == set()
    assert not any(name.startswith(("servers.", "loadgen.cli")) for name in modules)


def test_the_list_of_commands_imports_none_of_them() -> None:
    shown, modules = imported_by("--help")
    assert "  compare  Start the servers, send them the same requests, and report which is" in shown
    assert HEAVY & modules == set()
    assert not any(name.startswith("loadgen.cli.") or name.endswith((".command", ".doctor")) for name in modules)


@pytest.mark.parametrize("command", ["compare", "noise-floor", "engines", "calibrate", "diff", "models", "engine"])
def test_help_does_not_wait_for_what_measures(command: str) -> None:
    """A second is the limit for the first line; each of these takes a third of it or more."""
    _, modules = imported_by(command, "--help")
    assert {"scipy.special", "scipy.stats", "torch", "gevent", "tritonclient", "grpc", "hpack"} & modules == set()


def test_a_mistake_is_one_line_on_standard_error_with_status_2() -> None:
    for arguments in (["report", "--fromat", "csv", "."], ["report"], ["reprot"], ["--vresion"]):
        done = CliRunner().invoke(build(), arguments)
        assert done.exit_code == 2
        assert done.stderr.count("\n") == 1
        assert done.stderr.startswith("error: ")
        assert done.stdout == ""


def test_options_are_listed_in_groups_in_order_of_appearance() -> None:
    app = typer.Typer(rich_markup_mode=None, add_completion=False)

    @app.command(cls=PanelledCommand)
    def one(
        first: Annotated[str, typer.Option(rich_help_panel="Target", help="Where.")] = "",
        second: Annotated[str, typer.Option(help="Anything.")] = "",
        third: Annotated[str, typer.Option(rich_help_panel="Load", help="How much.")] = "",
        fourth: Annotated[str, typer.Option(rich_help_panel="Target", help="Which.")] = "",
    ) -> None:
        """Nothing."""

    lines = CliRunner().invoke(app, ["--help"]).output.splitlines()
    shown = [word.split()[0] for word in lines if word.startswith("  --") or word.endswith(":")]
    assert shown == ["Target:", "--first", "--fourth", "Load:", "--third", "Other", "--second", "--help"]


def test_internal_commands_run_but_are_not_listed() -> None:
    listed = CliRunner().invoke(build(), ["--help"]).output
    internal = [point.name for point in entry_points(group="abserve.internal_commands")]
    assert internal
    assert not any(f"  {name} " in listed for name in internal)
    assert CliRunner().invoke(build(), [internal[0], "--help"]).exit_code == 0


def test_bash_completes_commands_and_options() -> None:
    script = subprocess.run(
        [sys.executable, "-m", "abserve"],
        env={**os.environ, "_ABSERVE_COMPLETE": "source_bash"}, capture_output=True, text=True, check=False,
    ).stdout  # fmt: skip
    for words, expected in (("abserve cal", ["calibrate"]), ("abserve diff --js", ["--json"])):
        tried = f"{script}\nabserve() {{ '{sys.executable}' -m abserve \"$@\"; }}\nexport -f abserve\n"
        tried = tried.replace("$1 )", f"'{sys.executable}' -m abserve )")
        tried += f"COMP_WORDS=({words}); COMP_CWORD={len(words.split()) - 1}; _abserve_completion abserve; "
        done = subprocess.run(
            ["bash", "-c", tried + 'echo "${COMPREPLY[@]}"'], capture_output=True, text=True, check=True
        )
        assert done.stdout.split() == expected
