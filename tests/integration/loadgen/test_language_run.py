"""`abserve compare` of language models: running servers by URL, and servers that it starts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from loadgen.records.tokens import ECHO_DIFFERS, read_tokens
from tests.integration.loadgen.conftest import abserve
from tests.recording import recorder
from tests.toy_language_server import toy_process

pytestmark = pytest.mark.usefixtures("no_process_left")

SHORT = (
    "--preset",
    "smoke",
    "--rounds",
    "2",
    "--prompt-tokens",
    "16",
    "--output-tokens",
    "8",
    "--no-gpu-control",
    "--anyway",
)


@pytest.fixture
def planted() -> Iterator[Callable[..., str]]:
    """Starts planted servers; returns their URL."""
    with ExitStack() as running:
        yield lambda flags="": running.enter_context(toy_process(f"--first-ms 2 --step-ms 1 {flags}"))


def compare(out: Path, *options: str) -> tuple[int, str]:
    """The exit status and the output of a comparison, in one line."""
    return abserve("compare", *SHORT, "--out", str(out), *options)


def record(out: Path, name: str) -> Any:
    return json.loads((out / name).read_text())


def test_servers_at_urls_say_that_they_stream_tokens(tmp_path: Path, planted: Callable[..., str]) -> None:
    """No option names the model or the protocol."""
    status, output = compare(tmp_path, "--a", planted(), "--b", planted(), "--concurrency", "2")
    assert status == 0, output
    assert "all arms get prompts as token ids over OpenAI's completions" in output
    experiment = record(tmp_path, "experiment.json")
    assert (experiment["model"], experiment["transport"], experiment["payload"]) == ("planted", "completions", "tokens")
    assert [(w["scenario"], w["concurrency"]) for w in experiment["workloads"]] == [("single", 1), ("concurrent", 2)]
    compared = record(tmp_path, "token_answers.json")
    assert {(entry["workload"], entry["label"]) for entry in compared} >= {("probe", "a"), ("concurrent(2)", "b")}
    assert all(answer["deficit"] is None for entry in compared for answer in entry["answers"])
    assert len(record(tmp_path, "cache_probes.json")[0]["fresh_ns"]) > 5
    assert "4 of 4 probe answers have the same ids on every arm" in output
    checks = {check["name"]: check for check in record(tmp_path, "result.json")["checks"]}
    assert (checks["same_first_tokens"]["state"], checks["same_first_tokens"]["value"]) == ("passed", 1.0)


def test_another_model_is_no_comparison(tmp_path: Path, planted: Callable[..., str]) -> None:
    """B answers every prompt with other tokens, as fast as A."""
    status, output = compare(tmp_path, "--a", planted(), "--b", planted("--seed 7"), "--scenarios", "single")
    assert status == 1, output
    assert "0 of 4 probe answers have the same ids" in output
    (check,) = [check for check in record(tmp_path, "result.json")["checks"] if check["name"] == "same_first_tokens"]
    assert (check["state"], check["severity"], check["arms"]) == ("failed", "invalidates", ["b"])
    counts = {entry["label"]: entry["firsts"] for entry in record(tmp_path, "token_answers.json") if entry["firsts"]}
    assert counts == {"b": 20}


@pytest.mark.slow  # by default test_streamed_tokens.py asks such a server
def test_servers_that_take_no_ids_get_text_or_a_chat(tmp_path: Path, planted: Callable[..., str]) -> None:
    """One takes prompts of text, the other offers nothing but a chat; what that leaves unproved is said."""
    status, output = compare(
        tmp_path, "--a", planted("--routes text --no-ids --words prose"), "--b", planted("--routes chat"),
        "--scenarios", "single",
    )  # fmt: skip
    assert record(tmp_path, "run.json")["state"] == "finished", (status, output)
    assert re.search(r"over OpenAI's completions of text, \S+ over OpenAI's chat", output)
    checks = {check["name"]: check for check in record(tmp_path, "result.json")["checks"]}
    assert "a server that reads text makes its own tokens of a prompt" in checks["prompts_received"]["detail"]
    assert "counted by the server's own word" in checks["token_counts"]["detail"]
    assert checks["same_first_tokens"]["state"] == "unknown"
    warned = [checks[name] for name in ("prompts_received", "token_counts", "same_protocol")]
    assert {check["severity"] for check in warned} == {"warns"}
    assert "passed" not in {check["state"] for check in warned}


def test_a_server_that_lists_nothing_and_refuses_fields_is_measured_all_the_same(
    tmp_path: Path, planted: Callable[..., str]
) -> None:
    """Every request of the probes and of the load has the fields that were found, or else it would be refused."""
    status, output = compare(
        tmp_path, "--a", planted(), "--b", planted("--routes chat --models 404 --strict --refuse max_tokens"),
        "--b-model", "planted", "--b-transport", "chat", "--scenarios", "single", "--verbose",
    )  # fmt: skip
    assert record(tmp_path, "run.json")["state"] == "finished", (status, output)
    arms = record(tmp_path, "experiment.json")["arms"]
    changes = {"return_token_ids": None, "ignore_eos": None, "max_tokens": None}
    assert arms[1]["body"] == changes | {"max_completion_tokens": "{output_tokens}"}
    assert "GET /v1/models 404 (the list of models answers 404)" in output
    assert re.search(r"note: 127\.0\.0\.1:\d+ is asked without", output)
    checks = {check["name"]: check for check in record(tmp_path, "result.json")["checks"]}
    assert (checks["same_request_fields"]["state"], checks["same_request_fields"]["severity"]) == ("failed", "warns")
    assert checks["request_errors"]["state"] == "passed"


@pytest.mark.slow
def test_a_search_alone_has_its_answers_and_caches_checked(tmp_path: Path, planted: Callable[..., str]) -> None:
    status, output = compare(
        tmp_path, "--a", planted(), "--b", planted("--ignore-prompt"), "--scenarios", "goodput", "--limits",
        "ttft=30ms", "--rounds", "1", "--connections", "8",
    )  # fmt: skip
    assert status == 1, output
    assert "gives the same answer to different prompts" in output
    compared = {(entry["workload"], entry["label"]) for entry in record(tmp_path, "token_answers.json")}
    assert {("goodput(ttft=30ms)", "a"), ("goodput(ttft=30ms)", "b")} <= compared
    assert len(record(tmp_path, "cache_probes.json")) == 2


TRACE = """\
{"timestamp": 0, "input_length": 600, "output_length": 6, "hash_ids": [1, 2]}
{"timestamp": 100, "input_length": 20, "output_length": 12, "hash_ids": [3]}
{"timestamp": 150, "input_length": 560, "output_length": 3, "hash_ids": [1, 4]}
{"timestamp": 400, "input_length": 8, "output_length": 9}
"""


@pytest.mark.slow  # by default test_streamed_tokens.py replays one
def test_a_trace_is_replayed_to_every_arm(tmp_path: Path, planted: Callable[..., str]) -> None:
    path = tmp_path / "calls.jsonl"
    path.write_text(TRACE)
    out = tmp_path / "run"
    status, output = compare(
        out, "--a", planted(), "--b", planted(), "--scenarios", "single", "--traffic", str(path), "--speed", "1,2"
    )  # fmt: skip
    assert record(out, "run.json")["state"] == "finished", (status, output)
    replays = [block for file in sorted((out / "blocks").glob("*.json"))
               if (block := json.loads(file.read_text()))["workload"].startswith("trace(")]  # fmt: skip
    span_ns = {"trace(calls)": 400_000_000, "trace(calls, 2×)": 200_000_000}
    assert {(block["workload"], block["label"]) for block in replays} == {*product(span_ns, "ab")}
    for block in replays:
        assert (block["offered"], block["errors"], block["due_span_ns"]) == (4, 0, span_ns[block["workload"]])
        rows = read_tokens(out / block["samples"]).answers
        pairs = zip(rows["prompt_asked"].tolist(), rows["output_tokens"].tolist(), strict=True)
        assert sorted(pairs) == [(8, 9), (20, 12), (560, 3), (600, 6)]


def test_a_trace_that_is_too_long_for_the_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    path.write_text(TRACE.replace("600", "90000"))
    status, output = compare(
        tmp_path / "run", "--model", "language:tiny", "--a", "fastapi", "--b", "fastapi", "--traffic", str(path)
    )  # fmt: skip
    assert status == 2
    assert re.search(r"trace\(calls\) has prompts of 90,000 and answers of 6 tokens, and language:tiny holds", output)
    assert "take the longer requests out of the trace" in output


@pytest.mark.slow
def test_arms_without_a_common_protocol_get_their_own(tmp_path: Path, planted: Callable[..., str]) -> None:
    status, output = compare(
        tmp_path, "--a", planted(), "--b", planted(), "--scenarios", "single",
        "--a-transport", "completions", "--b-transport", "generate_stream",
    )  # fmt: skip
    assert re.search(r"over OpenAI's completions, \S+ over Triton's generate_stream", output)
    arms = record(tmp_path, "experiment.json")["arms"]
    assert [arm["transport"] for arm in arms] == [None, "generate_stream"]
    assert record(tmp_path, "run.json")["state"] == "finished", (status, output)


@pytest.mark.slow
def test_rates_of_an_open_loop_come_from_the_slower_arm(tmp_path: Path, planted: Callable[..., str]) -> None:
    """A planted answer takes 9 ms on A and 19 ms on B, so two users get at most 105 answers a second from B."""
    status, output = compare(
        tmp_path, "--a", planted(), "--b", planted("--first-ms 12"), "--scenarios", "concurrent,open",
        "--concurrency", "2", "--open-seconds", "0.5", "--limits", "ttft=50ms",
    )  # fmt: skip
    assert record(tmp_path, "run.json")["state"] == "finished", (status, output)
    rates = {load["rate_share"]: load["rate_per_s"] for load in record(tmp_path, "experiment.json")["workloads"]}
    assert 20.0 < rates[0.5] < 60.0
    assert rates[0.8] / rates[0.5] == pytest.approx(1.6, rel=0.02)


@pytest.mark.slow
def test_the_goodput_rate_is_what_the_connections_carry(tmp_path: Path, planted: Callable[..., str]) -> None:
    """An answer takes 9 ms on A and 37 ms on B, so two connections carry 54 answers a second of B; above that requests
    wait, and the wait counts."""
    status, output = compare(
        tmp_path, "--a", planted(), "--b", planted("--first-ms 30"), "--scenarios", "goodput",
        "--limits", "ttft=150ms", "--rounds", "1", "--connections", "2",
    )  # fmt: skip
    assert record(tmp_path, "run.json")["state"] == "finished", (status, output)
    rates = {rate["label"]: rate for rate in record(tmp_path, "result.json")["studies"]["rate_search"]["rates"]}
    assert {rate["metric"] for rate in rates.values()} == {"goodput_rate"}
    assert 10.0 < rates["b"]["rate_per_s"] < 75.0
    assert rates["b"]["rate_per_s"] < rates["a"]["rate_per_s"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--wrong-echo", "answers another prompt than the one that was sent"),
        ("--usage-share 0.5", "does not answer the prompts of the probe as asked"),
    ],
)
def test_a_wrong_arm_costs_no_load(tmp_path: Path, planted: Callable[..., str], options: str, message: str) -> None:
    status, output = compare(tmp_path, "--a", planted(), "--b", planted(options), "--scenarios", "single")
    assert status == 1
    assert message in output
    assert not list((tmp_path / "blocks").iterdir())


def test_a_url_that_answers_no_prompt_is_refused(tmp_path: Path, planted: Callable[..., str]) -> None:
    status, output = compare(tmp_path, "--a", planted(), "--b", planted("--error-every 1"), "--scenarios", "single")
    assert status == 2
    assert "planted answers no prompt (error event: the engine failed)" in output


def test_a_url_without_language_models_is_refused(tmp_path: Path, fake_url: Callable[..., str]) -> None:
    status, output = compare(tmp_path, "--model", "language:tiny", "--a", "native", "--b", fake_url())
    assert status == 2
    assert re.search(r"--b http://\S+: it serves no language model that it lists \(GET /v1/models: 404", output)


def test_answers_beyond_the_model_are_refused_before_anything_starts(tmp_path: Path) -> None:
    status, output = compare(
        tmp_path, "--model", "language:tiny", "--a", "native", "--b", "fastapi", "--scenarios", "long-answer"
    )
    assert status == 2
    assert "long-answer has prompts of 16 and answers of 1,024 tokens, and language:tiny holds 1,024" in output
    assert not (tmp_path / "experiment.json").exists()


def test_an_arm_that_refuses_many_users_loses_that_workload_alone(tmp_path: Path, planted: Callable[..., str]) -> None:
    arms = ("--a", planted(), "--b", planted("--refuse-from 3 --step-ms 4"))
    status, output = compare(tmp_path, *arms, "--scenarios", "single,concurrent", "--concurrency", "4")
    assert status == 1
    assert record(tmp_path, "run.json")["state"] == "finished"
    assert re.search(r"no request was sent to (127\.0\.0\.1:\d+): warm-up of \1", output)
    assert "HTTP 503: the queue is full" in output
    comparisons = record(tmp_path, "result.json")["comparisons"]
    pairs = {c["scenario"]: (c["pairs"], c["ratio"] is None) for c in comparisons if c["leading"]}
    assert pairs == {"single": (2, False), "concurrent(4)": (0, True)}
    kept = {(b["workload"], b["label"]) for b in record(tmp_path, "result.json")["blocks"] if b["complete"]}
    assert ("concurrent(4)", "a") in kept


def test_an_arm_that_fails_in_every_workload_is_named_with_its_words(
    tmp_path: Path, planted: Callable[..., str]
) -> None:
    arms = ("--a", planted(), "--b", planted("--good-first 70 --instead redirect"))
    status, output = compare(tmp_path, *arms, "--scenarios", "single")
    assert status == 1
    state = record(tmp_path, "run.json")
    assert (state["state"], state["failed_arm"]) == ("failed", "b")
    assert "redirects to /elsewhere" in state["error"]
    assert re.search(r"Find out why 127\.0\.0\.1:\d+ fails, and run again\.", output)


def test_a_model_that_is_started_is_judged_by_the_reference(tmp_path: Path) -> None:
    """FastAPI with generate() against itself: every token is the reference's own."""
    status, output = compare(
        tmp_path, "--model", "language:tiny", "--a", "fastapi", "--b", "fastapi", "--scenarios", "single"
    )
    assert status == 0, output
    compared = record(tmp_path, "token_answers.json")
    assert {(entry["workload"], entry["label"]) for entry in compared} == {
        (workload, label) for workload in ("probe", "single") for label in "ab"
    }
    assert all(entry["error"] is None for entry in compared)
    deficits = [answer["deficit"] for entry in compared for answer in entry["answers"]]
    assert len(deficits) > 8
    assert max(deficits) < 0.01
    assert "FastAPI" in output


@pytest.mark.slow
def test_the_parts_of_real_servers_are_taken_away(tmp_path: Path) -> None:
    """FastAPI runs a generate() for each of its four users; slots behind the native server takes its place."""
    status, output = compare(
        tmp_path, "--model", "language:tiny", "--a", "native", "--b", "fastapi", "--scenarios", "concurrent",
        "--concurrency", "4", "--rounds", "4", "--explain",
    )  # fmt: skip
    assert record(tmp_path, "run.json")["state"] == "finished", (status, output)
    causes = record(tmp_path, "causes.json")
    done = {(ablation["cause"], ablation["label"]): ablation["without"] for ablation in causes["done"]}
    assert done.keys() == {("protocol", "a"), ("protocol", "b"), ("engine", "b"), ("front_ends", "a")}
    assert (done["engine", "b"]["target"], done["engine", "b"]["settings"]) == ("native", {"engine": "slots"})
    assert all(entry["moot"] for entry in causes["untested"])
    (found,) = record(tmp_path, "result.json")["studies"]["causes"]["workloads"]
    assert {cause["name"] for cause in found["causes"] if cause["effects"]} == {"protocol", "engine", "front_ends"}


LENGTHS = [(20, 6), (5, 12), (33, 3), (5, 12), (8, 9)]


def record_prompts(folder: Path, server: str, *, chat: bool) -> list[bytes]:
    """What clients sent to a server through the recorder, one after the other."""
    sent = []
    with recorder(folder, "--answers", to=server) as recording:
        for prompt, answer in LENGTHS:
            ids = [100 + place for place in range(prompt)]
            words = {"messages": [{"role": "user", "content": " ".join(f"t{number}" for number in ids)}]}
            fields = (words if chat else {"prompt": ids}) | {"model": "planted", "max_tokens": answer, "stop": ["x"]}
            sent.append(json.dumps(fields | {"stream": True, "seed": 5, "user": "somebody"}).encode())
            path = "/v1/chat/completions" if chat else "/v1/completions"
            request = Request(recording.url + path, sent[-1], {"Content-Type": "application/json"})
            with urlopen(request, timeout=60) as response:
                assert b"[DONE]" in response.read()
        recording.end()
    return sent


@pytest.mark.parametrize("chat", [False, True])
def test_recorded_prompts_are_replayed_to_every_arm(tmp_path: Path, planted: Callable[..., str], chat: bool) -> None:
    options = "--routes chat --chat-ids" if chat else ""
    sent = record_prompts(tmp_path / "traffic", planted(options), chat=chat)
    out = tmp_path / "run"
    arms = ("--a", planted(options), "--b", planted(options), "--scenarios", "traffic")
    status, output = compare(out, *arms, "--traffic", str(tmp_path / "traffic"), "--speed", "1,2")
    assert record(out, "run.json")["state"] == "finished", (status, output)
    experiment = record(out, "experiment.json")
    assert experiment["transport"] == ("chat" if chat else "completions")
    spans = {}
    for file in sorted((out / "blocks").glob("*.json")):
        block = json.loads(file.read_text())
        assert (block["offered"], block["errors"]) == (5, 0), (block, output)
        rows = read_tokens(out / block["samples"]).answers
        assert sorted(rows["output_tokens"].tolist()) == sorted(answer for _, answer in LENGTHS)
        if not chat:
            assert sorted(rows["prompt_asked"].tolist()) == sorted(prompt for prompt, _ in LENGTHS)
            assert not (rows["flags"] & ECHO_DIFFERS).any()
        spans[block["workload"]] = block["due_span_ns"]
    assert spans["traffic"] == pytest.approx(2 * spans["traffic(2×)"], rel=1e-6)
    traffic = record(out, "replayed_traffic.json")
    assert (traffic["requests"], traffic["contents"], sent[1]) == (5, 4, sent[3])
    result = record(out, "result.json")
    states = {check["name"]: check["state"] for check in result["checks"]}
    assert {states.get(name, "passed") for name in ("analysed", "answers_depend_on_prompts")} == {"passed"}
    assert [each["workload"] for each in result["studies"]["traffic"]["latencies"]] == ["traffic"] * 2 + [
        "traffic(2×)"
    ] * 2
