"""From a case and an answer to the list of problems."""

from __future__ import annotations

import json

import pytest

from loadgen.conformance.case import Case, describe, judge, problems
from loadgen.conformance.cases import http, select
from loadgen.conformance.model import ServedModel
from loadgen.conformance.records import CaseVerdict, Fact, Response
from loadgen.conformance.servers import Subject

BAD = Case("1", "t", (), "400")
JSON = {"content-type": "application/json"}


def refusal(error: object, status: str = "400") -> Response:
    return Response(status, JSON, json.dumps({"error": error}).encode())


def test_one_sentence_has_no_problem() -> None:
    assert problems(BAD, refusal("the shape [2, 3] does not fit /v2/models/x/infer")) == []


@pytest.mark.parametrize(
    ("response", "words"),
    [
        (refusal("no", "500"), "500 instead of 400"),
        (Response("closed"), "closed instead of 400"),
        (Response("400", body=b"Bad Request"), "not JSON"),
        (Response("400"), "no body"),
        (Response("400", body=b'{"detail": "no"}'), 'not {"error"'),
        (Response("400", JSON, b'{"error": "no", "code": 3}'), "members besides"),
        (Response("400", body=b"[" * 100_000), "not JSON"),
        (Response("400", body=b'{"error": "no"}'), "Content-Type"),
        (refusal(""), "empty"),
        (refusal("one\ntwo"), "more than one line"),
        (refusal("cannot open /srv/models/a/1/model.onnx"), "path"),
        (refusal('File "x.py", line 3, in f'), "traceback"),
        (refusal("failed at infer.cc:312"), "source line"),
        (refusal("cannot map /secret_key"), "key"),
    ],
)
def test_each_problem_is_named(response: Response, words: str) -> None:
    case = Case("1", "t", (), "400", secrets=("secret_key",))
    assert words in "; ".join(problems(case, response))


def test_words_numbers_and_headers_are_checked() -> None:
    case = Case("1", "t", (), "503", naming=("timeout", "expired"), numbers=2, headers=("Retry-After",))
    good = Response("503", {**JSON, "retry-after": "1"}, b'{"error": "Expired after 3 of 5 us"}')
    assert problems(case, good) == []
    assert len(problems(case, refusal("no", "503"))) == 3


def test_errors_of_the_rpc_library_may_say_anything() -> None:
    response = Response("INTERNAL", message="")
    assert problems(Case("1", "t", (), "INTERNAL"), response) == ["the error is empty"]
    assert problems(Case("1", "t", (), "INTERNAL", check_words=False), response) == []


def test_a_case_that_could_not_be_observed_never_conforms() -> None:
    case = Case("1", "t", (), "")
    unknown = Fact("memory growth", None, "cannot be read")
    verdict, _, _, not_observed = judge(case, [unknown], [Fact("live", True, "yes")])
    assert verdict is CaseVerdict.NOT_APPLICABLE
    assert not_observed == ("memory growth: cannot be read",)


def test_one_bad_response_among_many_decides_and_is_shown() -> None:
    responses = (refusal("fine"), refusal("two\nlines"), refusal("also fine"))
    verdict, got, reason, _ = judge(BAD, responses)
    assert verdict is CaseVerdict.DEVIATES
    assert got == "3×400 two lines"
    assert reason == "the error is more than one line"


def test_responses_are_counted_by_status() -> None:
    responses = [Response("200"), Response("closed"), Response("200")]
    assert describe(responses) == "2×200; 1×closed"


class Answering(Subject):
    """A server that gives one body to every request."""

    def raw(self, *_: object, **__: object) -> Response:
        return Response("200", {}, self.answer)

    answer = b""


@pytest.mark.parametrize(
    "event", ["3", '{"choices": [3]}', '{"prompt_tokens": []}', '{"usage": [1], "token_ids": [1]}', "[]"]
)
def test_an_answer_in_an_impossible_form_costs_its_case_alone(event: str) -> None:
    (case,) = (case for case in select("36", language_model=True) if case.number == "36")
    server = Answering("http://127.0.0.1:1", ServedModel("m"))
    server.answer = f"data: {event}\n\n".encode()
    verdict, _, reason, _ = judge(case, case.observe(server))
    assert verdict is CaseVerdict.DEVIATES
    assert "the answers can be read" in reason


def test_the_latency_of_others_is_never_above_that_of_the_slowest_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of five requests, one of which takes 60 ms; the 95th percentile of a larger population would be 101 ms."""
    times = iter([0.0, 0.001, 1.0, 1.001, 2.0, 2.001, 3.0, 3.001, 4.0, 4.060])
    monkeypatch.setattr(http, "perf_counter", lambda: next(times))
    assert http._latency_s(Answering("http://127.0.0.1:1", ServedModel("m")), 5) <= 0.060
