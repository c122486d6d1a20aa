"""A user's project whose files have the names of our packages and of others: nothing of it is imported by mistake."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("real_exec")  # a fork has imported all before
ROOT = Path(__file__).parents[2]
MODEL = """
import torch
from width import WIDTH
from abserve.models import Input, Output, UserModel


def build():
    torch.manual_seed(0)
    x, y = Input("x", "FP32", ("batch", WIDTH)), Output("y", "FP32", ("batch", 8))
    return UserModel(torch.nn.Linear(WIDTH, 8), [x], [y])
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a model, and with modules that say so if they are imported."""
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "width.py").write_text("WIDTH = 16")
    for name in ("loadgen.py", "abserve.py", "numpy.py", "torch.py", "msgspec.py", "servers/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"raise RuntimeError('the project has imported {name}')")
    return tmp_path


def run(project: Path, *arguments: str) -> str:
    """Output of a Python that starts without the working folder on its path, as every console script does."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", *arguments], capture_output=True, text=True, cwd=project, timeout=200, check=False
    )
    assert done.returncode in (0, 1), done.stderr
    assert "the project has imported" not in done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow  # by default test_import_graph.py finds who starts a Python that would import from its working folder
@pytest.mark.triton
def test_a_comparison_of_both_servers(project: Path) -> None:
    arms = ["--a", "native", "--b", "triton", "--a-option", "fronts=1", "--b-option", "engine=torch"]
    load = ["--scenarios", "single", "--rounds", "2", "--no-handicap-check", "--anyway", "--out", "run"]
    run(project, "loadgen.entry", "compare", "--model", "model.py:build", *arms, *load)
    state, parity = (json.loads((project / "run" / name).read_bytes()) for name in ("run.json", "parity.json"))
    assert state["state"] == "finished", state
    assert parity["cases"]
    assert all(case["ok"] for case in parity["cases"])


def test_one_engine(project: Path) -> None:
    run(
        project,
        "loadgen.entry",
        "engine",
        "--model",
        "model.py:build",
        "--batches",
        "1",
        "--seconds",
        "0.05",
        "--json",
        "engine.json",
    )
    assert json.loads((project / "engine.json").read_bytes())


def test_the_locustfile(project: Path) -> None:
    assert "Concurrent" in run(project, "locust", "-f", str(ROOT / "loadgen/scenarios.py"), "--list")
