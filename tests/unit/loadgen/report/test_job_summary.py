"""The summary of a step in GitHub Actions stays within the limit, and never ends a command."""

from __future__ import annotations

from pathlib import Path

from loadgen.report.files import CUT, MOST_SUMMARY_BYTES, STEP_SUMMARY, append_job_summary


def test_nothing_without_the_variable(tmp_path: Path) -> None:
    assert append_job_summary("# x", {}) is None
    assert append_job_summary("# x", {STEP_SUMMARY: ""}) is None
    assert list(tmp_path.iterdir()) == []


def test_summaries_of_one_step_follow_each_other(tmp_path: Path) -> None:
    path = tmp_path / "summary.md"
    for words in ("# one\n", "# two\n"):
        assert append_job_summary(words, {STEP_SUMMARY: str(path)}) is None
    assert path.read_text() == "# one\n\n# two\n\n"


def test_a_long_summary_is_cut_at_a_line(tmp_path: Path) -> None:
    path = tmp_path / "summary.md"
    path.write_text("before\n")
    assert append_job_summary("é 0123456789\n" * 100_000, {STEP_SUMMARY: str(path)}) is None
    text = path.read_text()
    assert MOST_SUMMARY_BYTES - 20 <= path.stat().st_size <= MOST_SUMMARY_BYTES
    assert text.endswith(f"é 0123456789\n{CUT}")
    assert append_job_summary("# later\n", {STEP_SUMMARY: str(path)}) is None
    assert path.stat().st_size <= MOST_SUMMARY_BYTES


def test_one_long_line_is_left_out_and_said(tmp_path: Path) -> None:
    path = tmp_path / "summary.md"
    assert append_job_summary("x" * MOST_SUMMARY_BYTES, {STEP_SUMMARY: str(path)}) is None
    assert path.read_text() == CUT


def test_a_file_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    warning = append_job_summary("# x", {STEP_SUMMARY: str(tmp_path)})
    assert warning is not None
    assert warning.startswith(f"no job summary: {tmp_path} (GITHUB_STEP_SUMMARY) cannot be written: ")
