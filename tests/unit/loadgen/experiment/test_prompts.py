"""Prompts: unique from their first ids on, made again from their numbers, and patched without a change of length."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.client.connection import Address, assemble
from loadgen.client.endpoint import Signature
from loadgen.client.generation import for_stream, prepare_prompts
from loadgen.client.messages import Prepare
from loadgen.client.recorded import prepare_trace
from loadgen.experiment.prompts import PromptError, PromptPlan, PromptShape
from loadgen.experiment.replay import Replay
from loadgen.launch.deployment import RemoteDeployment
from loadgen.measure.arms import Arm
from loadgen.records.run import ArmRequest, Workload
from loadgen.records.targets import ROUTES, TOKEN_TRANSPORTS, TokenTransport
from loadgen.records.traffic import TrafficError

PLAN = PromptPlan(low=3, high=1023, seed=11)
NUMBERS = st.integers(0, 2**41)


@given(st.sets(NUMBERS, min_size=2, max_size=50), st.integers(2, 5000))
def test_different_numbers_make_different_ids(numbers: set[int], vocabulary: int) -> None:
    plan = PromptPlan(low=10, high=9 + vocabulary, seed=0)
    shape = PromptShape(64, 1)
    count = plan.varying(shape)
    capacity = vocabulary**count
    made = {tuple(plan.numbered(number, count)) for number in numbers}
    assert len(made) == len({number % capacity for number in numbers})
    assert all(10 <= token <= 9 + vocabulary for ids in made for token in ids)
    assert len({len(plan.patch(number, count)) for number in numbers}) == 1


def test_successive_numbers_differ_in_their_first_id() -> None:
    first = [PLAN.numbered(number, 4)[0] for number in range(10**9, 10**9 + 500)]
    assert len(set(first)) > 300
    assert 300 < np.mean(first) < 720


@pytest.mark.parametrize("transport", TOKEN_TRANSPORTS)
@pytest.mark.parametrize("shape", [PromptShape(32, 64), PromptShape(2, 1), PromptShape(1, 1), PromptShape(40, 8, 16)])
def test_a_patched_body_carries_the_prompt_of_its_numbers(transport: TokenTransport, shape: PromptShape) -> None:
    prompts = prepare_prompts(transport, "m", PLAN, shape, iter(range(77, 200)))
    salts = set()
    for body, request in enumerate(prompts.requests):
        number, patches = prompts.patches(body)
        content = b"".join(assemble(b"", request.pieces, patches))
        assert len(content) == len(request.body)
        document = json.loads(content)
        sent = document.get("prompt", document.get("input_ids"))
        if transport == "chat":
            (message,) = document["messages"]
            assert message["role"] == "user"
            sent = message["content"]
        ids = [int(word[1:]) for word in sent.split()] if ROUTES[transport].is_text else sent
        assert ids == prompts.prompt(body, number).tolist() == PLAN.prompt(shape, body, number).tolist()
        assert len(ids) == shape.prompt_tokens
        assert document["max_tokens"] == shape.output_tokens
        salts.add(document.get("cache_salt"))
    salted = transport in ("completions", "text") and not shape.shared_prefix
    assert len(salts) == (len(prompts.requests) if salted else 1)
    head = for_stream(prompts.requests[0], transport, Address.parse("http://h:1/v1"), "m").head
    paths = {"chat": b"chat/completions", "generate_stream": b"v2/models/m/generate_stream"}
    assert head.startswith(b"POST /v1/" + paths.get(transport, b"completions") + b" ")
    assert b"/v1/v1" not in head
    assert Address.parse("http://h:1/v3").openai_path("models") == "/models"


@pytest.mark.parametrize("transport", TOKEN_TRANSPORTS)
def test_fields_are_replaced_added_and_left_out(transport: TokenTransport) -> None:
    changes: dict[str, object] = {
        "max_tokens": None, "ignore_eos": None, "cache_salt": None, "temperature": 0.5, "model": "other",
        "options": {"limit": "{output_tokens}", "stop": ["]", '"}']},
    }  # fmt: skip
    prompts = prepare_prompts(transport, "m", PLAN, PromptShape(4, 9), iter(range(77, 200)), changes)
    number, patches = prompts.patches(3)
    document = json.loads(b"".join(assemble(b"", prompts.requests[3].pieces, patches)))
    assert number == 77
    assert document["options"] == {"limit": 9, "stop": ["]", '"}']}
    assert (document["temperature"], document["model"]) == (0.5, "other")
    assert not {"max_tokens", "ignore_eos", "cache_salt"} & document.keys()
    nothing = dict.fromkeys([*document, "max_tokens", "ignore_eos", "cache_salt"])
    bare = prepare_prompts(transport, "m", PLAN, PromptShape(4, 9), iter(range(77, 200)), nothing).requests[0]
    assert len(json.loads(bare.body)) == 1


def test_a_shared_prefix_is_the_same_in_all_prompts() -> None:
    shape = PromptShape(40, 8, 16)
    prompts = np.array([PLAN.prompt(shape, body, number) for number, body in enumerate(range(32))])
    assert (prompts[:, :16] == prompts[0, :16]).all()
    assert len({tuple(row) for row in prompts[:, 16:20].tolist()}) == 32
    assert ((prompts >= 3) & (prompts <= 1023)).all()
    other = PromptPlan(low=3, high=1023, seed=12).prompt(shape, 0, 0)
    assert (other[:16] != prompts[0, :16]).any()


def test_prompts_that_cannot_differ_are_refused() -> None:
    with pytest.raises(PromptError, match="at least two token ids"):
        PromptPlan(low=3, high=3, seed=0).prepared(PromptShape(4, 4))
    with pytest.raises(PromptError, match="leaves nothing of a prompt of 16 that differs"):
        PLAN.prepared(PromptShape(16, 4, 16))
    assert PLAN.prepared(PromptShape(16, 4, 15))[0].shape == (16,)


def traced(folder: Path, *lines: object, seconds: float = 60.0) -> Replay:
    path = folder / f"trace{len(list(folder.iterdir()))}.jsonl"  # each is read once
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return Replay(str(path), "completions", seconds)


def line(timestamp: float, prompt: int, answer: int, *hashes: int) -> dict[str, object]:
    return {"timestamp": timestamp, "input_length": prompt, "output_length": answer, "hash_ids": list(hashes)}


def test_the_longest_request_and_the_rate_of_a_trace(tmp_path: Path) -> None:
    trace = traced(tmp_path, line(0, 900, 7), line(500, 800, 200), line(1000, 3, 2), line(2000, 4, 300))
    assert trace.longest() == PromptShape(800, 200)
    assert trace.rate_per_s() == pytest.approx(1.5)
    with pytest.raises(TrafficError, match=r"all requests of the trace .* have one timestamp"):
        traced(tmp_path, line(7, 1, 1), line(7, 2, 2), seconds=1.0).rate_per_s()


def test_a_trace_shares_what_has_the_same_hashes(tmp_path: Path) -> None:
    trace = traced(
        tmp_path, line(9000, 1100, 7, 1, 2, 3), line(27_500, 700, 5, 1, 4), line(10_000, 1030, 6, 1, 2, 5), "",
        line(10_001, 3, 2), line(99_000, 4, 4),
    )  # fmt: skip
    first, offsets = trace.window(7)
    assert (first, offsets.tolist()) == (0, [0, 1_000_000_000, 1_001_000_000, 18_500_000_000])
    prompts = prepare_trace("completions", "m", PLAN, trace, {}).window(0, 4, 77)
    assert [shape.prompt_tokens for shape in prompts.shapes] == [1100, 1030, 3, 700]
    sent = []
    for body, request in enumerate(prompts.requests):
        number, patches = prompts.patches(body)
        document = json.loads(b"".join(assemble(b"", request.pieces, patches)))
        assert document["prompt"] == prompts.prompt(body, number).tolist()
        assert document["max_tokens"] == prompts.shapes[body].output_tokens
        assert "cache_salt" not in document
        sent.append(document["prompt"])
    first, second, short, last = sent
    assert first[:1024] == second[:1024] != last[:1024]
    assert first[:512] == last[:512]
    assert first[1024:1030] != second[1024:1030]
    assert len(short) == 3
    again = prepare_trace("completions", "m", PLAN, trace, {}).window(0, 4, 78)
    assert again.prompt(0, 78)[0] != first[0]


def test_a_trace_is_prepared_once_for_all_its_speeds(tmp_path: Path) -> None:
    """The faster replay has the whole trace, of which the slower one sends the beginning."""
    slow = traced(tmp_path, *(line(1000 * number, 8, 2) for number in range(6)), seconds=3.0)
    fast = Replay(slow.folder, slow.transport, 3.0, 2.0)
    prepare = Prepare(
        samples_directory="", payload="", signature=Signature("m", (), ()), batch_sizes=(1,), seed=7,
        transport="completions", prompts=PLAN, replays=(fast, slow),
    )  # fmt: skip
    assert prepare.sources == {fast.source: fast}
    prompts = prepare_trace("completions", "m", PLAN, fast, {})
    windows = [replay.window(0) for replay in (slow, fast)]
    assert [len(prompts.window(first, len(offsets), 0).requests) for first, offsets in windows] == [3, 6]
    assert windows[1][1].tolist() == [500_000_000 * number for number in range(6)]


def test_every_replay_has_a_number_of_its_own_in_the_window_of_its_round(tmp_path: Path) -> None:
    """Servers at URLs remember prompts from one run to the next, and the seed of both is the same."""
    traffic = traced(tmp_path, *(line(1000 * number, 8, 2) for number in range(6)), seconds=3.0).folder
    workload = Workload(
        scenario="concurrent", batch_size=1, concurrency=4, requests=1, seconds=3.0, max_seconds=9.0, rounds=2,
        arrivals="trace", traffic=traffic,
    )  # fmt: skip
    url = "http://127.0.0.1:1"
    arm = Arm(ArmRequest(label="a", target=url), RemoteDeployment(url), "m", "completions")
    opened = [arm.load(workload, None, arrivals_seed=seed) for seed in (7, 7, 8)]
    assert [command.arrivals_seed for command in opened] == [7, 7, 8]
    assert len({command.replay_number for command in opened}) == 3


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        (["{}"], r"line 1: Object missing required field `timestamp`"),
        ([line(0, 4, 4), "nonsense"], r"line 2: JSON is malformed"),
        ([line(0, 0, 4)], r"line 1: Expected `int` >= 1"),
        ([line(0, 4, 4)], r"fewer than two requests in its first 60 s"),
        ([line(0, 2**20, 4)] * 17, r"have 17,825,792 prompt tokens, more than the limit of 16,777,216; replay less"),
    ],
)
def test_a_trace_that_cannot_be_replayed_is_refused(tmp_path: Path, lines: list[object], sentence: str) -> None:
    with pytest.raises(TrafficError, match=sentence):
        traced(tmp_path, *lines).requests()


def test_a_trace_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    trace = traced(tmp_path, line(0, 900, 7), line(500, 800, 200))
    path = Path(trace.folder)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert trace.longest() == PromptShape(800, 200)
