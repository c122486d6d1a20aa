"""Stored ablations become causes in the result and in every report; broken ones are reported as untested."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from loadgen.findings.causes import AS_IS, WITHOUT, Ablation, CauseName, CausesFound, Explanation, Untested
from loadgen.records.probes import Variant
from loadgen.records.run import Experiment, Label, Workload
from loadgen.report.contents import result_document
from loadgen.report.renderers.html import render_html
from loadgen.report.renderers.markdown import render_markdown
from loadgen.report.renderers.terminal import print_document
from loadgen.verdict.result import Result, analyse, encode_result, read_result
from tests.golden.synthetic_run import Plan, SimulatedArm, write_run

PLAN = Plan(a=SimulatedArm(transport_ms=1.0), b=SimulatedArm(transport_ms=11.0), pairs=4, requests=80)
VARIANT = Variant(payload="fp32", transport="http", settings={})


def explain(directory: Path, cause: CauseName, label: Label, as_is: Label, without: Label, number: int = 0) -> Ablation:
    """An ablation of `single` whose blocks are the run's own: those of one arm, and the other's in the place of
    the same arm without the cause."""
    experiment = msgspec.json.decode((directory / "experiment.json").read_bytes(), type=Experiment)
    workload: Workload = next(workload for workload in experiment.workloads if workload.name == "single")
    ablation = Ablation(
        number=number, cause=cause, label=label, changed="removed", as_is=VARIANT, without=VARIANT,
        workloads=(workload,)
    )  # fmt: skip
    folder = directory / ablation.folder
    (folder / "blocks").mkdir(parents=True)
    (folder / "samples").mkdir()
    for path in sorted((directory / "blocks").glob("*.json")):
        block = json.loads(path.read_text())
        roles = [role for role, arm in ((AS_IS, as_is), (WITHOUT, without)) if arm == block["label"]]
        for role in roles if block["workload"] == "single" else []:
            name = f"{block['index']:04d}{role}"
            (folder / "blocks" / f"{name}.json").write_text(
                json.dumps({**block, "label": role, "samples": f"samples/{name}.npy"})
            )
            for kind in ("", ".events", ".answers"):
                path = directory / block["samples"].replace(".npy", f"{kind}.npy")
                if path.exists():
                    shutil.copy(path, folder / "samples" / f"{name}{kind}.npy")
    return ablation


def write_explained(
    directory: Path,
    *,
    as_is: Label = "b",
    without: Label = "a",
    untested: tuple[Untested, ...] = (),
    plan: Plan = PLAN,
) -> Path:
    """B without its transfer is as fast as A."""
    write_run(directory, plan)
    done = explain(directory, "transfer", "b", as_is, without)
    record = Explanation(workloads=("single",), left_out=("batched(4)",), done=(done,), untested=untested)
    (directory / "causes.json").write_bytes(msgspec.json.encode(record))
    path = directory / "experiment.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"explain": True}))
    return directory


def shown(result: Result) -> str:
    stream = io.StringIO()
    print_document(result_document(result), Console(file=stream, width=100, color_system=None))
    return " ".join(stream.getvalue().split())


def test_the_whole_difference_is_the_cause_that_takes_it_away(tmp_path: Path) -> None:
    result = analyse(write_explained(tmp_path))
    (causes,) = result.of(CausesFound).workloads
    assert causes.slower == "b"
    assert causes.difference_ms == pytest.approx(10.0, abs=1.5)
    (cause,) = causes.causes
    assert (cause.name, cause.found) == ("transfer", True)
    assert cause.share == pytest.approx(1.0)
    assert cause.effects[0].folder == "causes/00-transfer-b"
    assert causes.unattributed_ms == pytest.approx(0.0, abs=1e-9)
    assert "100 % payload transfer of Triton, 0 % unattributed." in causes.sentence
    (scenario,) = [entry for entry in result.verdict.scenarios if entry.workload == "single"]
    assert scenario.reasons[0] == causes.sentence


@pytest.mark.parametrize("cosine", [0.999_998, 0.5])
def test_no_report_of_an_invalid_workload_calls_an_arm_faster(tmp_path: Path, cosine: float) -> None:
    write_explained(tmp_path, plan=replace(PLAN, parity_cosine=cosine))
    result = analyse(tmp_path)
    document = result_document(result)
    for text in (shown(result), render_markdown(document), render_html(document), encode_result(result).decode()):
        assert ("× faster than" in text) == result.valid == (cosine > 0.9)
        assert "100 % payload transfer of Triton, 0 % unattributed." in text


def test_of_three_arms_each_has_its_own_causes_beside_the_baseline(tmp_path: Path) -> None:
    """B without its transfer is as fast as A; C without its transfer is as fast as B."""
    write_run(tmp_path, replace(PLAN, others=(SimulatedArm(transport_ms=31.0),)))
    done = tuple(
        explain(tmp_path, "transfer", label, label, without, number)
        for number, (label, without) in enumerate([("b", "a"), ("c", "b")])
    )
    barred = Untested(cause="compute", label="c", reason="given by URL")
    record = Explanation(workloads=("single",), left_out=(), done=done, untested=(barred,))
    (tmp_path / "causes.json").write_bytes(msgspec.json.encode(record))
    result = analyse(tmp_path)
    b, c = result.of(CausesFound).workloads
    assert [entry.pairing for entry in (b, c)] == [("a", "b"), ("a", "c")]
    assert [entry.difference_ms for entry in (b, c)] == pytest.approx([10.5, 31.5], abs=1.0)
    assert "100 % payload transfer of Triton, 0 % unattributed." in b.sentence
    assert "67 % payload transfer of native (C), 33 % unattributed." in c.sentence
    assert [cause.name for cause in b.causes] == ["transfer"]
    assert [[entry.label for entry in cause.effects] for cause in (*b.causes, *c.causes)] == [["b"], ["c"], []]
    assert any("compute (native (C): given by URL)" in note for note in c.notes)
    reasons = {entry.arm: entry.reasons[0] for entry in result.verdict.scenarios if entry.workload == "single"}
    assert reasons == {"b": b.sentence, "c": c.sentence}


def test_every_report_shows_it(tmp_path: Path) -> None:
    result = analyse(write_explained(tmp_path))
    page, text = render_html(result_document(result)), render_markdown(result_document(result))
    for document in (page, text, shown(result)):
        assert "100 % payload transfer of Triton" in document
        assert "No time was left for batched(4): raise --explain-minutes." in document
    assert "Causes of the difference in single" in page
    assert 'data-figure="causes-figure"' in page
    assert "causes/00-transfer-b" in text
    (tmp_path / "result.json").write_bytes(encode_result(result))
    assert read_result(tmp_path / "result.json") == result


def test_a_run_without_ablations_says_so(tmp_path: Path) -> None:
    result = analyse(write_run(tmp_path, PLAN))
    assert result.of(CausesFound).workloads == ()
    for text in (shown(result), render_markdown(result_document(result))):
        assert "no ablation was run; add" in text


def test_a_run_that_ended_before_its_ablations_says_so(tmp_path: Path) -> None:
    write_explained(tmp_path)
    (tmp_path / "causes.json").unlink()
    assert "the run ended before its ablations" in shown(analyse(tmp_path))


def test_a_run_that_was_interrupted_between_ablations_says_so(tmp_path: Path) -> None:
    write_explained(tmp_path)
    path = tmp_path / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"state": "interrupted"}))
    assert "The run ended before all ablations were done." in shown(analyse(tmp_path))


def test_arms_that_take_the_same_time_have_nothing_to_explain(tmp_path: Path) -> None:
    write_explained(tmp_path)
    nothing = Explanation(workloads=(), left_out=(), done=(), untested=())
    (tmp_path / "causes.json").write_bytes(msgspec.json.encode(nothing))
    assert "so no ablation was run." in shown(analyse(tmp_path))


def test_a_workload_with_failed_requests_shows_nothing(tmp_path: Path) -> None:
    write_explained(tmp_path)
    path = sorted((tmp_path / "causes" / "00-transfer-b" / "blocks").glob("*.json"))[0]
    block = json.loads(path.read_text())
    path.with_suffix(".json").write_text(json.dumps(block | {"errors": 2, "error_messages": ["HTTP 503: full"]}))
    (causes,) = analyse(tmp_path).of(CausesFound).workloads
    (cause,) = causes.causes
    assert (cause.effects, cause.found, cause.difference_ms) == ((), False, None)
    assert "2 of" in cause.untested[0].reason
    assert any(note.startswith("Not tested: payload transfer") for note in causes.notes)


def test_blocks_that_are_gone_are_untested_and_not_a_crash(tmp_path: Path) -> None:
    write_explained(tmp_path)
    shutil.rmtree(tmp_path / "causes")
    (causes,) = analyse(tmp_path).of(CausesFound).workloads
    assert causes.causes[0].untested[0].reason == "no pair of blocks is complete"


def test_an_arm_that_is_no_faster_without_it_has_no_such_cause(tmp_path: Path) -> None:
    result = analyse(write_explained(tmp_path, as_is="b", without="b"))
    assert [cause.found for cause in result.of(CausesFound).workloads[0].causes] == [False]
