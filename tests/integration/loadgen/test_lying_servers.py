"""Whole runs on a server that lies: one sentence or a report, never a traceback, and no name marks up a report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadgen.measure.progress import RunProgress
from loadgen.measure.runner import run_experiment
from loadgen.records.run import ParityRecord, RunState, Workload
from loadgen.verdict.result import analyse
from tests.hostile_names import HOSTILE, check_reports
from tests.integration.loadgen.conftest import FAKE_ABSERVE, blocks, make_experiment, stored

pytestmark = pytest.mark.usefixtures("no_process_left")

MODEL = "/v2/models/openclip_vit_b32"
DEEP = "[" * 100_000
SHORT = Workload(scenario="single", batch_size=1, concurrency=1, requests=5, seconds=0.1, max_seconds=5.0, rounds=1)


def lying_run(tmp_path: Path, lies: dict[str, tuple[str, int, int]]) -> tuple[Path, RunState]:
    """A run whose arm B answers this: path → (body, status, after how many inferences)."""
    path = tmp_path / "lies.json"
    path.write_text(json.dumps(lies))
    experiment = make_experiment(workloads=(SHORT,), b_settings={"lies": str(path)})
    out = tmp_path / "run"
    return out, run_experiment(experiment, out, RunProgress(), abserve=FAKE_ABSERVE)


def answer(**output: object) -> str:
    return json.dumps({"outputs": [{"name": "embedding", "datatype": "FP32", "shape": [1], **output}]})


@pytest.mark.parametrize(
    ("lies", "sentence"),
    [
        ({MODEL: (DEEP, 200, 0)}, "models/openclip_vit_b32: the response cannot be used: it is nested too deeply"),
        ({f"{MODEL}/config": (DEEP, 200, 0)}, "config: the response cannot be used: it is nested too deeply"),
        ({"/v2": ('{"name": ', 200, 0)}, "/v2: the response cannot be used: Input data was truncated"),
        ({f"{MODEL}/infer": (DEEP, 500, 0)}, "HTTP 500: [[["),
        (
            {f"{MODEL}/infer": (f'{{"outputs": [{{"data": {DEEP}', 200, 0)},
            "the response cannot be read: it is nested too deeply",
        ),
        ({f"{MODEL}/infer": (answer(shape=[-1]), 200, 0)}, "the response cannot be read: Expected `int` >= 0"),
        ({f"{MODEL}/infer": (answer(name=["x"]), 200, 0)}, "the response cannot be read: Expected `str`"),
        ({f"{MODEL}/infer": (answer(data=[1.0]), 200, 0)}, "embedding (FP32 [1]) is not binary"),
    ],
    ids=["metadata", "config", "server", "error", "answer", "shape", "name", "json"],
)
def test_a_lie_before_the_load_ends_the_run_with_one_sentence(
    tmp_path: Path, lies: dict[str, tuple[str, int, int]], sentence: str
) -> None:
    out, state = lying_run(tmp_path, lies)
    assert state.state == "failed"
    assert state.error is not None
    assert sentence in state.error
    assert state.error.isprintable()
    assert not analyse(out).valid
    if f"{MODEL}/infer" in lies:
        assert stored(out / "parity.json", ParityRecord).error is not None


def test_lies_under_load_lose_nothing_and_reach_no_report(tmp_path: Path) -> None:
    """Statistics and a GPU document that cannot be read; names that would mark up every format."""
    out, state = lying_run(
        tmp_path,
        {
            "/v2": (json.dumps({"name": HOSTILE, "version": HOSTILE}), 200, 0),
            f"{MODEL}/stats": (DEEP, 200, 1),
            f"{MODEL}/config": (json.dumps({"parameters": {HOSTILE: {"string_value": HOSTILE}}}), 200, 0),
            "/gpu-info": (DEEP, 200, 0),
        },
    )
    assert (state.state, state.error) == ("finished", None)
    assert [(record.complete, record.errors) for record in blocks(out)] == [(True, 0), (True, 0)]
    check_reports(out, analyse(out))
