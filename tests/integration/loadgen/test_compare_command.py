"""`abserve compare` on real servers, as a user runs it: options in, report, verdict and exit status out."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.integration.loadgen.conftest import UNWATCHED_ABSERVE

pytestmark = pytest.mark.usefixtures("no_process_left")

NULL = ("--a-option", "engine=null", "--b-option", "engine=null")


def compare(out: Path, *options: str, timeout: int = 560) -> subprocess.CompletedProcess[str]:
    command = [*UNWATCHED_ABSERVE, "compare", "--out", str(out), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


def result(out: Path) -> dict:
    return json.loads((out / "result.json").read_bytes())


@pytest.mark.benchmark
def test_20_ms_added_to_every_answer_is_found_with_an_interval_that_holds_it(tmp_path: Path) -> None:
    """Both arms are native servers without a model, so the added delay is all the difference there is."""
    out = tmp_path / "run"
    options = ("--a", "native", "--b", "native", *NULL, "--b-option", "added-delay-ms=20", "--scenarios", "single")
    done = compare(out, *options, "--rounds", "4", "--no-handicap-check")
    assert (out / "report.html").exists(), done.stderr
    document = result(out)
    (p50,) = [c for c in document["comparisons"] if (c["scenario"], c["metric"]) == ("single", "latency_p50")]
    assert (p50["baseline"], p50["arm"], p50["verdict"]) == ("a", "b", "baseline_better"), done.stdout
    medians: dict[str, list[float]] = {"a": [], "b": []}
    for path in sorted((out / "blocks").glob("*.json")):
        block = json.loads(path.read_bytes())
        samples = np.load(out / block["samples"])
        medians[block["label"]].append(float(np.median(samples["end_ns"] - samples["send_ns"])) / 1e6)
    truth = (np.median(medians["a"]) + 20) / np.median(medians["a"])
    low, high = p50["ci95"]  # of four pairs, perhaps on a busy machine: a fifth wider here
    assert low * 0.8 < truth < high * 1.2
    assert abs(np.median(medians["b"]) - np.median(medians["a"]) - 20) < 5


@pytest.mark.slow  # test_any_model.py has the same with a small model
@pytest.mark.triton
@pytest.mark.timeout(600)  # 40 s on two idle cores
def test_both_real_servers(tmp_path: Path, artefact_dir: Path) -> None:
    """PyTorch behind the native server against ONNX Runtime behind a real tritonserver: one small run, all stages."""
    out = tmp_path / "run"
    options = ("--scenarios", "single,batched,concurrent", "--batch-sizes", "4", "--rounds", "2")
    done = compare(
        out, *options, "--requests", "16", "--concurrency", "4", "--b-option", f"artefacts={artefact_dir}",
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    document = result(out)
    assert f"report: {out / 'report.html'}" in done.stdout.splitlines()[-2:], (
        "before the headline of a run with a verdict"
    )
    assert json.loads((out / "run.json").read_bytes())["state"] == "finished", done.stderr
    assert document["parity"]["ok"]
    assert {arm["label"]: arm["target"] for arm in document["arms"]} == {"a": "native", "b": "triton"}
    for path in (out / "blocks").glob("*.json"):
        block = json.loads(path.read_bytes())
        assert block["complete"]
        assert block["errors"] == 0
        counted = block["requests"] + block["cool_down"]
        assert block["stages"]["requests"] == counted, "the server counted what the client counted"
        assert (block["stages"]["receive_ns"] is not None) == (block["label"] == "a")
