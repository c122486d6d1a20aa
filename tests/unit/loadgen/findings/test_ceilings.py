"""Served throughput over that of the engine alone: the sizes compared, what is missing, the warning, every report."""

from __future__ import annotations

import io
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from loadgen.base.quantities import share
from loadgen.findings.ceiling import (
    DIFFERENT_LENGTHS,
    Ceiling,
    Ceilings,
    CeilingsFound,
    EngineDocument,
    EngineShare,
    nearest_size,
)
from loadgen.records.run import Label
from loadgen.report.contents import result_document
from loadgen.report.renderers.html import render_html
from loadgen.report.renderers.markdown import render_markdown
from loadgen.report.renderers.terminal import print_document
from loadgen.verdict.result import Result, analyse, encode_result, read_result
from servers.engines.agreement import Disagreement
from servers.engines.interface import EngineDescription
from servers.measuring.measurement import EngineTimes, Reference, batch_row
from servers.models.registry import DEFAULT_MODEL, get_specification
from tests.golden.synthetic_run import Plan, write_run

SIZES = (1, 2, 4, 8, 16, 32)
SHORT = Plan(pairs=2, requests=60)


def batches(overhead_ms: float, item_ms: float, **more: object) -> list[dict[str, object]]:
    """`items_per_second` is of the execution, which takes half of the call here."""
    times = {size: overhead_ms + item_ms * size for size in SIZES}
    return [{"batch": size, "call_ns": int(ms * 1e6), "items_per_second": size / ms * 2e3, **more}
            for size, ms in times.items()]  # fmt: skip


def written(measured: object, device: str = "cuda:0") -> dict[str, Any]:
    """A document of `abserve engine`."""
    told = EngineDescription("torch", "2", "fp32", "eager", device, 2, 32, "random weights (seed 0)")
    return {
        "schema": "abserve.engine/2", "model": "m", "flops_per_item": 1.0, "engine": asdict(told),
        "matrix_product_tflops": None, "load_seconds": 0.5, "batches": measured, "profile": [{"batch": 4}],
    }  # fmt: skip


def document(overhead_ms: float, item_ms: float) -> dict[str, Any]:
    return written(batches(overhead_ms, item_ms))


def write_measured(directory: Path, *measured: Ceiling) -> Path:
    write_run(directory, SHORT)
    (directory / "ceilings.json").write_bytes(msgspec.json.encode(Ceilings(measured=measured)))
    return directory


def measured_run(directory: Path) -> Path:
    """A's engine alone takes half of what its server takes for a batch; B's was not measured."""
    a = Ceiling(labels=("a",), command="abserve engine", document=document(3.0, 4.5))
    return write_measured(directory, a, Ceiling(labels=("b",), reason="its measurement ended with exit status 1"))


def of(result: Result, workload: str, label: Label = "a") -> EngineShare:
    (engine_share,) = [
        entry for entry in result.of(CeilingsFound).shares if (entry.workload, entry.label) == (workload, label)
    ]
    return engine_share


def shown(result: Result) -> str:
    stream = io.StringIO()
    print_document(result_document(result), Console(file=stream, width=100, color_system=None))
    return " ".join(stream.getvalue().split())


def test_each_workload_is_divided_by_whole_calls_at_its_own_batch_size(tmp_path: Path) -> None:
    result = analyse(measured_run(tmp_path))
    assert {entry.label for entry in result.of(CeilingsFound).shares} == {"a"}
    for workload, size in (("single", 1), ("batched(4)", 4), ("batched(32)", 32)):
        engine_share = of(result, workload)
        (served,) = [s.throughput_per_s for s in result.summaries if (s.workload, s.label) == (workload, "a")]
        assert (engine_share.batch, engine_share.batch_origin) == (size, "request")
        assert engine_share.engine_images_per_s == pytest.approx(size / (3.0 + 4.5 * size) * 1e3)
        assert engine_share.served_images_per_s == served
        assert engine_share.share == pytest.approx(served / engine_share.engine_images_per_s)
    # 6 + 9 n ms in the server and 1 ms of transport, against half of the first
    assert of(result, "single").share == pytest.approx(7.5 / 16, rel=0.1)
    assert of(result, "batched(32)").share == pytest.approx(147 / 295, rel=0.1)


def test_merged_load_is_divided_at_the_size_nearest_to_the_mean_executed_batch(tmp_path: Path) -> None:
    engine_share = of(analyse(measured_run(tmp_path)), "concurrent(16)")
    assert engine_share.executed_batch_mean is not None
    assert engine_share.batch_origin == "mean executed batch"
    assert engine_share.batch == nearest_size(SIZES, engine_share.executed_batch_mean)
    assert engine_share.batch > 1
    assert "its mean executed batch is" in engine_share.sentence


def test_the_nearest_size() -> None:
    assert [nearest_size(SIZES, mean) for mean in (0.5, 1.4, 2.9, 3.0, 11.9, 12.0, 500.0)] == [1, 1, 2, 4, 8, 16, 32]


def test_a_measurement_of_both_arms_counts_for_both(tmp_path: Path) -> None:
    result = analyse(write_measured(tmp_path, Ceiling(labels=("a", "b"), document=document(3.0, 4.0))))
    assert of(result, "single", "a").engine_images_per_s == of(result, "single", "b").engine_images_per_s
    assert result.of(CeilingsFound).missing == ()


def test_what_is_missing_is_said_and_fails_nothing(tmp_path: Path) -> None:
    result = analyse(measured_run(tmp_path))
    (missing,) = result.of(CeilingsFound).missing
    assert (missing.label, missing.workload, missing.reason) == ("b", None, "its measurement ended with exit status 1")
    plain = analyse(write_run(tmp_path / "plain", SHORT))
    assert plain.of(CeilingsFound) == CeilingsFound()
    assert result.valid == plain.valid
    assert {check.name for check in result.checks} - {check.name for check in plain.checks} == {"engine_ceiling"}


def test_a_size_that_was_not_measured_and_a_server_that_tells_no_batches_have_no_share(tmp_path: Path) -> None:
    write_measured(tmp_path, Ceiling(labels=("a",), document=written(batches(3.0, 4.5)[:2])))
    for path in sorted((tmp_path / "blocks").glob("*.json")):
        record = json.loads(path.read_text())
        if record["workload"] == "concurrent(16)":
            path.write_text(json.dumps(record | {"stages": None}))
    result = analyse(tmp_path)
    assert [entry.workload for entry in result.of(CeilingsFound).shares] == ["single", "batched(1)"]
    reasons = {gap.workload: gap.reason for gap in result.of(CeilingsFound).missing}
    assert reasons["batched(8)"] == "that batch size was not measured"
    assert reasons["concurrent(16)"] == "its server does not report its executions"


@pytest.mark.parametrize("lengths", [None, (64, 64), (9, 64)])
def test_sequences_are_compared_at_their_own_length_only(tmp_path: Path, lengths: tuple[int, int] | None) -> None:
    short, long = batches(3.0, 4.5, sizes={"sequence": 64}), batches(6.0, 9.0, sizes={"sequence": 128})
    alone = written([*short, *long])
    write_measured(tmp_path, Ceiling(labels=("a",), document=alone))
    path = tmp_path / "environment.json"
    inputs = dict(zip(("length_min", "length_max"), lengths or (), strict=False))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"inputs": inputs}))
    result = analyse(tmp_path)
    if lengths == (64, 64):
        assert of(result, "batched(4)").engine_images_per_s == pytest.approx(4 / 21 * 1e3)
    else:
        assert result.of(CeilingsFound).shares == ()
        assert {gap.reason for gap in result.of(CeilingsFound).missing} == {DIFFERENT_LENGTHS}


def test_a_share_above_its_ceiling_is_a_warning(tmp_path: Path) -> None:
    result = analyse(write_measured(tmp_path, Ceiling(labels=("a", "b"), document=document(60.0, 4.5))))
    (check,) = [entry for entry in result.checks if entry.name == "engine_ceiling"]
    assert (check.ok, check.severity, check.threshold) == (False, "warns", 1.05)
    highest = max(result.of(CeilingsFound).shares, key=lambda entry: entry.share)
    assert highest.share > 1.05
    assert check.value == pytest.approx(highest.share, abs=1e-4)
    assert f"of {result.names[highest.label]} in {highest.workload}" in check.detail
    assert "take the rest" not in highest.sentence
    assert result.valid == analyse(write_run(tmp_path / "plain", SHORT)).valid


def test_a_share_within_its_ceiling_is_none(tmp_path: Path) -> None:
    (check,) = [entry for entry in analyse(measured_run(tmp_path)).checks if entry.name == "engine_ceiling"]
    assert check.ok is True


def test_every_report_shows_the_table_and_a_sentence_of_each_arm(tmp_path: Path) -> None:
    result = analyse(measured_run(tmp_path))
    best = max(result.of(CeilingsFound).shares, key=lambda entry: entry.served_images_per_s)
    said = (
        f"serves {share(best.share)} of its engine ceiling at batch {best.batch}",
        "server, transport and client take the rest.",
        "Triton has no ceiling: its measurement ended with exit status 1.",
        "Engine ceilings",
    )
    for text in (render_html(result_document(result)), render_markdown(result_document(result)), shown(result)):
        for words in said:
            assert words in text
    row = f"| batched(4) | A | 4 | {4 / 21 * 1e3:.0f} | "
    assert row in render_markdown(result_document(result))
    path = tmp_path / "result.json"
    path.write_bytes(encode_result(result))
    assert read_result(path) == result


def test_on_a_cpu_the_rest_is_also_what_the_cores_are_shared_with(tmp_path: Path) -> None:
    alone = written(batches(3.0, 4.5), device="cpu")
    result = analyse(write_measured(tmp_path, Ceiling(labels=("a",), document=alone)))
    assert of(result, "batched(4)").sentence.endswith("take the rest and share its cores.")


def test_a_run_without_ceilings_says_nothing_of_them(tmp_path: Path) -> None:
    result = analyse(write_run(tmp_path, SHORT))
    for text in (render_html(result_document(result)), render_markdown(result_document(result)), shown(result)):
        assert "Engine ceilings" not in text


def test_a_run_that_was_interrupted_between_measurements_keeps_the_first(tmp_path: Path) -> None:
    result = analyse(write_measured(tmp_path, Ceiling(labels=("a",), document=document(3.0, 4.5))))
    assert {entry.label for entry in result.of(CeilingsFound).shares} == {"a"}
    assert result.of(CeilingsFound).missing == ()


def test_the_record_keeps_what_abserve_engine_writes(tmp_path: Path) -> None:
    """The two sides meet in the file alone; what is not read, as with --profile, is stored as well."""
    times = EngineTimes(4, Reference({}, None), Disagreement({}), 0, [1_000_000] * 7, None)
    told = written([batch_row(times, get_specification(DEFAULT_MODEL), None)])
    path = write_measured(tmp_path, Ceiling(labels=("a",), document=told)) / "ceilings.json"
    (stored,) = msgspec.json.decode(path.read_bytes(), type=Ceilings).measured
    assert stored.document == told
    read = msgspec.convert(told, EngineDocument)
    assert (read.batches[0].call_ns, read.engine["threads"]) == (1_000_000, 2)
