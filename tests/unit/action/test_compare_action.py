"""The steps of .github/actions/compare as a runner would execute them, with a recording script for pip and abserve."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from loadgen.entry import build

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / ".github/actions/compare"
ACTION: dict[str, Any] = yaml.safe_load((FOLDER / "action.yml").read_text())
WORKFLOW: dict[Any, Any] = yaml.safe_load((ROOT / ".github/workflows/compare.yml").read_text())
STEPS: dict[str, dict[str, Any]] = {step.get("name", step.get("uses")): step for step in ACTION["runs"]["steps"]}
RECORD = """#!/bin/sh
printf '%s\\n' "$@" > "$RECORDED"
exit "${STATUS:-0}"
"""


def run_step(
    name: str, folder: Path, inputs: dict[str, str] | None = None, *, status: int = 0
) -> tuple[int, list[str], dict[str, str]]:
    """The step's exit status, what it called abserve or pip with, and its outputs."""
    program = folder / "abserve/bin" / ("pip" if "Install" in name else "abserve")
    program.parent.mkdir(parents=True)
    program.write_text(RECORD)
    program.chmod(0o755)
    (folder / "python").write_text("#!/bin/sh\n")  # makes the environment, which is there already
    (folder / "python").chmod(0o755)
    chosen = {key: ACTION["inputs"][key]["default"] for key in ACTION["inputs"]} | (inputs or {})
    step = STEPS[name]
    environment = {
        key: re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda match: chosen[match[1]], value)
        for key, value in step["env"].items()
    }
    environment |= {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "RUNNER_TEMP": str(folder),
        "GITHUB_OUTPUT": str(folder / "outputs"),
        "GITHUB_STEP_SUMMARY": str(folder / "page"),
        "GITHUB_WORKFLOW": "speed",
        "GITHUB_ACTION_PATH": str(FOLDER),
        "RECORDED": str(folder / "recorded"),
        "STATUS": str(status),
    }
    (folder / "step.sh").write_text(step["run"])
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(folder / "step.sh")]  # what `shell: bash` means
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    called = (folder / "recorded").read_text().splitlines() if (folder / "recorded").exists() else []
    outputs = (folder / "outputs").read_text().splitlines() if (folder / "outputs").exists() else []
    return done.returncode, called, dict(line.split("=", 1) for line in outputs)


def test_the_options_reach_the_command_as_words(tmp_path: Path) -> None:
    inputs = {
        "experiment": "ci.yaml",
        "args": "--rounds 6 --a-header 'Authorization=Bearer $TOKEN'",
        "fail-if": "b.p99 > 1.05 * a.p99\n\nratio(b).throughput < 1\n",
    }
    status, called, outputs = run_step("Compare", tmp_path, inputs)
    assert status == 0
    assert called[:9] == [
        "compare", "ci.yaml", "--rounds", "6", "--a-header", "Authorization=Bearer $TOKEN",
        "--fail-if", "b.p99 > 1.05 * a.p99", "--fail-if",
    ]  # fmt: skip
    assert called[9:] == [
        "ratio(b).throughput < 1",
        "--out",
        outputs["folder"],
        "--junit",
        f"{outputs['folder']}-junit.xml",
    ]
    assert not Path(outputs["folder"]).exists()


def test_without_inputs_it_is_the_default_comparison(tmp_path: Path) -> None:
    _, called, outputs = run_step("Compare", tmp_path)
    assert called == ["compare", "--out", outputs["folder"], "--junit", f"{outputs['folder']}-junit.xml"]


@pytest.mark.parametrize("status", [0, 1, 2, 3, 130])
def test_the_exit_status_is_kept(tmp_path: Path, status: int) -> None:
    ended, _, outputs = run_step("Compare", tmp_path, status=status)
    assert ended == status
    assert outputs["status"] == str(status)


def test_an_open_quote_ends_the_step_before_anything_is_measured(tmp_path: Path) -> None:
    ended, called, _ = run_step("Compare", tmp_path, {"args": "--rounds '6"})
    assert ended != 0
    assert called == []


def test_no_text_of_an_input_becomes_part_of_a_script(tmp_path: Path) -> None:
    for step in STEPS.values():
        assert "${{" not in step.get("run", "")
    _, called, _ = run_step("Compare", tmp_path, {"args": "$(touch made) `touch made` ; touch made"})
    assert called[1:4] == ["$(touch", "made)", "`touch"]
    assert not (tmp_path / "made").exists()


def test_it_installs_the_tree_that_it_lies_in(tmp_path: Path) -> None:
    status, called, _ = run_step("Install abserve", tmp_path)
    assert status == 0
    assert called[-2:] == [str(ROOT / "docker/constraints.txt"), f"{ROOT}[servers]"]


def test_a_client_needs_no_extra(tmp_path: Path) -> None:
    _, called, _ = run_step("Install abserve", tmp_path, {"extras": ""})
    assert called[-1] == str(ROOT)


@pytest.mark.parametrize(("found", "status"), [("7", 0), ("7", 3), ("", 0)])
def test_the_last_run_of_a_branch_is_fetched_and_compared_with(tmp_path: Path, found: str, status: int) -> None:
    """A change against it is told and fails nothing: thresholds do that."""
    (tmp_path / "gh").write_text(
        f'#!/bin/sh\n[ "$2" = list ] && echo "{found}"\nprintf "%s\\n" "$@" >> "{tmp_path}/asked"\n'
    )
    (tmp_path / "gh").chmod(0o755)
    name = "Compare with the stored run of a branch"
    ended, called, _ = run_step(name, tmp_path, {"against": "main"}, status=status)
    asked = (tmp_path / "asked").read_text().split()
    assert (ended, asked[asked.index("--branch") + 1]) == (0, "main")
    assert ("download" in asked) == bool(found)
    assert called[:2] == (["diff", f"{tmp_path}/against/run"] if found else [])
    page = (tmp_path / "page").read_text()
    assert ("No successful run of speed on main" in page) == (not found)
    assert (f"status {status}:" in page) == (status != 0)


def test_the_records_are_kept_whatever_the_status() -> None:
    keep = STEPS["Keep the report and the records"]
    assert keep["if"].startswith("always()")
    assert "steps.compare.outputs.folder" in keep["with"]["path"]


def test_actions_of_others_are_pinned_by_commit() -> None:
    steps = [*ACTION["runs"]["steps"], *(step for job in WORKFLOW["jobs"].values() for step in job["steps"])]
    used = [step["uses"] for step in steps if "uses" in step and not step["uses"].startswith("./")]
    assert len(used) == 3
    assert all(re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", one) for one in used)


def test_the_workflow_gives_the_action_only_inputs_that_it_has_and_options_that_exist() -> None:
    (given,) = [step["with"] for job in WORKFLOW["jobs"].values() for step in job["steps"] if "with" in step]
    assert set(given) <= set(ACTION["inputs"])
    inputs = WORKFLOW[True]["workflow_dispatch"]["inputs"]  # YAML 1.1 reads `on` as true
    done = CliRunner().invoke(build(), ["compare", *inputs["args"]["default"].split(), "--print-experiment"])
    assert done.exit_code == 0, done.output
