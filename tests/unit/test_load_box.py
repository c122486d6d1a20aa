"""A load generator's box installs the base dependencies alone; the command line and both exporters must work there."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ABSENT = (
    "torch", "torchvision", "onnx", "onnxruntime", "onnxscript", "open_clip", "PIL", "simplejpeg", "fastapi",
    "starlette", "uvicorn", "pytriton", "docker", "timm", "transformers", "scipy", "tritonclient", "grpc", "locust",
    "flask", "requests", "litserve", "vllm",
)  # fmt: skip
PROGRAM = """
import sys
from importlib.machinery import PathFinder

find = PathFinder.find_spec.__func__
PathFinder.find_spec = classmethod(
    lambda cls, name, *rest: None if name.partition(".")[0] in {absent!r} else find(cls, name, *rest)
)
{start}
sys.argv = ["abserve", *{arguments!r}]
main()
"""


HELP = ("--help", "gpu-exporter --help", "results-exporter --help")
NEEDY = (
    "models torchvision:resnet18", "serve native", "serve triton", "engine", "samples --out /nowhere",
    "export --model torchvision:resnet18", "tune",
)  # fmt: skip
TO_A_SERVER = "conformance http://127.0.0.1:9"
ONE_AFTER_THE_OTHER = """
import contextlib, io, json
from loadgen.entry import main as command

def main():
    answers = {{}}
    for words in {commands!r}:
        sys.argv = ["abserve", *words.split()]
        out, err = (io.TextIOWrapper(io.BytesIO(), write_through=True) for _ in range(2))
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                status = command() or 0
            except SystemExit as exc:
                status = exc.code or 0
        answers[words] = status, *(stream.buffer.getvalue().decode() for stream in (out, err))
    print(json.dumps(answers))
"""


@cache
def answers() -> dict[str, tuple[int, str, str]]:
    """By command the status and what it writes. One process executes all of them."""
    done = run(start=ONE_AFTER_THE_OTHER.format(commands=(*HELP, *NEEDY, TO_A_SERVER)))
    assert done.returncode == 0, done.stderr
    by_command: dict[str, tuple[int, str, str]] = json.loads(done.stdout)
    return by_command


def run(*command: str, start: str = "from loadgen.entry import main") -> subprocess.CompletedProcess[str]:
    program = PROGRAM.format(absent=ABSENT, arguments=command, start=start)
    return subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False, cwd="/")


@pytest.mark.parametrize("command", HELP)
def test_commands_answer_without_the_servers_packages(command: str) -> None:
    status, output, errors = answers()[command]
    assert status == 0, errors
    assert "Usage" in output


@pytest.mark.parametrize("command", NEEDY)
def test_commands_that_need_them_say_what_to_install(command: str) -> None:
    status, _, errors = answers()[command]
    assert status == 2, errors
    sentence = errors.strip().splitlines()[-1]
    assert sentence.startswith("error: ")
    assert "not installed" in sentence
    assert sentence.endswith("pip install 'abserve[servers]'")
    assert "Traceback" not in errors


def test_the_extra_is_that_of_the_command() -> None:
    status, _, errors = answers()[TO_A_SERVER]
    assert (status, errors.splitlines()[-1].rpartition("pip install ")[2]) == (2, "'abserve[conformance]'")


def test_a_server_that_needs_them_ends_with_what_to_install() -> None:
    done = run("-m", "servers.plain.fastapi_server", "{}", start="from abserve.__main__ import main")
    assert done.returncode == 1
    assert done.stderr.startswith("error: this needs ")
    assert done.stderr.strip().endswith("pip install 'abserve[servers]'")


def test_two_urls_are_measured_without_them() -> None:
    """What such a comparison imports is all in the base installation: nothing of it is tried before it measures."""
    done = run("compare", "--a", "http://127.0.0.1:9", "--b", "http://127.0.0.1:9", "--print-experiment")
    assert (done.returncode, done.stderr) == (0, "")
    modules = "loadgen.client.worker, loadgen.measure.runner, loadgen.verdict.result, loadgen.report.files"
    assert run(start=f"import {modules}\ndef main(): pass").returncode == 0


def test_doctor_knows_an_installation_that_only_loads_servers_by_url() -> None:
    checks = {check["name"]: check for check in json.loads(run("doctor", "--json").stdout)}
    assert checks["mode"]["detail"].startswith("client only")
    assert (checks["servers"]["ok"], checks["servers"]["needed_for"]) == (False, "servers and engines on this machine")
    assert not checks.keys() & {"torch", "tritonserver", "port 8000", "engine jax"}
    assert checks["next"]["detail"].startswith("abserve compare --a http://HOST:PORT --b http://HOST:PORT")


def test_nothing_listed_as_absent_is_a_base_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    base = {line.split(">")[0].split("[")[0].split("=")[0].lower() for line in project["dependencies"]}
    packages = {"PIL": "pillow", "open_clip": "open_clip_torch", "pytriton": "nvidia-pytriton"}
    assert not base & {packages.get(name, name).lower() for name in ABSENT}
    assert "prometheus-client" in base
