"""The reports say of a server what it reported or what was measured, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

from loadgen.report.contents import result_document
from loadgen.report.renderers.markdown import render_markdown
from loadgen.report.sections.conditions import experiment_rows
from loadgen.report.sections.verdict import proof
from loadgen.verdict.result import analyse
from tests.golden.synthetic_run import Plan, write_run
from tests.unit.loadgen.checks.test_checks import SMALL, check


def test_nothing_is_said_of_servers_that_did_not_say_it(tmp_path: Path) -> None:
    """The attacker's case: "random weights" was printed for every server given by URL."""
    write_run(tmp_path, Plan(gpu_status="ok", **SMALL))
    experiment = json.loads((tmp_path / "experiment.json").read_text())
    for arm in experiment["arms"]:
        arm["target"] = f"http://127.0.0.1:80{arm['label']}"
    (tmp_path / "experiment.json").write_text(json.dumps(experiment))
    arms = json.loads((tmp_path / "arms.json").read_text())
    for arm in arms:
        arm |= {"in_effect": {}, "model_config": {"name": "m"}, "argv": None, "launched": False, "server_name": "other"}
    (tmp_path / "arms.json").write_text(json.dumps(arms))
    result = analyse(tmp_path)
    weights = check(result, "trained_weights")
    assert (weights.ok, weights.detail) == (None, "127.0.0.1:80a and 127.0.0.1:80b do not report the weights")
    cache = check(result, "response_cache")
    assert (cache.ok, cache.detail) == (None, "127.0.0.1:80a does not report whether it has a response cache")
    assert check(result, "gpu_present").ok is None
    lines = {line.text: line.style for line in proof(result)}
    assert lines["The servers do not report whether they use a GPU."] == "unknown"
    rows = dict(experiment_rows(result))
    assert rows["weights"] == rows["threads"] == "as chosen by the servers given by URL"
    for untrue in ("random weights", "random:0", "no GPU", "all cores"):
        assert untrue not in render_markdown(result_document(result))


def test_servers_elsewhere_say_nothing_of_this_machine(tmp_path: Path) -> None:
    write_run(tmp_path, Plan(**SMALL))
    arms = json.loads((tmp_path / "arms.json").read_text())
    (tmp_path / "arms.json").write_text(json.dumps([arm | {"launched": False} for arm in arms]))
    present = check(analyse(tmp_path), "gpu_present")
    assert present.detail == "both arms ran on the CPU, as they report: this is a CPU comparison"
