"""Servers by URL that differ in the form of their streams, or in one planted thing: each figure is true or absent.

Every arm makes its first token after 30 ms and 31 further ones in 2 ms each, unless it says otherwise.
"""

from __future__ import annotations

import json
import time
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from loadgen.client.generation import StreamedAnswer
from loadgen.client.outputs import AnswerError
from loadgen.client.token_traffic import ask_tokens
from loadgen.client.transports import InferenceTarget
from loadgen.experiment.prompts import PromptPlan
from loadgen.measure import load_runner
from loadgen.measure.probes import fairness
from loadgen.records.targets import Transport
from loadgen.verdict.result import Result
from tests.again import Repeatable, again
from tests.integration.loadgen.test_language_run import compare
from tests.toy_language_server import toy_process, toy_server
from tests.truth.streams import compare_streams, figure, users, value

QUICK = "--first-ms 30 --step-ms 2"
FIRST_MS, STEP_MS, TOKENS = 30.0, 2.0, 32
ANSWER_MS = FIRST_MS + STEP_MS * (TOKENS - 1)
BUSY_MS = {"ttft": 3.0, "tpot": 0.2, "answer_time": 6.0}
"""By so much the means of two like servers may differ where other programs use the machine."""
PROSE = "--no-ids --words prose"

CHAT = f"--routes chat {PROSE}"
LEGAL = (
    "--framing length", "--framing close", "--framing 1.0", "--content-type ''", "--content-type text/plain",
    "--header-bytes 20000", "--lines crlf", "--lines cr", "--noise comment,ping,empty,retry,json-ping,id", "--no-space",
    "--split-data", "--no-done", "--after-done", "--no-terminator --framing close", "--finish-apart", "--finish eos",
    "--buffer whole --framing length", "--buffer bytes:100", "--buffer first:8", "--buffer last:50%", "--buffer pairs",
    "--buffer halves:1", "--empty-every 1", "--claim-first", "--usage null", "--usage no-details", "--usage-choice",
    """--each '{"error":""}'""", """--each '{"error":{}}'""", """--each '{"error":null}'""", f"{PROSE} --usage end",
    f"{PROSE} --usage never", f"{PROSE} --claim-first", "--no-ids --words pair --usage end --chunk-tokens 2",
    "--no-ids --words varied --usage end", f"{PROSE} --cumulative --usage end", "--like llama.cpp", "--like vllm",
    CHAT, "--routes chat --chat-ids", f"{CHAT} --parts --usage end", f"{CHAT} --tool-call", f"{CHAT} --role-every",
    f"{CHAT} --reasoning 8", f"{CHAT} --reasoning 8 --reasoning-in reasoning --usage end",
    f"{CHAT} --reasoning 8 --reasoning-in hidden --usage end", "--like ollama --routes chat",
    "--like lm-studio --routes chat", "--like tgi --routes chat",
)  # fmt: skip
WRONG = {
    "--gzip": "gzip", "--ndjson": "x-ndjson", "--instead redirect": "/elsewhere", "--instead html": "Log in",
    "--instead error": "server answers error", "--instead 429": "429", "--instead empty": "0 of 16",
    "--no-terminator": "connection closed", "--bad-utf8": "event 1", "--header-bytes 2000000": "header",
    "--repeat-events": "16 tokens", "--changing-id": "id", "--after-finish 3": "finish reason",
    f"{PROSE} --usage-claims 2147483647": "16", f"{PROSE} --usage-claims 17": "17 of 16",
    "--usage-share 0.5": "8 of 16",
    """--each '{"error":{"message":"no memory"}}'""": "no memory", "--strict": "ignore_eos", "--key x": "401",
    "--strict --refuse-like fastapi": "ignore_eos", "--refuse max_tokens --refuse-like openai": "max_completion_tokens",
    "--endless 'data: {\"token_ids\":5}\\n\\n'": "limit", "--endless '\\n'": "limit", "--endless ': x\\n'": "limit",
    f"{CHAT} --reasoning 16 --reasoning-in hidden": "16 tokens",
}  # fmt: skip


def asked(flags: str) -> StreamedAnswer:
    with toy_server(f"--first-ms 2 --step-ms 0.5 {flags}") as server:
        transport: Transport = "chat" if "--routes chat" in flags else "completions"
        return ask_tokens(
            InferenceTarget(transport, server.url, "planted"),
            PromptPlan(low=3, high=4095, seed=7),
            [5, 6, 7],
            16,
            timeout_s=5.0,
        )


@pytest.mark.parametrize("flags", LEGAL)
def test_each_form_of_a_stream_is_an_answer(flags: str) -> None:
    answer = asked(flags)
    assert (answer.output_tokens, sum(chunk.tokens for chunk in answer.chunks)) == (16, 16)
    assert all(chunk.tokens > 0 for chunk in answer.chunks)


@pytest.mark.parametrize("flags", WRONG)
def test_each_wrong_stream_has_failed_in_the_words_of_its_server(flags: str) -> None:
    with pytest.raises(AnswerError, match=WRONG[flags]):
        asked(flags)


class Planted(NamedTuple):
    """The flags of an arm, and its true figures in milliseconds; None: they cannot be known."""

    flags: str = ""
    ttft: float | None = FIRST_MS
    tpot: float | None = STEP_MS
    answer_time: float = ANSWER_MS


TIMES = {
    "a": Planted(),
    "b": Planted(),
    "c": Planted("--first-ms 33", ttft=33.0, answer_time=ANSWER_MS + 3.0),
    "d": Planted("--step-ms 2.1", tpot=2.1, answer_time=ANSWER_MS + 3.1),
    "e": Planted("--chunk-tokens 4 --first-tokens 4 --first-ms 36", ttft=36.0),
    "f": Planted("--buffer whole", None, None),
    "g": Planted("--buffer first:8", ttft=44.0),
    "h": Planted("--buffer bytes:2048", ttft=42.0),
}
"""Each differs by its times, or by how a server or a proxy joins its chunks."""
COUNTS = {
    "a": Planted("--words prose"),
    "b": Planted(f"{PROSE} --usage end --chunk-tokens 8 --first-tokens 8 --first-ms 44", ttft=44.0),
    "c": Planted(f"{PROSE} --claim-first"),
    "d": Planted(f"{PROSE} --routes chat --usage end --reasoning 25% --reasoning-in hidden", ttft=46.0, tpot=None),
    "e": Planted(f"{PROSE} --routes chat --usage end --reasoning 25%"),
    "f": Planted(f"{PROSE} --routes chat --usage null --finish-apart --empty-every 4"),
    "g": Planted(f"{PROSE} --usage never --early-empty-ms 15"),
    "h": Planted(f"{PROSE} --usage end --usage-choice --noise empty,ping --content-type ''"),
}
"""Each has another way to say how many tokens a chunk has."""


@pytest.fixture(scope="module")
def timed(tmp_path_factory: pytest.TempPathFactory) -> Repeatable:
    return alone(tmp_path_factory.mktemp("timed"), TIMES)


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Repeatable:
    return alone(tmp_path_factory.mktemp("counted"), COUNTS)


def alone(folder: Path, arms: dict[str, Planted]) -> Repeatable:
    """One user asks every arm."""
    flags = [f"{QUICK} {arm.flags}" for arm in arms.values()]

    def ask(time: int) -> Result:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(load_runner, "WARM_UP_SECONDS", 0.2)
            patch.setattr(fairness, "GROUPS", 8)
            return compare_streams(folder / f"run{time}", flags, users(1, 8, 4), model="planted")

    return Repeatable(ask)


def judge_arm(result: Result, arms: dict[str, Planted], label: str) -> None:
    """Each figure beside the baseline's, which the same machine delayed, and no winner that is not one."""
    for metric in ("answer_time", "ttft", "tpot"):
        true_ms, base_ms = getattr(arms[label], metric), getattr(arms["a"], metric)
        found = [c for c in result.comparisons if (c.metric, c.baseline, c.arm) == (metric, "a", label)]
        winners = {c.winner for c in found} - {None}
        measured = figure(result, metric, label)
        if true_ms is None or (measured is None and "--buffer" in arms[label].flags):
            assert measured is None
            assert not winners
            assert all(c.reason for c in found)
            continue
        more_ms = value(result, metric, label) - value(result, metric, "a")
        assert more_ms == pytest.approx(true_ms - base_ms, abs=BUSY_MS[metric]), metric
        assert winners <= ({"a" if true_ms > base_ms else label} if true_ms != base_ms else set()), metric
    per_answer = value(result, "output_tokens_per_s", label) * value(result, "answer_time", label) / 1e3
    assert per_answer == pytest.approx(TOKENS, rel=0.02), "one user: tokens are counted as they were made"


@pytest.mark.parametrize("label", list(TIMES)[1:])
@again
def test_times_are_true_whoever_joins_the_chunks(timed: Result, label: str) -> None:
    judge_arm(timed, TIMES, label)


@pytest.mark.slow  # by default each form is asked once, above
@pytest.mark.parametrize("label", list(COUNTS)[1:])
@again
def test_times_are_true_however_tokens_are_counted(counted: Result, label: str) -> None:
    judge_arm(counted, COUNTS, label)


@pytest.mark.parametrize("fixture", ["timed", pytest.param("counted", marks=pytest.mark.slow)])
def test_nothing_of_this_is_a_wrong_answer(request: pytest.FixtureRequest, fixture: str) -> None:
    busy = ("generator_cpu", "generator_scheduled", "other_processes", "warm_up")
    checks = request.getfixturevalue(fixture).found(0).checks
    against = [made for made in checks if made.severity == "invalidates" and made.ok is not True]
    assert [made.detail for made in against if made.name not in busy] == []


def by_url(out: Path, a: str, b: str) -> dict[str, Any]:
    """The result of `abserve compare --a URL --b URL`, which wrote a report."""
    with toy_process(f"--first-ms 8 --step-ms 1 {a}") as first, toy_process(f"--first-ms 8 --step-ms 1 {b}") as second:
        _, output = compare(out, "--a", first, "--b", second, "--concurrency", "2")
    assert (out / "report.html").exists(), output
    assert json.loads((out / "run.json").read_text())["state"] == "finished", output
    return dict(json.loads((out / "result.json").read_text()))


def metrics_without_winner(result: dict[str, Any]) -> set[str]:
    winning = {c["metric"] for c in result["comparisons"] if c["verdict"] in ("arm_better", "baseline_better")}
    return {c["metric"] for c in result["comparisons"]} - winning


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("", "--buffer whole"),
        pytest.param("--buffer whole", "--buffer whole", marks=pytest.mark.slow),
        pytest.param("--framing length", "--framing 1.0 --buffer whole", marks=pytest.mark.slow),
    ],
)
def test_answers_in_one_piece_leave_the_rest_of_a_run(tmp_path: Path, a: str, b: str) -> None:
    result = by_url(tmp_path, a, b)
    assert {"ttft", "tpot"} <= metrics_without_winner(result)
    for block in result["blocks"]:
        if block["label"] == "b":
            assert block["figures"]["tpot"] is None
            assert block["figures"]["output_tokens_per_s"] > 0.0
    leading = {c["metric"]: c for c in result["comparisons"] if c["leading"]}
    assert {"answer_time", "output_tokens_per_s"} == leading.keys()
    assert all(c["ratio"] is not None for c in leading.values())


@pytest.mark.parametrize(
    ("flags", "checks"),
    [
        ("--seed 1", {"same_first_tokens"}),
        pytest.param("--no-ids --usage-share 0.5", {"text_per_token"}, marks=pytest.mark.slow),
        pytest.param("--instead 429 --instead-share 3% --good-first 200", {"request_errors"}, marks=pytest.mark.slow),
        pytest.param("--stop-share 5% --stop-at 4 --good-first 60", {"answer_lengths"}, marks=pytest.mark.slow),
    ],
)
def test_an_arm_that_does_other_work_has_no_verdict(tmp_path: Path, flags: str, checks: set[str]) -> None:
    result = by_url(tmp_path, "", flags)
    assert not result["valid"]
    assert {made["name"] for made in result["checks"] if made["state"] == "failed"} & checks
    assert "arm_better" not in {made["verdict"] for made in result["comparisons"]}


@again
def test_the_toy_keeps_its_planted_times() -> None:
    """Asked in turns: a machine that delays one server delays the other."""
    with toy_process("--first-ms 20 --step-ms 2") as fast, toy_process("--first-ms 40 --step-ms 4") as slow:
        turns = np.array([(first_and_rest_ms(fast), first_and_rest_ms(slow)) for _ in range(12)])
    medians = np.median(turns, axis=0)
    assert medians[1] - medians[0] == pytest.approx([20.0, 30.0], abs=3.0)
    assert (medians[:, 0] >= [19.9, 39.9]).all()


def first_and_rest_ms(url: str) -> tuple[float, float]:
    """From a request to its first token, and from there to its sixteenth."""
    body = {"prompt": [5, 6], "max_tokens": 16, "stream": True, "return_token_ids": True}
    started = time.perf_counter()
    with urllib.request.urlopen(f"{url}/v1/completions", json.dumps(body).encode(), timeout=60.0) as answer:
        at_s = [time.perf_counter() for line in answer if b'"token_ids"' in line]
    assert len(at_s) == 16
    return (at_s[0] - started) * 1e3, (at_s[-1] - at_s[0]) * 1e3
