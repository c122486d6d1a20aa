"""Servers that are fast because they are wrong, or because they remember: none of them may be VALID.

Every fault is planted in B and goes through real sockets, the real generator and the whole analysis. The slow ones are
variations of those in the default run.
"""

from __future__ import annotations

import sys

import msgspec
import pytest

from loadgen.records.run import Workload
from loadgen.verdict.result import Result
from tests.again import again
from tests.truth.conftest import Compare, state

USERS = 16


def users(requests: int = 160, *, pairs: int = 2, concurrency: int = USERS) -> Workload:
    return Workload(
        scenario="concurrent", batch_size=1, concurrency=concurrency, requests=requests, seconds=0.0, max_seconds=30.0,
        rounds=pairs,
    )  # fmt: skip


def batches(batch_size: int, requests: int = 20, *, pairs: int = 2) -> Workload:
    return Workload(
        scenario="batched", batch_size=batch_size, concurrency=1, requests=requests, seconds=0.0, max_seconds=30.0,
        rounds=pairs,
    )  # fmt: skip


def require_invalid(result: Result, check: str, *words: str) -> None:
    """No comparison that the check covers has a verdict, for the reason given."""
    failed = [made for made in result.checks if made.name == check and made.ok is False]
    told = " ".join(check.detail for check in failed)
    sys.stdout.write(f"\n{check}: {told}\n")
    assert failed
    assert not result.valid
    scopes = {check.scope for check in failed}
    covered = [c for c in result.comparisons if scopes & {"run", f"workload {c.workload}"}]
    assert {comparison.verdict for comparison in covered} <= {"invalid"}
    for word in words:
        assert word in told


def test_answers_that_are_wrong_only_under_load(compare: Compare) -> None:
    """From 12 requests in flight, which neither parity nor a single user ever makes; and of every fifth of those under
    load a quarter is missing."""
    server = "--delay-ms 4 --no-spin"
    planted = f"{server} --fault wrong --fault-from 12 --good-first 234 --short-every 5"
    result = compare(server, planted, users(), batches(1))
    require_invalid(result, "answers_under_load", " are wrong", "output y")
    require_invalid(result, "request_errors", "output y is FP32 [1, 6] instead of FP32 [1, 8]")
    assert state(result, "parity") is True
    scopes = {check.scope for check in result.checks if check.name == "answers_under_load" and check.ok is False}
    assert scopes == {f"workload {users().name}"}, "the single user's answers were right"


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["http", "grpc"])
@pytest.mark.parametrize("fault", ["zeros", "nan"])
def test_answers_that_are_zeros_or_nan_only_under_load(compare: Compare, fault: str, transport: str) -> None:
    server = "--delay-ms 4 --no-spin"
    result = compare(server, f"{server} --fault {fault} --fault-from 12", users(), transport=transport)
    require_invalid(result, "answers_under_load", " are wrong", "output y")


@pytest.mark.slow
def test_answers_that_are_wrong_in_an_open_loop_of_two_processes(compare: Compare) -> None:
    workload = Workload(
        scenario="open", batch_size=1, concurrency=64, requests=1, seconds=1.0, max_seconds=1.0, rounds=2,
        arrivals="poisson", rate_per_s=400.0,
    )  # fmt: skip
    server = "--delay-ms 40 --no-spin"
    result = compare(server, f"{server} --fault zeros --fault-from 12", workload, processes=2)
    require_invalid(result, "answers_under_load", " are wrong")


def wrong_scopes(result: Result) -> set[str]:
    """The workloads whose answers are wrong."""
    wrong = [check for check in result.checks if check.name == "answers_under_load" and check.ok is False]
    return {check.scope.removeprefix("workload ") for check in wrong}


def test_answers_that_are_wrong_only_in_large_merged_batches(compare: Compare) -> None:
    """B executes what waits together, and is wrong from 12 items on: never with 4 users, with 32 nearly always."""
    few, many = users(concurrency=4), users(320, concurrency=32)
    server = "--delay-ms 4 --no-spin --merge"
    result = compare(server, f"{server} --fault wrong --fault-from-merged 12 --good-first 234", few, many)
    require_invalid(result, "answers_under_load", "of 64 answers of ", " are wrong: block ", "output y of item 1 has")
    assert wrong_scopes(result) == {many.name}
    assert state(result, "parity") is True
    assert f"In {many.name}, " in result.verdict.failed[0]
    assert "request " in result.verdict.failed[0]


def test_a_server_that_merges_requests_and_is_right_is_not_blamed(compare: Compare) -> None:
    server = "--delay-ms 4 --no-spin --merge"
    result = compare(server, server, users(concurrency=4), users(320, concurrency=32), batches(16))
    for check in ("parity", "answers_under_load", "answers_depend_on_inputs", "request_errors"):
        assert state(result, check) is True, check
    compared = [check.detail for check in result.checks if check.name == "answers_under_load"]
    assert all(detail.startswith("128 answers ") for detail in compared[:2]), compared


def test_answers_that_are_wrong_under_load_only_at_batch_16(compare: Compare) -> None:
    """They were right in the parity check, before the load."""
    result = compare("", "--wrong-batch 16 --good-first 234", batches(8, 64), batches(16, 64), batches(32, 64))
    require_invalid(result, "answers_under_load", " are wrong: block ", "output y of item ")
    assert wrong_scopes(result) == {"batched(16)"}
    assert state(result, "parity") is True


@pytest.mark.slow  # by default the answers that are wrong only under load
def test_answers_that_are_wrong_only_under_overload(compare: Compare) -> None:
    """B does 150 requests a second and is wrong while 20 or more wait."""
    calm, stormy = (
        Workload(
            scenario="open", batch_size=1, concurrency=256, requests=1, seconds=1.0, max_seconds=1.0, rounds=2,
            arrivals="poisson", rate_per_s=rate,
        )
        for rate in (60.0, 400.0)
    )  # fmt: skip
    planted = "--delay-ms 1 --no-spin --rate 150 --fault wrong --fault-from 20"
    result = compare("--delay-ms 1 --no-spin", planted, calm, stormy)
    require_invalid(result, "answers_under_load", " are wrong: block ", "output y of item 1 has")
    assert wrong_scopes(result) == {stormy.name}
    assert state(result, "parity") is True


@pytest.mark.parametrize("planted", ["--fault wrong --fault-from-length 32", ""])
def test_answers_that_are_wrong_only_for_long_sequences(compare: Compare, planted: str) -> None:
    """They were right in the parity check, before the load."""
    loads = [
        msgspec.structs.replace(load, sequence_length=length)
        for load in (batches(4, 64), users(200, concurrency=8))
        for length in (16, 48)
    ]
    server = "--sequences --no-spin --good-first 304"
    result = compare(server, f"{server} {planted}", *loads, samples="sequence_samples.py", sequence_length="16,48")
    assert state(result, "parity") is True
    assert {comparison.unit for comparison in result.comparisons if comparison.metric == "throughput"} == {
        "sequences/s"
    }
    if planted:
        require_invalid(result, "answers_under_load", " are wrong: block ", "output y of item ")
    else:
        assert state(result, "answers_under_load") is True
    wrong = {"batched(4, length 48)", "concurrent(8, length 48)"}
    assert wrong_scopes(result) == (wrong if planted else set())


@pytest.mark.parametrize("fault", ["zeros", "nan"])
def test_two_arms_that_are_wrong_alike(compare: Compare, fault: str) -> None:
    """They agree, in that they compute nothing."""
    result = compare(f"--fault {fault}", f"--fault {fault}", batches(1))
    name, words = ("parity", "NaN") if fault == "nan" else ("answers_depend_on_inputs", "do not depend on the inputs")
    require_invalid(result, name, words)


def test_answers_that_are_wrong_only_at_one_batch_size(compare: Compare) -> None:
    result = compare("", "--wrong-batch 16", batches(16), batches(32))
    require_invalid(result, "parity", "batch of 16")
    assert result.blocks == ()


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["http", "grpc"])
@pytest.mark.parametrize("planted", ["--short-every 5", "--hollow-share 0.3"])
def test_answers_with_too_little_in_them_are_errors(compare: Compare, planted: str, transport: str) -> None:
    """A quarter of the outputs in 20 % of the responses, or all of them in 30 %, which come at once besides."""
    server = "--delay-ms 4 --no-spin"
    result = compare(server, f"{server} --good-first 234 {planted}", users(), transport=transport)
    require_invalid(result, "request_errors", "the response does not match the model's metadata")


@pytest.mark.parametrize("planted", ["--scale 100", pytest.param("--fault nan", marks=pytest.mark.slow)])
def test_outputs_of_another_size_are_no_parity(compare: Compare, planted: str) -> None:
    """Logits times 100 point the same way: their cosine is 1."""
    result = compare("", planted, batches(1))
    require_invalid(result, "parity")
    assert result.blocks == ()


@pytest.mark.parametrize(
    "cache",
    [
        "--cache-from 3",
        pytest.param("--cache-from 2", marks=pytest.mark.slow),
        pytest.param("--cache-from 2 --cache-saves 0.34", marks=pytest.mark.slow),
    ],
)
@again
def test_a_response_cache_takes_the_verdict_and_wins_nothing(compare: Compare, cache: str) -> None:
    """B computes each answer in 6 ms and has it, or a third of it, in memory when it is asked again. The load never
    asks again, so what is measured is the 6 ms."""
    result = compare("--delay-ms 6 --no-spin", f"--delay-ms 6 --no-spin {cache}", batches(1, 40))
    require_invalid(result, "repeated_requests", "answers from a cache")
    assert state(result, "answers_under_load") is True
    medians = [summary.latency_ms("p50") or 0.0 for summary in result.summaries]
    assert min(medians) >= 6.0
