"""From an expectation and an answer to what is wrong with it."""

from __future__ import annotations

import json

import pytest

from loadgen.conformance.case import Case
from loadgen.conformance.judgement import describe, judge, problems
from loadgen.conformance.records import Answer, Expectation, Fact, Observation, Verdict

BAD = Expectation(statuses=("400",))
JSON = {"content-type": "application/json"}


def refusal(error: object, status: str = "400") -> Answer:
    return Answer(status, JSON, json.dumps({"error": error}).encode())


def test_a_sentence_is_fine() -> None:
    assert problems(BAD, refusal("the shape [2, 3] does not fit /v2/models/x/infer")) == []


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (refusal("no", "500"), "500 instead of 400"),
        (Answer("closed"), "closed instead of 400"),
        (Answer("400", body=b"Bad Request"), "not JSON"),
        (Answer("400"), "no body"),
        (Answer("400", body=b'{"detail": "no"}'), 'no {"error"'),
        (Answer("400", JSON, b'{"error": "no", "code": 3}'), "members besides"),
        (Answer("400", body=b"[" * 100_000), "not JSON"),
        (Answer("400", body=b'{"error": "no"}'), "Content-Type"),
        (refusal(""), "empty"),
        (refusal("one\ntwo"), "more than one line"),
        (refusal("cannot open /srv/models/a/1/model.onnx"), "path"),
        (refusal('File "x.py", line 3, in f'), "traceback"),
        (refusal("failed at infer.cc:312"), "source line"),
        (refusal("cannot map /secret_key"), "key"),
    ],
)
def test_what_is_wrong_is_named(answer: Answer, words: str) -> None:
    expected = Expectation(statuses=("400",), secrets=("secret_key",))
    assert words in "; ".join(problems(expected, answer))


def test_words_numbers_and_headers_are_looked_for() -> None:
    expected = Expectation(statuses=("503",), mentions=(("timeout", "expired"),), numbers=2, headers=("Retry-After",))
    good = Answer("503", {**JSON, "retry-after": "1"}, b'{"error": "Expired after 3 of 5 us"}')
    assert problems(expected, good) == []
    assert len(problems(expected, refusal("no", "503"))) == 3


def test_the_words_of_the_rpc_library_are_not_judged() -> None:
    answer = Answer("INTERNAL", message="")
    assert problems(Expectation(statuses=("INTERNAL",)), answer) == ["the error is empty"]
    assert problems(Expectation(statuses=("INTERNAL",), words_judged=False), answer) == []


def test_what_cannot_be_observed_is_never_fine() -> None:
    case = Case("1", "t", (), Expectation())
    unknown = Fact("memory growth", None, "cannot be read")
    verdict, _, _, not_observed = judge(case, Observation(facts=(unknown,)), [Fact("live", True, "yes")])
    assert verdict is Verdict.NOT_APPLICABLE
    assert not_observed == ["memory growth: cannot be read"]


def test_one_bad_answer_among_many_decides_and_is_shown() -> None:
    case = Case("1", "t", (), BAD)
    answers = (refusal("fine"), refusal("two\nlines"), refusal("also fine"))
    verdict, got, reason, _ = judge(case, Observation(answers))
    assert verdict is Verdict.DEVIATES
    assert got == "3×400 two lines"
    assert reason == "the error is more than one line"


def test_answers_are_counted_by_status() -> None:
    answers = [Answer("200"), Answer("closed"), Answer("200")]
    assert describe(answers) == "2×200; 1×closed"
