"""The Python API in a script, an event loop and a notebook, whose project has files with our packages' names."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import nbformat
import psutil
import pytest
import typer
from nbclient import NotebookClient

import abserve
from abserve.comparison import _arguments, _Command
from abserve.options import CompareOptions
from loadgen.base.child_process import ChildProcess
from loadgen.cli.compare import compare
from loadgen.verdict.result import analyse
from tests.golden.synthetic_run import Plan, write_run
from tests.integration.loadgen.conftest import await_true, fake_servers

QUICK: dict[str, Any] = {
    "model": "openclip_vit_b32", "inputs": "random", "scenarios": ["single"], "rounds": 2,
    "gpu_control": False, "anyway": True,
}  # fmt: skip
LONG = {**QUICK, "rounds": 5000}


@pytest.fixture(scope="module")
def urls() -> Iterator[dict[str, Any]]:
    with fake_servers() as start:
        yield {"a": start(), "b": start("--delay-ms", "20")}


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, which hides our packages from a notebook or a script in it."""
    for name in ("loadgen.py", "servers/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("THEIRS = True")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def comparisons_below(pid: int) -> list[psutil.Process]:
    """The processes of `abserve compare` that a process has started and that still live."""
    children = psutil.Process(pid).children(recursive=True)
    return [child for child in children if "loadgen.entry" in child.cmdline()]


def test_a_comparison_in_a_script(urls: dict[str, Any], project: Path) -> None:
    program = (
        "import sys; sys.path.insert(0, '')\n"
        "import json, abserve, abserve.models, loadgen\n"
        f"run = abserve.compare(**{ {**urls, **QUICK}!r}, fail_if=['b.p50 > 5 * a.p50'])\n"
        "samples = run.samples('single')\n"
        "print(json.dumps([loadgen.THEIRS, str(run.folder), run.valid, run.verdict,\n"
        "    run.result.thresholds[0].condition,\n"
        "    run.comparisons.to_dicts()[0], len(samples), sorted(set(samples['arm'])), samples.to_dicts()[0]]))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "report: " in done.stdout, "the progress of the command"
    theirs, folder, valid, verdict, threshold, comparison, count, arms, sample = json.loads(
        done.stdout.splitlines()[-1]
    )
    assert theirs, "the project's own module is what it imports"
    stored = json.loads((Path(folder) / "result.json").read_bytes())
    assert Path(folder).parent == project / "results"
    assert (valid, verdict, threshold) == (stored["valid"], stored["verdict"]["sentence"], "b.p50 > 5 * a.p50")
    assert comparison["ratio"] == stored["comparisons"][0]["ratio"] < 0.5
    assert count == sum(block["requests"] for block in stored["blocks"])
    assert arms == ["a", "b"]
    assert (sample["error"], sample["status"]) == (None, 200)
    assert sample["latency_ns"] == sample["end_ns"] - sample["intended_ns"] > 0


def test_wrong_options_are_one_exception_with_the_sentence_of_the_command(project: Path) -> None:
    for options, sentence in (
        ({"preset": "fast"}, "--preset: unknown value fast; choose from"),
        ({"modle": "x"}, "compare() has no option modle; did you mean model?"),
        ({"rounds": 0, "anyway": True}, "--rounds 0: must be"),
    ):
        with pytest.raises(abserve.AbserveError) as caught:
            abserve.compare(progress=False, **options)
        assert str(caught.value).startswith(sentence)
    assert [*project.glob("results/*")] == []


def test_every_option_that_is_true_or_false_can_be_both() -> None:
    """False overrides a variable or a file. A list in a mapping is written with commas."""
    app = typer.Typer()
    app.command()(compare)
    command = typer.main.get_command(app)
    flags = {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
    names = [name for name, kind in CompareOptions.__annotations__.items() if "bool" in str(kind)]
    assert "anyway" in names
    for name in names:
        for value in (True, False):
            assert {*_arguments(name, value)} <= flags, name
    assert [*_arguments("a_option", {"pad-to": [32, 64]})] == ["--a-option=pad-to=32,64"]
    fields = {"ignore_eos": None, "user": "5", "stop": ["a"], "best": True}
    assert [*_arguments("b_body", fields)] == [
        "--b-body=-ignore_eos", '--b-body=user="5"', '--b-body=stop=["a"]', "--b-body=best=true",
    ]  # fmt: skip


def test_what_a_command_writes_to_standard_error_is_told_once(tmp_path: Path) -> None:
    """Also if an interrupt makes the caller follow it again."""
    command = object.__new__(_Command)
    program = [sys.executable, "-c", "import sys; sys.stderr.write('once')"]
    command.process = ChildProcess(program, log_path=tmp_path / "log", pipes=True)
    command._said = 0
    said: list[str] = []
    command.follow(said.append)
    command.follow(said.append)
    command.process.stop()
    assert "".join(said) == "once"


def test_a_text_that_no_row_has_is_none_and_a_number_nan() -> None:
    comparison = next(iter(analyse(write_run(Path("planted"), Plan(pairs=2))).comparisons))
    run = abserve.Run("planted")
    bare = msgspec.structs.replace(comparison, reason=None, p_value=None, verdict="inconclusive")
    run.__dict__["result"] = msgspec.structs.replace(run.result, comparisons=(bare,))
    assert run.comparisons["reason"].tolist() == run.comparisons["winner"].tolist() == [None]
    assert math.isnan(run.comparisons["p_value"][0])
    del run.__dict__["comparisons"]  # and of a rough run
    run.__dict__["result"] = msgspec.structs.replace(
        run.result, comparisons=(bare, msgspec.structs.replace(bare, lost=(0.1, 0.2)))
    )
    assert run.comparisons.to_pandas()["arm_lost"][1] == 0.2


@pytest.mark.slow  # by default the cancelled comparison below
def test_an_interrupted_script_leaves_no_process_and_keeps_its_blocks(urls: dict[str, Any], project: Path) -> None:
    program = f"import abserve; abserve.compare(**{ {**urls, **LONG}!r}, out='run')"
    script = subprocess.Popen([sys.executable, "-P", "-c", program], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    await_true(lambda: [*project.glob("run/blocks/*.json")], "no block")
    (comparison,) = comparisons_below(script.pid)
    script.send_signal(2)
    assert b"KeyboardInterrupt" in script.communicate(timeout=60)[1]
    assert not comparison.is_running()
    run = abserve.load("run")
    assert run.result.state is not None
    assert (run.valid, run.result.state.state) == (False, "interrupted")


def test_a_cancelled_comparison_ends_and_keeps_its_blocks(urls: dict[str, Any], project: Path) -> None:
    async def cancel_after_a_block() -> float:
        task = asyncio.create_task(abserve.compare_async(**urls, **LONG, out="run", progress=False))
        late, loop = 0.0, asyncio.get_running_loop()
        while not [*project.glob("run/blocks/*.json")]:
            assert not task.done()
            due = loop.time() + 0.01
            await asyncio.sleep(0.01)
            late = max(late, loop.time() - due)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return late

    assert asyncio.run(cancel_after_a_block()) < 5, "the loop goes on"
    assert comparisons_below(os.getpid()) == []
    state = abserve.load("run").result.state
    assert state is not None
    assert state.state == "interrupted"


def test_a_notebook(urls: dict[str, Any], project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(project / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(project / "runtime"))
    cells = [
        "import sys; sys.path.insert(0, '')\nimport asyncio, abserve\nbeats = 0\n"
        "async def beat():\n    global beats\n    while True:\n        beats += 1\n        await asyncio.sleep(0.05)\n"
        "task = asyncio.create_task(beat())",
        f"run = await abserve.compare_async(**{ {**urls, **QUICK}!r})",
        "task.cancel()\nprint(beats)",
        "run",
        "run.comparisons.to_pandas()[['workload', 'metric', 'ratio']]",
        "run.show()",
        "import loadgen\nloadgen.THEIRS",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(project)}}
    ).execute()
    _, comparing, counted, shown, table, report, theirs = [cell.outputs for cell in notebook.cells]
    assert "report: " in "".join(output.text for output in comparing)
    assert int(counted[0].text) > 10, "the loop of the notebook went on"
    assert "throughput" in table[0].data["text/html"]
    assert re.search("(VALID|ROUGH)[^<]*</b>", shown[0].data["text/html"]), "as the machine is quiet or busy"
    assert "srcdoc" in report[0].data["text/html"]
    assert theirs[0].data["text/plain"] == "True"


def test_without_pandas_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        abserve.Columns({}).to_pandas()
