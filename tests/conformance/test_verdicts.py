"""A correct server conforms, and each planted fault is named."""

from __future__ import annotations

import pytest

from loadgen.conformance.case import Case, http, infers
from loadgen.conformance.records import CaseResult, CaseVerdict
from loadgen.conformance.runner import CaseRun


def failures(results: dict[str, CaseResult]) -> dict[str, str]:
    return {
        number: f"{result.verdict.value}: {result.reason} (got {result.got})"
        for number, result in results.items()
        if result.verdict in (CaseVerdict.DEVIATES, CaseVerdict.CRASHED)
    }


def test_a_correct_server_conforms(run_cases) -> None:
    results = run_cases("1,2,3,4,5,6,7,8,10,11,13,15,17,18,19,20,21,22,23,24,33a,34a,34b")
    assert failures(results) == {}
    conforming = [number for number, result in results.items() if result.verdict is CaseVerdict.CONFORMS]
    assert len(conforming) > 50
    grpc = [result for result in results.values() if result.protocol == "grpc"]
    assert grpc
    assert all(result.verdict is CaseVerdict.NOT_APPLICABLE for result in grpc)


def test_a_new_case_is_one_row(sessions) -> None:
    rows = (
        Case("36a", "a shape of words", infers({"inputs": [{"name": "x", "shape": "wide"}]}), "400"),
        Case("36b", "an unknown route that is expected to be there", http("GET /v2/no"), "200"),
    )
    results = CaseRun(sessions(), destructive=False).run(rows, announce=lambda _: None)
    assert [result.verdict for result in results] == [CaseVerdict.CONFORMS, CaseVerdict.DEVIATES]


@pytest.mark.slow
def test_queueing_of_a_correct_server_conforms(run_cases) -> None:
    results = run_cases("14,28a,29a", row_ms="40")
    assert failures(results) == {}
    assert all(result.verdict is CaseVerdict.CONFORMS for result in results.values())


@pytest.mark.slow
def test_start_and_end_of_a_correct_server_conform(run_cases) -> None:
    results = run_cases("31a,31c,31d,32a", row_ms="40", startup_ms="1200")
    assert failures(results) == {}
    assert all(result.verdict is CaseVerdict.CONFORMS for result in results.values())


@pytest.mark.parametrize(
    ("fault", "case", "words"),
    [
        ("500-for-bad-json", "1a", "500 instead of 400"),
        ("plain-errors", "15a", "not JSON"),
        ("traceback", "4a", "traceback"),
        ("accept-any-output", "18e", "200 instead of 400"),
        ("drift", "15a", "golden inference"),
        pytest.param("hang-on-deep-json", "2a", "live within 2 s during the case", marks=pytest.mark.slow),
        ("count-departures-as-failures", "13", "failures"),
    ],
)
def test_a_fault_is_named(run_cases, fault: str, case: str, words: str) -> None:
    result = run_cases(case, fault)[case]
    assert result.verdict is CaseVerdict.DEVIATES
    assert words in result.reason


@pytest.mark.parametrize(
    ("fault", "case", "words"),
    [
        ("execute-for-nobody", "14", "4 of 4"),
        pytest.param("no-retry-after", "28a", "Retry-After", marks=pytest.mark.slow),
        pytest.param("late-timeout", "29a", "promptly", marks=pytest.mark.slow),
        ("drop-work", "31a", "instead of 200"),
    ],
)
def test_a_fault_of_the_queue_is_named(run_cases, fault: str, case: str, words: str) -> None:
    result = run_cases(case, fault, row_ms="40")[case]
    assert result.verdict is CaseVerdict.DEVIATES
    assert words in result.reason


def test_a_crash_is_a_result_and_the_run_goes_on(run_cases) -> None:
    results = run_cases("1a,2b,2c,15a", "die-on-deep-json")
    assert results["2b"].verdict is CaseVerdict.CRASHED
    assert results["2b"].reason == "was killed by SIGSEGV"
    assert results["2c"].verdict is CaseVerdict.CRASHED
    assert results["1a"].verdict is results["15a"].verdict is CaseVerdict.CONFORMS


@pytest.mark.slow
def test_slow_clients(run_cases) -> None:
    assert run_cases("12b")["12b"].verdict is CaseVerdict.CONFORMS
    assert run_cases("12a", "no-deadline")["12a"].verdict is CaseVerdict.DEVIATES
