"""Everything that listens refuses to do so beyond loopback, unless it has keys or is told that anyone may come."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from loadgen.base import exposure as of_the_load_generator
from loadgen.entry import build
from servers.options import launch as of_the_servers

COMMANDS = [
    *(["serve", "native"], ["serve", "fastapi"], ["serve", "litserve"], ["serve", "triton"]),
    *(["serve", "vllm", "--model", "language:demo"], ["gpu-exporter"], ["results-exporter"]),
]


def refused(argv: list[str]) -> str:
    result = CliRunner().invoke(build(), argv)
    assert result.exit_code == 2, result.output
    return " ".join(result.output.split())


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[-1])
def test_servers_and_exporters_refuse_to_be_reached_by_others(command: list[str]) -> None:
    if "litserve" in command:
        pytest.importorskip("litserve")
    print_only = ["--print-launch"] if command[0] == "serve" else []
    assert "--anyone" in refused([*command, "--host", "0.0.0.0", *print_only])


@pytest.mark.parametrize(
    "options",
    [
        ["record", "--to", "http://127.0.0.1:8100", "--listen", "0.0.0.0:9000"],
        ["record", "--grpc-to", "127.0.0.1:8101", "--grpc-listen", "[::]:9001"],
        ["shadow", "--primary", "http://127.0.0.1:1", "--candidate", "http://127.0.0.1:2", "--listen", "0.0.0.0:9000"],
        [
            "shadow",
            "--primary",
            "http://127.0.0.1:1",
            "--candidate",
            "http://127.0.0.1:2",
            "--metrics-listen",
            "[::]:1",
        ],
    ],
    ids=lambda options: f"{options[0]} {options[-2]}",
)
def test_proxies_refuse_to_be_reached_by_others(options: list[str], tmp_path: Path) -> None:
    said = refused([*options, "--out", str(tmp_path / "out")])
    assert "--anyone" in said
    assert options[-2] in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", ["--web-host", "--metrics-host", "--master-bind-host"])
def test_locust_refuses_to_be_reached_by_others(option: str) -> None:
    scenarios = Path(of_the_load_generator.__file__).parents[1] / "scenarios.py"
    usual = ["--host", "http://127.0.0.1:1", "--metrics-port", "1", "--master", "--web-port", "0"]
    command = [sys.executable, "-m", "locust", "-f", str(scenarios), *usual, option, "0.0.0.0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2, done.stderr
    assert "--anyone" in done.stderr


@pytest.mark.parametrize("is_loopback", [of_the_load_generator.is_loopback, of_the_servers.is_loopback])
def test_both_sides_have_the_same_rule(is_loopback: Callable[[str], bool]) -> None:
    inside = ("127.0.0.1", "127.0.0.2", "::1", "localhost", "no-such-name.invalid")
    outside = ("0.0.0.0", "::", "192.0.2.1", "*", "")
    assert [is_loopback(host) for host in (*inside, *outside)] == [True] * len(inside) + [False] * len(outside)
