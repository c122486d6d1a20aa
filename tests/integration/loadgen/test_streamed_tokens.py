"""The load generator receives streamed tokens from real servers whose schedule is known."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loadgen.client.endpoint import Signature
from loadgen.client.generator import GeneratorProcess
from loadgen.client.messages import BlockOutcome, GeneratorError, Open, Prepare
from loadgen.client.outputs import AnswerError
from loadgen.client.token_traffic import ask_tokens
from loadgen.client.traffic import unpacked
from loadgen.client.transports import InferenceTarget
from loadgen.experiment.prompts import PromptPlan, PromptShape
from loadgen.experiment.replay import Replay
from loadgen.records.samples import Samples, good, read_samples
from loadgen.records.targets import TOKEN_TRANSPORTS, Transport
from loadgen.records.tokens import (
    BY_IDS,
    BY_LENGTH,
    BY_RUNNING_USAGE,
    BY_WORDS,
    CUT,
    ECHO,
    ECHO_DIFFERS,
    IDS,
    LENGTH,
    STOP,
    TokenRows,
    read_tokens,
)
from tests.toy_language_server import planted_tokens, toy_process

SHAPE = PromptShape(32, 16)
PLAN = PromptPlan(low=3, high=4095, seed=7, shapes=(SHAPE, PromptShape(32, 16, 16)))
NS_PER_MS = 1e6


class Streams:
    """Starts planted servers, and runs blocks on them with one generator."""

    def __init__(self, folder: Path, generator: GeneratorProcess) -> None:
        self.folder, self.generator = folder, generator
        self.running = ExitStack()

    def start(self, options: str = "") -> str:
        return self.running.enter_context(toy_process(f"--first-ms 5 --step-ms 2 {options}"))

    def stop(self) -> None:
        self.running.close()

    def block(
        self, options: str = "", transport: Transport = "completions", plan: PromptPlan = PLAN,
        generator: GeneratorProcess | None = None, **changes: Any,
    ) -> tuple[BlockOutcome, Samples, TokenRows]:  # fmt: skip
        generator = generator or self.generator
        url, path = self.start(options), self.folder / "0000.npy"
        generator.prepare(
            Prepare(
                samples_directory="", payload="", signature=Signature("planted", (), ()), batch_sizes=(1,), seed=7,
                transport=transport, prompts=plan, replays=(changes["replay"],) if "replay" in changes else (),
            )
        )  # fmt: skip
        fields: dict[str, Any] = {
            "url": url, "batch_size": 1, "shape": SHAPE, "concurrency": 2, "requests": 12, "seconds": 0.0,
            "max_seconds": 20.0, "timeout_s": 10.0, "samples_path": str(path),
        }  # fmt: skip
        command = Open(**{**fields, **changes})
        generator.open(command)
        outcome = generator.go(command)
        self.stop()
        return outcome, read_samples(path), read_tokens(path)


@pytest.fixture(scope="module")
def generator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GeneratorProcess]:
    process = GeneratorProcess(tmp_path_factory.mktemp("generator") / "generator.log")
    yield process
    process.stop()


@pytest.fixture
def streams(tmp_path: Path, generator: GeneratorProcess) -> Iterator[Streams]:
    started = Streams(tmp_path, generator)
    yield started
    started.stop()


def by_sample(rows: TokenRows) -> list[Samples]:
    return [rows.events[rows.events["sample"] == number] for number in range(len(rows.answers))]


@pytest.mark.parametrize("transport", ["completions", "generate_stream"])
def test_every_token_has_its_time(streams: Streams, transport: Transport) -> None:
    outcome, samples, rows = streams.block("--first-ms 20 --step-ms 5 --lines crlf --noise comment", transport)
    assert (outcome.errors, outcome.cut_reason, outcome.storage_error) == (0, None, None)
    assert len(samples) == len(rows.answers) == outcome.requests >= 12
    for sample, events in zip(samples, by_sample(rows), strict=True):
        assert events["tokens"].tolist() == events["events"].tolist()  # above 1 where a busy machine delays the client
        assert events["tokens"].sum() == 16
        assert (sample["first_byte_ns"], sample["end_ns"]) == (events["at_ns"][0], events["at_ns"][-1])
        assert np.all(np.diff(events["at_ns"]) > 0)
    first_ms = (samples["first_byte_ns"] - samples["intended_ns"]) / NS_PER_MS
    last_ms = (samples["end_ns"] - samples["first_byte_ns"]) / NS_PER_MS
    assert 20.0 <= np.median(first_ms) < 60.0
    assert 60.0 <= np.median(last_ms) < 115.0
    answers = rows.answers
    assert set(answers["counted"].tolist()) == {BY_IDS}
    for name, value in (("asked", 16), ("prompt_asked", 32), ("prompt_tokens", 32), ("output_tokens", 16)):
        assert answers[name].tolist() == [value] * len(answers)
    assert (answers["distinct"] >= 14).all()
    assert set(answers["finish"].tolist()) == {LENGTH}
    echoed = transport == "completions"
    assert answers["usage_tokens"].tolist() == [16 if echoed else -1] * len(answers)
    assert answers["flags"].tolist() == [IDS | (ECHO if echoed else 0)] * len(answers)
    assert len(set(answers["number"].tolist())) == len(answers)


def test_kept_answers_have_their_prompts(streams: Streams) -> None:
    outcome, _, _ = streams.block(keep_answers=5, keep_seed=1)
    assert len(outcome.answers) == 5
    for answer in outcome.answers:
        outputs = {tensor.name: unpacked(tensor)[0].tolist() for tensor in answer.outputs}
        assert outputs["prompt"] == PLAN.prompt(SHAPE, answer.body, answer.first).tolist()
        assert outputs["tokens"] == planted_tokens(outputs["prompt"], 16)
        assert answer.error is None


def test_several_processes_share_a_block(streams: Streams, tmp_path: Path) -> None:
    several = GeneratorProcess(tmp_path / "several.log", processes=2)
    try:
        outcome, samples, rows = streams.block(
            "--stop-share 0.3 --stop-at 9", generator=several, concurrency=4, requests=40
        )
    finally:
        several.stop()
    assert len(samples) == len(rows.answers) == outcome.requests
    assert np.all(np.diff(samples["send_ns"]) >= 0)
    for sample, answer, events in zip(samples, rows.answers, by_sample(rows), strict=True):
        assert events["tokens"].sum() == answer["output_tokens"]
        assert sample["first_byte_ns"] == events["at_ns"][0]
        assert (answer["output_tokens"] == 16) == (sample["error"] < 0)
    assert outcome.error_messages == ("answered 9 of 16 tokens (finish reason stop)",)
    assert sorted(path.name for path in tmp_path.glob("*.npy*")) == ["0000.answers.npy", "0000.events.npy", "0000.npy"]


def test_an_open_loop_counts_from_the_intended_start(streams: Streams) -> None:
    outcome, samples, rows = streams.block(
        "--first-ms 30 --step-ms 4", concurrency=1, arrivals="constant", rate_per_s=20.0, requests=6, max_seconds=2.0
    )
    assert outcome.offered == 6
    waited_ms = (samples["first_byte_ns"] - samples["intended_ns"]) / NS_PER_MS
    assert waited_ms[-1] > waited_ms[0] + 100.0  # one connection answers every 90 ms, and 50 ms lie between two
    assert len(rows.answers) == len(samples)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--error-every 2 --error-after 4", "error event: the engine failed (after 4 of 16 tokens)"),
        ("--error-every 2", "error event: the engine failed"),
        ("--cut-every 2", "connection closed by the server in the middle of a response (after 7 of 16 tokens)"),
        ("--usage-share 0.5", "answered 8 of 16 tokens (finish reason length)"),
    ],
)
def test_what_is_no_whole_answer_has_failed(streams: Streams, options: str, sentence: str) -> None:
    with_good_settling = options.replace("every 2", "every 3")
    outcome, samples, rows = streams.block(with_good_settling, concurrency=1)
    assert outcome.error_messages == (sentence,)
    assert 0 < outcome.errors <= outcome.requests
    failed = samples["error"] >= 0
    assert (rows.answers["output_tokens"][failed] < 16).all()
    assert (rows.answers["output_tokens"][~failed] == 16).all()
    if "cut" in options:
        assert (rows.answers["flags"][failed] & CUT).all()
    if "usage" in options:
        assert (rows.answers["usage_tokens"] == 16).all()


def test_a_server_without_ids_is_counted_by_its_words_or_its_usage(streams: Streams) -> None:
    for options, plan, counted, has_ids in (
        ("--no-ids --usage never", PLAN, BY_WORDS, True),
        ("--no-ids --usage never", PromptPlan(low=3, high=4095, seed=7, shapes=(SHAPE,), text=True), BY_WORDS, True),
        ("--no-ids --words prose", PLAN, BY_RUNNING_USAGE, False),
        ("--no-ids --words prose --usage never", PLAN, BY_LENGTH, False),
    ):
        outcome, _, rows = streams.block(options, plan=plan)
        assert outcome.errors == 0
        assert set(rows.answers["counted"].tolist()) == {counted}
        assert (rows.answers["output_tokens"] == 16).all()
        assert ((rows.answers["flags"] & IDS) > 0).tolist() == [has_ids] * len(rows.answers)


@pytest.mark.parametrize(("options", "counted"), [("", BY_RUNNING_USAGE), ("--usage never", BY_LENGTH)])
def test_a_chat_is_counted_from_its_first_token_on(streams: Streams, options: str, counted: int) -> None:
    """The chunk with only a role comes at once, and the first token 30 ms later."""
    outcome, samples, rows = streams.block(f"--routes chat --first-ms 30 {options}", "chat")
    assert (outcome.errors, outcome.answers) == (0, ())
    assert (rows.answers["output_tokens"] == 16).all()
    assert not (rows.answers["flags"] & IDS).any()
    assert set(rows.answers["counted"].tolist()) == {counted}
    assert (samples["first_byte_ns"] - samples["send_ns"]).min() >= 25 * NS_PER_MS


def test_prompts_of_text_are_proved_only_where_their_ids_come_back(streams: Streams) -> None:
    outcome, _, rows = streams.block("--routes text,chat", "text", keep_answers=4)
    assert (outcome.errors, len(outcome.answers)) == (0, 4)
    assert (rows.answers["flags"] & ECHO).all()
    outcome, _, rows = streams.block("--routes text,chat --wrong-echo", "text", keep_answers=4)
    assert (outcome.errors, len(outcome.answers)) == (0, 0)
    assert not (rows.answers["flags"] & (ECHO | ECHO_DIFFERS)).any(), "the server made other tokens of the text"


def test_chunks_are_counted_as_they_come(streams: Streams) -> None:
    _, samples, rows = streams.block("--chunk-tokens 4 --first-tokens 8 --early-empty-ms 4 --first-ms 20")
    for events in by_sample(rows):
        assert events["tokens"].sum() == 16
        assert np.isin(np.cumsum(events["tokens"]), (8, 12, 16)).all()
    assert np.median(samples["first_byte_ns"] - samples["intended_ns"]) >= 20 * NS_PER_MS
    assert np.median(rows.answers["chunks"]) == 3


def test_events_of_one_read_are_one_chunk(streams: Streams) -> None:
    _, _, rows = streams.block("--step-ms 0")
    for events in by_sample(rows):
        assert np.all(np.diff(events["at_ns"]) > 0)
        assert events["events"].sum() == events["tokens"].sum() == 16


def test_a_changed_echo_and_cached_tokens_are_told(streams: Streams) -> None:
    outcome, _, rows = streams.block("--wrong-echo --cache-prefix 16", shape=PromptShape(32, 16, 16))
    assert outcome.errors == 0
    assert (rows.answers["flags"] & ECHO_DIFFERS).all()
    assert rows.answers["cached_tokens"].tolist()[2:] == [16] * (len(rows.answers) - 2)


def test_no_two_prompts_share_their_first_id_often(streams: Streams) -> None:
    _, _, rows = streams.block("--step-ms 0.1 --first-ms 0.1 --cache-prefix 4", requests=200)
    assert (rows.answers["cached_tokens"] == 0).all()


def test_one_prompt_alone(streams: Streams) -> None:
    url = streams.start("--cache")
    for transport in TOKEN_TRANSPORTS:
        target = InferenceTarget(transport, url, "planted")
        answer = ask_tokens(target, PLAN, [5, 6, 7], 9)
        if transport == "chat":
            assert answer.ids == []
            answer.ids = [0] * 9
        assert (len(answer.ids), answer.output_tokens, answer.finish, answer.prompt_tokens) == (9, 9, LENGTH, 3)
        assert answer.chunks[0].at_ns > answer.sent_ns > 0
    stops = InferenceTarget("completions", streams.start("--stop-share 1 --stop-at 5"), "planted")
    with pytest.raises(AnswerError, match=r"^answered 5 of 9 tokens \(finish reason stop\)$"):
        ask_tokens(stops, PLAN, [5, 6, 7], 9)
    assert STOP == 2


def test_a_stream_that_stands_still_ends_with_its_time_limit(streams: Streams) -> None:
    outcome, samples, rows = streams.block(
        "--gap-share 0.02 --gap-ms 60000", timeout_s=1.5, requests=40, concurrency=4, max_seconds=10.0
    )
    assert outcome.errors > 0
    assert all("the server sent nothing for 1.5 s (after" in message for message in outcome.error_messages)
    failed = samples[samples["error"] >= 0]
    assert ((failed["end_ns"] - failed["send_ns"]) / 1e9 < 1.9).all()
    assert (rows.answers["output_tokens"][samples["error"] < 0] == 16).all()


def test_a_slow_steady_stream_may_take_longer_than_the_time_limit(streams: Streams) -> None:
    slow = "--first-ms 300 --step-ms 50"
    outcome, samples, _ = streams.block(slow, timeout_s=0.5, requests=2)
    assert (outcome.errors, outcome.cut_reason) == (0, None)
    assert ((samples["end_ns"] - samples["send_ns"]) / NS_PER_MS > 1_000.0).all()
    target = InferenceTarget("generate_stream", streams.start(slow), "planted")
    assert ask_tokens(target, PLAN, [5, 6, 7], 16, timeout_s=0.5).output_tokens == 16
    silent = InferenceTarget("generate_stream", streams.start("--gap-share 1 --gap-ms 60000"), "planted")
    with pytest.raises(AnswerError, match=r"^the server sent nothing for 0.3 s \(after 1 of 16 tokens\)$"):
        ask_tokens(silent, PLAN, [5, 6, 7], 16, timeout_s=0.3)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_trace_is_replayed_with_its_times_and_lengths(streams: Streams, tmp_path: Path, processes: int) -> None:
    lengths = [(600, 9), (40, 5), (600, 3), (700, 4), (8, 8), (513, 2)]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(
        f'{{"timestamp": {50 * place}, "input_length": {prompt}, "output_length": {answer}, "hash_ids": [1, 2]}}\n'
        for place, (prompt, answer) in enumerate(lengths)
    ))  # fmt: skip
    trace = Replay(str(path), "completions", 10.0)
    plan = PromptPlan(low=3, high=4095, seed=7)
    several = GeneratorProcess(tmp_path / "replay.log", processes=processes)
    try:
        outcome, samples, rows = streams.block(
            "--step-ms 0.5 --first-ms 1 --cache-prefix 40", "completions", plan, several, shape=None, replay=trace,
            concurrency=6, arrivals_seed=11, rate_per_s=None, arrivals="poisson",
        )  # fmt: skip
    finally:
        several.stop()
    assert (outcome.errors, outcome.offered, outcome.cut_reason) == (0, 6, None)
    order = np.argsort(samples["intended_ns"])
    assert np.diff(samples["intended_ns"][order]).tolist() == [50_000_000] * 5
    answers = rows.answers[order]
    assert list(zip(answers["prompt_asked"].tolist(), answers["output_tokens"].tolist(), strict=True)) == lengths
    assert not (answers["flags"] & ECHO_DIFFERS).any()
    shared = answers["cached_tokens"] > 0
    assert shared.tolist() == [False, True, True, True, False, True], "prompts of 40 tokens and more begin alike"


def test_a_block_needs_prepared_prompts(streams: Streams) -> None:
    with pytest.raises(GeneratorError, match="no prompts of 99 tokens are prepared"):
        streams.block(shape=PromptShape(99, 1))
    with pytest.raises(GeneratorError, match="choose one of completions, generate_stream, text, chat"):
        streams.block(transport="grpc")
    outcome, samples, _ = streams.block("--refuse-from 1 --first-ms 100", concurrency=2, requests=6)
    assert outcome.error_messages == ("HTTP 503: the queue is full",)
    assert 0 < len(good(samples)) < len(samples)
