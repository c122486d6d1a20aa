"""The matrix with real engines on a tiny model with an axis: what is stored, whatever libraries print, and faults."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from loadgen.base.child_process import ABSERVE, ENGINE_WORKER
from loadgen.engines.judging import judge_visits
from loadgen.engines.measure import MatrixRun
from loadgen.engines.plan import expand, make_plan, requests_of
from loadgen.engines.store import MatrixStore
from loadgen.engines.worker_process import check, read_offers
from loadgen.experiment.matrix import MatrixSettings
from loadgen.findings.tokens import wrong_answers
from loadgen.records.matrix import MatrixPlan, Measured, Visit
from loadgen.records.targets import Kind

ROOT = Path(__file__).resolve().parents[3]
MODEL = """
import os
import time
import torch
from servers.models import Input, Output, UserModel

print("a library greets")
os.write(1, b"and so does its C part\\n")
SEEN = set()


class Scorer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.score = torch.nn.Embedding(50, 8), torch.nn.Linear(8, 4)

    def forward(self, ids, mask):
        weights = mask.unsqueeze(2).to(self.score.weight.dtype)
        scores = self.score((self.embed(ids) * weights).sum(1) / weights.sum(1))
        return scores WRONG


def scorer():
    shape, sizes = ("batch", "sequence"), {"sequence": (8, 32)}
    ids = Input("ids", "INT64", shape, values=(1, 50), padding=0)
    mask = Input("mask", "INT64", shape, values=(1, 2), padding=0)
    return UserModel(Scorer(), [ids, mask], [Output("scores", "FP32", ("batch", 4), "logits")], sizes)
"""


@pytest.fixture(autouse=True)
def this_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def write_model(folder: Path, wrong: str = "") -> str:
    path = folder / "mine.py"
    path.write_text(MODEL.replace("WRONG", wrong))
    return f"{path}:scorer"


def planned(folder: Path, model: str, **settings: object) -> MatrixPlan:
    asked = MatrixSettings(
        models=(model,),
        device="cpu",
        seconds=0.01,
        artefacts=str(folder / "artefacts"),
        **settings,
    )
    offers = read_offers("cpu", ENGINE_WORKER)
    wanted = expand(asked, offers)
    return make_plan(asked, offers, wanted, check(requests_of(asked, wanted, offers), ENGINE_WORKER))


def measured(folder: Path, plan: MatrixPlan) -> dict[str, list[Visit]]:
    store = MatrixStore(folder / "run")
    with store.open():
        store.write(plan)
        assert MatrixRun(plan, store, ENGINE_WORKER).run().state == "finished"
    visits: dict[str, list[Visit]] = {}
    for visit in store.visits():
        configuration = plan.configurations[visit.configuration]
        visits.setdefault(f"{configuration.engine}/{configuration.mode}", []).append(visit)
    return visits


def test_engines_modes_lengths_and_threads_of_one_model(tmp_path: Path) -> None:
    plan = planned(
        tmp_path,
        write_model(tmp_path),
        engines=("torch", "onnxruntime", "null"),
        modes=("auto", "traced"),
        batches=(1, 3),
        sequence_lengths=(4, 32, 99),
        threads=(1,),
        rounds=1,
        profile=True,
    )
    assert {refusal.reason for refusal in plan.refused} >= {"sequence 99: mine_scorer takes at most 32; leave it out"}
    assert plan.lengths == {plan.configurations[0].model: (4, 32)}
    visits = measured(tmp_path, plan)
    assert set(visits) == {"torch/tuned", "torch/eager", "torch/traced", "onnxruntime/session", "null/eager"}
    for name, (visit,) in visits.items():
        assert visit.error is None, visit.error
        assert {(cell.batch, cell.length) for cell in visit.cells} == {(b, n) for b in (1, 3) for n in (4, 32)}
        assert visit.description["threads"] == 1
        assert visit.load_seconds is not None
        for cell in visit.cells:
            assert_measured(cell, null=name == "null/eager")
    (export,) = visits["onnxruntime/session"][0].conversions
    assert (export.step, export.made_now, export.file) == ("export", True, "model.onnx")
    assert export.seconds > 0
    assert export.file_bytes == next((tmp_path / "artefacts").rglob("model.onnx")).stat().st_size
    assert visits["torch/traced"][0].conversions == ()
    flops = {cell.length: cell.flops_per_item for cell in visits["torch/tuned"][0].cells}
    assert flops[4] is not None
    assert all(cell.kernels for cell in visits["torch/tuned"][0].cells)
    logs = "".join(path.read_text() for path in (tmp_path / "run" / "logs").iterdir())
    assert "a library greets" in logs
    assert "and so does its C part" in logs


def assert_measured(cell: Measured, *, null: bool) -> None:
    assert min(cell.calls_ns) > 0  # as many as fit into the time, which another program may take
    assert cell.first_call_ns > 0
    assert cell.rss_bytes is not None
    assert cell.rss_bytes > 10_000_000
    assert (cell.allocated_bytes, cell.process_device_bytes) == (None, None)
    if null:
        assert cell.fault == "the null engine computes no model"
        return
    assert cell.fault is None
    assert cell.cosine_min == pytest.approx(1.0)
    assert cell.relative_error is not None


@pytest.mark.slow  # by default the export above, and tests/integration/export/test_int8.py
def test_an_int8_file_costs_its_export_and_its_quantisation(tmp_path: Path) -> None:
    settings = {"engines": ("onnxruntime",), "precisions": ("int8",), "baseline": "none", "batches": (2,), "rounds": 1}
    (visit,) = measured(tmp_path, planned(tmp_path, write_model(tmp_path), **settings))["onnxruntime/session"]
    assert visit.error is None
    assert [conversion.step for conversion in visit.conversions] == ["export", "quantise"]
    assert all(conversion.seconds > 0 and conversion.made_now for conversion in visit.conversions)


def test_wrong_answers_are_a_fault_and_a_second_run_finds_the_file(tmp_path: Path) -> None:
    """The engine's process computes something else than the one that made the references."""
    model = write_model(tmp_path, "* (1 if 'prepare' in ' '.join(__import__('sys').argv) else 2)")
    plan = planned(tmp_path, model, engines=("torch",), modes=("eager",), batches=(2,), rounds=2, processes="kept")
    first, second = measured(tmp_path, plan)["torch/eager"]
    for visit in (first, second):
        (cell,) = visit.cells
        assert "scores has a relative error of 1" in str(cell.fault)
        assert cell.cosine_min == pytest.approx(1.0)
    assert first.load_seconds is not None
    assert second.load_seconds is None


def test_a_kept_process_makes_its_first_calls_before_it_is_ready(tmp_path: Path) -> None:
    """A batch of 6 takes long once. One of 5 fails, and does so again when it is measured."""
    slow = "* (1 / 0 if (n := len(ids)) == 5 else 1 if n != 6 or n in SEEN else SEEN.add(n) or time.sleep(0.3) or 1)"
    request: dict[str, object] = {"model": write_model(tmp_path, slow), "engine": "torch", "device": "cpu"}
    request |= {"batches": [5, 6], "lengths": [8], "first_calls": True}
    commands = "".join(f'{{"batch": {batch}, "length": 8, "seconds": 0.01}}\n' for batch in (6, 5, 6))
    worker = [sys.executable, "-P", "-m", "servers.measuring.worker"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*worker, json.dumps(request)], input=commands, capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    ready, first, failed, again = map(json.loads, done.stdout.splitlines())
    assert "ready" in ready
    assert "ZeroDivisionError" in failed["error"]
    assert first["measured"]["first_call_ns"] > 0.3e9
    assert again["measured"]["first_call_ns"] < 0.3e9


def test_the_worker_ends_with_its_input_and_goes_on_after_a_bad_command(tmp_path: Path) -> None:
    request = {"model": write_model(tmp_path), "engine": "torch", "device": "cpu", "batches": [2], "lengths": [8]}
    commands = '{"batch": 2, "length": 9}\nnonsense\n{"batch": 2, "length": 8, "seconds": 0.01}\n'
    done = subprocess.run(
        [sys.executable, "-P", "-m", "servers.measuring.worker", json.dumps(request)],
        input=commands, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [next(iter(answer)) for answer in answers] == ["ready", "error", "error", "measured"]
    assert "a library greets" in done.stderr


def test_a_model_that_cannot_be_loaded_is_an_error_of_its_configurations(tmp_path: Path) -> None:
    plan = planned(tmp_path, write_model(tmp_path), engines=("torch",), modes=("eager",), rounds=2, batches=(1,))
    write_model(tmp_path, "+ missing")
    (visit,) = measured(tmp_path, plan)["torch/eager"]
    assert visit.cells == ()
    assert "missing" in str(visit.error)


@pytest.mark.slow  # by default tests/unit/measuring/test_generation.py
def test_a_language_model_is_measured_and_judged_in_processes_of_their_own(tmp_path: Path) -> None:
    """A mixture of experts, by abserve's engine and by transformers', and what a wrong one is told."""
    config = {
        "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "vocab_size": 256, "hidden_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
        "intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 12,
        "max_position_embeddings": 256, "eos_token_id": 0, "pad_token_id": 0, "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = MatrixSettings(
        models=(f"language:{tmp_path}",), engines=("slots",), precisions=("bf16",), batches=(1, 2),
        sequence_lengths=(8, 999), threads=(1,), rounds=1, seconds=0.01, device="cpu",
    )  # fmt: skip
    offers = read_offers("cpu", ENGINE_WORKER, kind=Kind.TOKENS)
    wanted = expand(asked, offers)
    plan = make_plan(asked, offers, wanted, check(requests_of(asked, wanted, offers), ENGINE_WORKER))
    assert [each.engine_mode for each in plan.configurations] == ["slots/eager", "continuous/paged"]
    assert "at most 191 here" in plan.refused[0].reason
    visits = measured(tmp_path, plan)
    for (visit,) in visits.values():
        assert visit.error is None, visit.error
        assert visit.item == "token"
        for cell in visit.cells:
            assert cell.generated is not None
            assert len(cell.generated.answers) == cell.batch
            assert cell.generated.context > 8 + 32
    given = [visit for group in visits.values() for visit in group]
    cells = judge_visits(plan, given, tmp_path, ABSERVE).cells
    assert len(cells) == 4
    assert not any(wrong_answers(cell) or cell.error for cell in cells)
    other = msgspec.structs.replace(plan, settings={**plan.settings, "weights": "random:1"})
    assert all(wrong_answers(cell) for cell in judge_visits(other, given, tmp_path, ABSERVE).cells)
