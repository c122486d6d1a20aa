"""A load generator's box installs the base dependencies alone; the command line and both exporters must work there."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ABSENT = (
    "torch", "torchvision", "onnx", "onnxruntime", "onnxscript", "open_clip", "PIL", "simplejpeg", "fastapi",
    "starlette", "uvicorn", "pytriton", "docker",
)  # fmt: skip
PROGRAM = """
import sys


class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)


sys.meta_path.insert(0, Absent())
from loadgen.entry import main
sys.argv = ["abserve", *{arguments!r}]
main()
"""


@pytest.mark.parametrize("command", [["--help"], ["gpu-exporter", "--help"], ["results-exporter", "--help"]])
def test_commands_answer_without_the_servers_packages(command: list[str]) -> None:
    program = PROGRAM.format(absent=ABSENT, arguments=command)
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout


def test_nothing_listed_as_absent_is_a_base_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    base = {line.split(">")[0].split("[")[0].split("=")[0].lower() for line in project["dependencies"]}
    packages = {"PIL": "pillow", "open_clip": "open_clip_torch", "pytriton": "nvidia-pytriton"}
    assert not base & {packages.get(name, name).lower() for name in ABSENT}
    assert "prometheus-client" in base
