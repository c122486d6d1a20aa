"""Servers of streamed tokens with a planted truth, the real load generator between them, and what must come out.

All go through real sockets. Several truths share a comparison, each in an arm of its own beside the sound baseline A;
the slow tests repeat them in pairs, in which there are rounds enough for a winner.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from loadgen.findings.tokens import TokensFound
from loadgen.measure import load_runner
from loadgen.measure.probes import fairness
from loadgen.records.run import TokenLimits
from loadgen.verdict.result import Result
from tests.again import Repeatable, again
from tests.truth.streams import compare_streams, failed, poisson, users, value, winner_of

BUSY_MS = 0.2
"""By so much the median pace of two like servers may differ where other programs use the machine."""
SOUND = "--first-ms 8 --step-ms 2"


@pytest.fixture(scope="module")
def timed(tmp_path_factory: pytest.TempPathFactory) -> Repeatable:
    """Truths about time: nothing but how and when the tokens come differs."""
    arms = (
        SOUND,
        SOUND,  # b: the same server
        "--first-ms 8 --step-ms 3",  # c: 1 ms more per token
        "--first-ms 28 --step-ms 2",  # d: 20 ms more before the first
        f"{SOUND} --chunk-tokens 4",  # e
        f"{SOUND} --first-tokens 8",  # f
        f"{SOUND} --early-empty-ms 6",  # g
        f"{SOUND} --gap-share 0.01 --gap-ms 300",  # h
    )
    folder = tmp_path_factory.mktemp("timed")

    def compare(time: int) -> Result:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(load_runner, "WARM_UP_SECONDS", 0.2)
            patch.setattr(fairness, "GROUPS", 8)
            return compare_streams(folder / f"run{time}", arms, users(8, 64, 2))

    return Repeatable(compare)


@again
def test_the_same_server_twice_has_no_winner(timed: Result) -> None:
    for metric in ("output_tokens_per_s", "tpot", "ttft"):
        assert winner_of(timed, metric, "b") is None


@again
def test_a_millisecond_per_token_is_in_the_pace_alone(timed: Result) -> None:
    assert value(timed, "tpot_p50", "c") - value(timed, "tpot_p50", "a") == pytest.approx(1.0, abs=BUSY_MS)
    assert value(timed, "ttft", "c") == pytest.approx(value(timed, "ttft", "a"), abs=3.0)


@again
def test_a_wait_before_the_first_token_is_in_the_ttft_alone(timed: Result) -> None:
    assert value(timed, "ttft", "d") - value(timed, "ttft", "a") == pytest.approx(20.0, abs=3.0)
    assert value(timed, "tpot_p50", "d") == pytest.approx(value(timed, "tpot_p50", "a"), abs=BUSY_MS)


@again
def test_chunks_of_four_tokens_change_the_gaps_and_nothing_else(timed: Result) -> None:
    assert value(timed, "tokens_per_chunk", "e") == pytest.approx(32 / 9, abs=0.01)
    assert value(timed, "tpot_p50", "e") == pytest.approx(value(timed, "tpot_p50", "a"), abs=BUSY_MS)
    ratio = value(timed, "output_tokens_per_s", "e") / value(timed, "output_tokens_per_s", "a")
    assert ratio == pytest.approx(1.0, abs=0.08)
    assert value(timed, "gap_p50", "e") == 0.0
    assert f"{timed.names['e']} 3.56" in failed(timed, "chunk_sizes").detail


@again
def test_tokens_of_the_first_chunk_leave_the_pace_alone(timed: Result) -> None:
    assert value(timed, "tpot_p50", "f") == pytest.approx(value(timed, "tpot_p50", "a"), abs=BUSY_MS)
    assert value(timed, "output_tokens_per_s", "f") > 1.05 * value(timed, "output_tokens_per_s", "a")


@again
def test_a_chunk_without_tokens_is_no_first_token(timed: Result) -> None:
    assert value(timed, "ttft", "g") == pytest.approx(value(timed, "ttft", "a"), abs=3.0)


@again
def test_the_worst_gap_finds_stalls_that_the_typical_pace_hides(timed: Result) -> None:
    worst = {total.label: total.worst_gap_ms or 0.0 for total in timed.of(TokensFound).totals}
    assert worst["h"] > 290.0
    assert worst["a"] < 200.0
    assert value(timed, "tpot_p50", "h") == pytest.approx(value(timed, "tpot_p50", "a"), abs=BUSY_MS)
    assert f"of {timed.names['h']} stalled" in failed(timed, "stalled_answers").detail


@again
def test_all_of_these_are_valid(timed: Result) -> None:
    busy = ("generator_cpu", "generator_scheduled", "other_processes", "warm_up")
    against = [made for made in timed.checks if made.severity == "invalidates" and made.ok is not True]
    assert [made.detail for made in against if made.name not in busy] == []


@pytest.mark.parametrize("hidden", ["", pytest.param("--cache-hidden", marks=pytest.mark.slow)])
def test_a_prefix_cache_is_found(tmp_path: Path, hidden: str) -> None:
    """B has the first token of a prompt that it has seen at once; the load never repeats one."""
    quick = "--first-ms 20 --step-ms 1"
    result = compare_streams(tmp_path / "run", (quick, f"{quick} --cache {hidden}"), users(4, 12, 2))
    assert f"{result.names['b']} answers from a cache" in failed(result, "repeated_requests").detail
    assert not result.valid


@pytest.mark.slow
def test_an_arm_that_drops_requests_is_faster_and_has_less_goodput(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both slow down with every request under way; B refuses the third one, and so looks faster."""
    monkeypatch.setattr(load_runner, "WARM_UP_SECONDS", 0.0)
    slow = "--first-ms 10 --step-ms 2 --crowd-ms 1"
    limits = TokenLimits(ttft_ms=500.0, tpot_ms=100.0)
    arms = (slow, f"{slow} --good-first 120 --refuse-from 2")
    result = compare_streams(tmp_path / "run", arms, poisson(20.0, 2.0, 4, limits))
    assert value(result, "tpot", "b") < value(result, "tpot", "a")
    assert value(result, "goodput", "b") < 0.95 * value(result, "goodput", "a")
    assert value(result, "good_share", "a") > 0.95
    errors = next(made for made in result.checks if made.name == "request_errors")
    assert (errors.ok, errors.severity) == (False, "warns")


def limit_generator(samples: Path, core: int, ended: threading.Event) -> None:
    """As soon as a block begins, leave the load generator one core, on which the kernel prefers everything else."""
    while not list(samples.glob("*.part")) and not ended.wait(0.02):
        pass
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "loadgen.client.worker" in process.cmdline():
                process.cpu_affinity([core])
                process.nice(19)


@pytest.mark.slow
def test_a_load_generator_without_a_core_has_no_winner(tmp_path: Path) -> None:
    """A dozen programs that never rest share the generator's only core."""
    core, ended = min(os.sched_getaffinity(0)), threading.Event()
    rests_never = f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    # In sessions of their own: the kernel may share a core between sessions first.
    busy = [subprocess.Popen([sys.executable, "-c", rests_never], start_new_session=True) for _ in range(12)]
    limiter = threading.Thread(target=limit_generator, args=(tmp_path / "run" / "samples", core, ended))
    limiter.start()
    try:
        result = compare_streams(tmp_path / "run", ["--first-ms 5 --step-ms 2"] * 2, users(16, 64, 2))
    finally:
        ended.set()
        limiter.join()
        for process in busy:
            process.kill()
            process.wait()
    assert "waited for a core" in failed(result, "generator_scheduled").detail
    assert not result.valid
    assert {made.verdict for made in result.comparisons} == {"invalid"}
