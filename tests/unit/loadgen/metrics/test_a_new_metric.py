"""A metric is registered once: then it is compared, bounded by thresholds, stored and in every report."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from loadgen.metrics.registry import METRICS, Metric, has_blocks, register
from loadgen.metrics.summaries import figure_of
from loadgen.records.samples import NS_PER_MS, Samples
from loadgen.report.contents import result_document
from loadgen.report.renderers.markdown import render_markdown
from loadgen.report.renderers.tables import render_csv, render_junit
from loadgen.stats.percentiles import Values
from loadgen.verdict.result import Result, analyse, encode_result, read_result
from tests.golden.synthetic_run import Plan, workloads, write_run


def time_to_first_byte_ms(samples: Samples) -> Values:
    return np.asarray((samples["first_byte_ns"] - samples["intended_ns"]) / NS_PER_MS, dtype=np.float64)


@pytest.fixture
def first_byte() -> Iterator[Metric]:
    yield register(
        Metric(
            "first_byte_p99_9",
            "p99.9 time to first byte",
            "ms",
            higher_is_better=False,
            measured_in=has_blocks,
            compared_in=has_blocks,
            of_requests=time_to_first_byte_ms,
            quantile=0.999,
        )
    )
    del METRICS["first_byte_p99_9"]


@pytest.fixture
def bytes_back() -> Iterator[Metric]:
    """A figure of whole blocks, which has no values per request."""
    yield register(
        Metric(
            "bytes_back",
            "bytes per response",
            "bytes",
            higher_is_better=False,
            measured_in=has_blocks,
            compared_in=has_blocks,
            of_block=lambda samples, _: float(samples["response_bytes"].mean()),
        )
    )
    del METRICS["bytes_back"]


def analysed(directory: Path, *conditions: str) -> Result:
    """Blocks long enough for a p99.9 of all of them together."""
    write_run(directory, Plan(pairs=4, workloads=workloads(4, 1800)[-1:]))
    path = directory / "experiment.json"
    document = msgspec.json.decode(path.read_bytes())
    path.write_bytes(msgspec.json.encode(document | {"settings": {"fail_if": list(conditions)}}))
    return analyse(directory)


def test_a_registered_metric_is_in_comparisons_thresholds_report_and_csv(first_byte: Metric, tmp_path: Path) -> None:
    result = analysed(tmp_path / "run", "b.first_byte_p99_9 > 0.001", "ratio.first_byte_p99_9 > 1000")
    (comparison,) = [c for c in result.comparisons if c.metric == first_byte.name]
    assert comparison.unit == "ms"
    assert comparison.method == "order statistics"
    assert comparison.baseline_value is not None
    assert comparison.ratio == pytest.approx(0.68, abs=0.03), "B is as much faster as in its latencies"
    assert [outcome.state for outcome in result.thresholds] == ["broken", "kept"]
    (of_a,) = [summary for summary in result.summaries if summary.label == "a"]
    assert figure_of(of_a, first_byte) == pytest.approx(comparison.baseline_value, rel=0.1)

    document = result_document(result)
    page = render_markdown(document)
    assert "p99.9 time to first byte, ms" in page
    assert "first_byte_p99_9" in render_csv({"": document}, "comparisons")
    assert "first_byte_p99_9" in render_csv({"": document}, "blocks").splitlines()[0]
    assert "p99.9 time to first byte" in render_junit({"": document})
    path = tmp_path / "result.json"
    path.write_bytes(encode_result(result))
    assert read_result(path) == result


def test_a_figure_of_whole_blocks_is_paired_by_round(bytes_back: Metric, tmp_path: Path) -> None:
    result = analysed(tmp_path / "run", "b.bytes_back.low > 1")
    (comparison,) = [c for c in result.comparisons if c.metric == bytes_back.name]
    assert comparison.pairs == 4
    assert comparison.baseline_value
    assert comparison.arm_value
    blocks = [figure_of(block, bytes_back) for block in result.blocks]
    assert all(blocks)
    assert {summary.label for summary in result.summaries if figure_of(summary, bytes_back)} == {"a", "b"}


def test_a_result_without_further_metrics_is_stored_as_before(tmp_path: Path) -> None:
    content = encode_result(analysed(tmp_path / "run"))
    assert b"first_byte" not in content


def test_two_metrics_cannot_have_one_name(first_byte: Metric) -> None:
    with pytest.raises(ValueError, match="two metrics first_byte_p99_9"):
        register(first_byte)
