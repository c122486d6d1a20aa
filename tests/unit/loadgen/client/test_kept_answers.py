"""Which answers of a block are kept, and what is passed on of them."""

from __future__ import annotations

from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loadgen.client import token_traffic
from loadgen.client.connection import Exchange, PreparedRequest
from loadgen.client.generation import StreamedAnswer, prepare_prompts
from loadgen.client.outputs import AnswerError
from loadgen.client.recorded import RecordedBodies
from loadgen.client.traffic import MOST_ROWS, KeptAnswers, SentRequest, Traffic, packed, unpacked
from loadgen.client.transports import InferenceTarget
from loadgen.experiment.prompts import PromptPlan, PromptShape
from loadgen.records.samples import SampleWriter, read_samples
from loadgen.records.tokens import read_tokens


def sent(number: int, user: int = 0, body: int = 0, first: int = 0) -> SentRequest:
    return SentRequest(number, None, first, body, user, None, measured=True)


def fill(kept: KeptAnswers, requests: int, rows: int = 1) -> None:
    for request in range(requests):
        slot = kept.slot(request)
        if slot is not None:
            answer = {"y": np.full((rows, 2), request, "<f4")}
            kept.keep(slot, sent(request, request % 3, request % 5, 10 * request), partial(dict, answer))


@pytest.mark.parametrize("requests", [0, 3, 8, 9, 50, 2000])
def test_so_many_are_kept_whatever_the_number_of_requests(requests: int) -> None:
    kept = KeptAnswers(8, seed=4)
    fill(kept, requests)
    answers = kept.read()
    assert len(answers) == min(8, requests)
    for answer in answers:
        assert (answer.user, answer.body, answer.first) == (answer.request % 3, answer.request % 5, 10 * answer.request)
        assert unpacked(answer.outputs[0])[0, 0] == answer.request


@pytest.mark.parametrize("fault", [KeyError("x"), OverflowError("too large"), AnswerError("no output"), MemoryError()])
def test_an_answer_that_cannot_be_read_costs_itself(fault: Exception) -> None:
    def fail() -> dict[str, np.ndarray]:
        raise fault

    kept = KeptAnswers(2, seed=4)
    kept.keep(0, sent(0), fail)
    kept.keep(1, sent(1), partial(dict, {"y": np.zeros((1, 2), "<f4")}))
    broken, good = kept.read()
    assert str(fault) in (broken.error or "")
    assert broken.error
    assert good.error is None


class Answering:
    """A connection whose every request is answered."""

    def send(self, _request: object, _patches: object = ()) -> Exchange:
        exchange = Exchange()
        exchange.status = 200
        return exchange


def test_a_streamed_answer_that_no_row_can_hold_is_one_failed_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, samples = PromptShape(4, 2), tmp_path / "0000.npy"
    prompts = prepare_prompts("completions", "m", PromptPlan(low=3, high=99, seed=7, shapes=(shape,)), shape, count())
    usage = iter((2, 2**40, 2))
    monkeypatch.setattr(
        token_traffic,
        "read_answer_stream",
        lambda *_: StreamedAnswer(output_tokens=2, usage_tokens=next(usage), ended=True),
    )
    target, writer = InferenceTarget("completions", "http://127.0.0.1:1", "m"), SampleWriter(samples)
    traffic = token_traffic.TokenTraffic(target, prompts, writer, samples)
    connection: Any = Answering()
    for _ in range(3):
        traffic.infer(connection, 0)
    traffic.finish()
    writer.close()
    assert (read_samples(samples)["error"] >= 0).tolist() == [False, True, False]
    assert read_tokens(samples).answers["usage_tokens"].tolist() == [2, -1, 2]
    assert "OverflowError" in traffic.error_messages[0]


class AnsweringInJson:
    def send(self, _request: object, _patches: object = ()) -> Exchange:
        exchange = Exchange()
        exchange.status, exchange.head = 200, b"http/1.1 200 ok\r\n\r\n"
        exchange.body = memoryview(b'{"outputs": [{"name": "y", "datatype": "FP32", "shape": [1, 1], "data": [3.0]}]}')
        return exchange


def test_the_answer_to_a_recorded_request_may_be_in_json() -> None:
    bodies = RecordedBodies((PreparedRequest(b"", b"{}", headers={}),), (1,))
    target = InferenceTarget("http", "http://127.0.0.1:1", "m")
    traffic = Traffic(target, bodies, 1, SampleWriter(None), answers=KeptAnswers(1, 0))
    connection: Any = AnsweringInJson()
    traffic.infer(connection, 0)
    (kept,) = traffic.answers.read()
    assert kept.error is None
    assert unpacked(kept.outputs[0]).tolist() == [[3.0]]


def test_every_request_has_the_same_chance() -> None:
    """Tenths of a block hold a tenth of what is kept each, up to five standard deviations."""
    counts = np.zeros(10)
    for seed in range(300):
        kept = KeptAnswers(8, seed)
        fill(kept, 500)
        for answer in kept.read():
            counts[answer.request // 50] += 1
    assert counts.sum() == 2400
    assert np.abs(counts - 240).max() < 5 * np.sqrt(240 * 0.9)


def test_the_choice_is_the_seeds_alone() -> None:
    chosen = []
    for seed in (1, 1, 2):
        kept = KeptAnswers(4, seed)
        chosen.append([request for request in range(1000) if kept.slot(request) is not None])
    assert chosen[0] == chosen[1] != chosen[2]
    none = KeptAnswers(0, 1)
    assert [none.slot(request) for request in range(3)] == [None, None, None]


def test_a_late_answer_does_not_displace_a_newer_one() -> None:
    kept = KeptAnswers(1, 0)
    for request in (9, 4):
        kept.keep(0, sent(request), lambda: {"y": np.zeros((1, 2))})
    assert [answer.request for answer in kept.read()] == [9]


def test_nan_in_any_row_and_answers_that_cannot_be_read_are_told() -> None:
    def unreadable() -> dict[str, np.ndarray]:
        raise AnswerError("the answer cannot be read: x")

    rows = np.zeros((32, 3), "<f4")
    rows[5, 1] = np.nan
    kept = KeptAnswers(2, 0)
    kept.keep(0, sent(0), lambda: {"y": rows})
    kept.keep(1, sent(1), unreadable)
    first, second = kept.read()
    assert (first.error, len(first.rows)) == ("output y holds NaN or infinite values", MOST_ROWS)
    assert (second.error, second.rows) == ("the answer cannot be read: x", ())


def test_outputs_travel_unchanged() -> None:
    words = np.array([[b"cat", b""], [b"\xff", b"dog"]], dtype=object)
    for array in (words, np.arange(6, dtype="<i8").reshape(2, 3), np.ones((1, 2), "<f2")):
        again = unpacked(packed("y", array))
        assert again.dtype == array.dtype
        assert (again == array).all()


def test_large_outputs_are_passed_on_as_far_as_there_is_room() -> None:
    kept = KeptAnswers(6, 0)
    for slot in range(6):
        kept.keep(slot, sent(slot), lambda: {"y": np.zeros((1, 400_000), "<f4")})
    assert len(kept.read()) == 2
