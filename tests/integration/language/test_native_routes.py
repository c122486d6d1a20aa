"""Both routes of the native server of a language model, with the scripted engine and real sockets."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.integration.language.conftest import EventStream, events_of, post
from tests.integration.native.conftest import Server, wait_until
from tests.scripted_generation import scripted_answer

PROMPT = [5, 17, 999]
COMPLETION: dict[str, Any] = {
    "model": "scripted",
    "prompt": PROMPT,
    "max_tokens": 6,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
    "return_token_ids": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "cache_salt": "x",
}
GENERATE: dict[str, Any] = {"input_ids": PROMPT, "max_tokens": 6, "ignore_eos": True}
STREAM = "/v2/models/scripted/generate_stream"
ANSWER = scripted_answer(PROMPT, 6)


def completion_events(server: Server, **changes: object) -> list[Any]:
    with EventStream(server, "/v1/completions", {**COMPLETION, **changes}) as stream:
        assert stream.read_head() == 200
        assert b"content-type: text/event-stream" in stream.head
        return stream.events()


def test_a_completion_is_streamed_token_by_token(scripted: Server) -> None:
    *chunks, usage, done = completion_events(scripted)
    assert done == "[DONE]"
    assert len(chunks) == 6
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["token_ids"] for choice in choices] == [[token] for token in ANSWER]
    assert "".join(choice["text"] for choice in choices) == " ".join(f"t{token}" for token in ANSWER)
    assert [choice["finish_reason"] for choice in choices] == [None] * 5 + ["length"]
    assert choices[0]["prompt_token_ids"] == PROMPT
    assert all("prompt_token_ids" not in choice for choice in choices[1:])
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 4, 5, 6]
    assert usage["choices"] == []
    assert usage["usage"] == {"prompt_tokens": 3, "total_tokens": 9, "completion_tokens": 6}
    (common,) = {(chunk["id"], chunk["object"], chunk["created"], chunk["model"]) for chunk in [*chunks, usage]}
    assert common[1::2] == ("text_completion", "scripted")


def test_a_completion_streams_only_what_was_asked_for(scripted: Server) -> None:
    *chunks, done = completion_events(scripted, return_token_ids=False, stream_options=None)
    assert done == "[DONE]"
    assert len(chunks) == 6
    assert {chunk["usage"] for chunk in chunks} == {None}
    assert all("token_ids" not in chunk["choices"][0] for chunk in chunks)


@pytest.mark.parametrize("prompt", ["t5 t17 t999", ["t5 t17 t999"], [PROMPT], PROMPT])
def test_a_prompt_is_ids_or_words(scripted: Server, prompt: object) -> None:
    status, answer = post(scripted, "/v1/completions", {**COMPLETION, "prompt": prompt, "stream": False} | WHOLE)
    assert status == 200
    (choice,) = answer["choices"]
    assert choice["token_ids"] == ANSWER
    assert choice["prompt_token_ids"] == PROMPT
    assert choice["text"] == " ".join(f"t{token}" for token in ANSWER)
    assert choice["finish_reason"] == "length"
    assert answer["usage"] == {"prompt_tokens": 3, "total_tokens": 9, "completion_tokens": 6}


WHOLE = {"stream_options": None}


def test_an_answer_stops_at_its_end_unless_told_not_to(scripted: Server) -> None:
    *chunks, _, _ = completion_events(scripted, ignore_eos=False, max_tokens=100)
    assert len(chunks) == 8
    assert chunks[-1]["choices"][0] | {"finish_reason": "stop", "token_ids": [0]} == chunks[-1]["choices"][0]


def test_generate_streams_as_triton_does(scripted: Server) -> None:
    with EventStream(scripted, STREAM, GENERATE) as stream:
        assert stream.read_head() == 200
        events = stream.events()
    assert [event["token_ids"] for event in events] == ANSWER
    assert [event.get("prompt_tokens") for event in events] == [3, *[None] * 5]
    assert [event.get("finish_reason") for event in events] == [*[None] * 5, "length"]
    assert {(event["model_name"], event["model_version"]) for event in events} == {("scripted", "1")}


def test_generate_gives_one_document(scripted: Server) -> None:
    tensors = {"input_ids": PROMPT, "max_tokens": [6]}
    for path in ("/v2/models/scripted/generate", "/v2/models/scripted/versions/1/generate"):
        status, answer = post(scripted, path, tensors)
        assert status == 200
        assert answer["token_ids"] == ANSWER
        assert answer["prompt_tokens"] == 3
        assert answer["finish_reason"] == "length"


def test_a_client_of_http_1_0_gets_the_same_events_without_chunks(scripted: Server) -> None:
    with EventStream(scripted, STREAM, GENERATE, version="1.0") as stream:
        assert stream.read_head() == 200
        assert b"transfer-encoding" not in stream.head
        assert [event["token_ids"] for event in events_of(stream.read_until(b"never"))] == ANSWER


def test_a_connection_takes_the_next_request_after_a_stream(scripted: Server) -> None:
    with EventStream(scripted, STREAM, GENERATE) as stream:
        stream.read_head()
        first = stream.events()
        body = b'{"input_ids":[5,17,999],"max_tokens":6}'
        stream._received.clear()
        stream.socket.sendall(
            b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (STREAM.encode(), len(body), body)
        )
        assert stream.read_head() == 200
        assert stream.events() == first


REFUSED: list[tuple[dict[str, object], int, str]] = [
    ({"prompt": [5, 1000]}, 400, "token id 1000 is not in the vocabulary; ids are from 0 to 999"),
    ({"prompt": [-1]}, 400, "the prompt is not valid"),
    ({"prompt": [5.5]}, 400, "the prompt is not valid"),
    ({"prompt": [True]}, 400, "the prompt is not valid"),
    ({"prompt": [2**70]}, 400, "the prompt is not valid"),
    ({"prompt": []}, 400, "the prompt is empty"),
    ({"prompt": None}, 400, "the prompt must be a list of token ids"),
    ({"prompt": "hello"}, 400, "unknown word 'hello'"),
    ({"prompt": [[1], [2]]}, 400, "the request has 2 prompts"),
    ({"prompt": [1] * 251}, 400, "together they must not exceed the maximum length of 256"),
    ({"max_tokens": 0}, 400, "max_tokens is 0; it must be at least 1"),
    ({"max_tokens": -1}, 400, "max_tokens"),
    ({"max_tokens": 2**40}, 400, "max_tokens"),
    ({"n": 2}, 400, "n must be 1: each prompt gets one answer"),
    ({"best_of": 2}, 400, "best_of must be 1"),
    ({"echo": True}, 400, "echo must be false"),
    ({"suffix": "x"}, 400, "suffix is not supported"),
    ({"logprobs": 1}, 400, "logprobs is not supported"),
    ({"temperature": 0.7}, 400, "temperature must be 0"),
    ({"stop": ["x"]}, 400, "stop is not supported"),
    ({"model": "other"}, 404, "the model 'other' does not exist; this server has 'scripted'"),
    ({"stream": False}, 400, "stream_options is for streamed answers"),
]


@pytest.mark.parametrize(("changes", "status", "sentence"), REFUSED, ids=[str(row[0])[:40] for row in REFUSED])
def test_what_cannot_be_answered_is_refused_in_one_sentence(
    scripted: Server, changes: dict[str, object], status: int, sentence: str
) -> None:
    got, answer = post(scripted, "/v1/completions", {**COMPLETION, **changes})
    assert got == status
    error = answer["error"]
    assert sentence in error["message"]
    assert "\n" not in error["message"]
    assert (error["code"], error["param"]) == (status, None)
    assert error["type"] == ("NotFoundError" if status == 404 else "BadRequestError")


@pytest.mark.parametrize(
    ("changes", "status", "sentence"),
    [
        ({"input_ids": [1000]}, 400, "token id 1000"),
        ({"input_ids": []}, 400, "the prompt is empty"),
        ({"input_ids": None}, 400, "send the prompt's token ids as 'input_ids'"),
        ({"input_ids": [1] * 300}, 400, "maximum length of 256"),
        ({"max_tokens": 0}, 400, "max_tokens is 0"),
        ({"max_tokens": [1, 2]}, 400, "max_tokens must have one value"),
        ({"n": 2}, 400, "n must be 1"),
    ],
)
@pytest.mark.parametrize("route", ["generate", "generate_stream"])
def test_generate_refuses_in_tritons_form(
    scripted: Server, route: str, changes: dict[str, object], status: int, sentence: str
) -> None:
    got, answer = post(scripted, f"/v2/models/scripted/{route}", {**GENERATE, **changes})
    assert got == status
    assert set(answer) == {"error"}
    assert sentence in answer["error"]


def test_what_is_no_request_is_refused(scripted: Server) -> None:
    for body in (b"", b"{", b"[]", b'"x"', b"\xff", b"[" * 5000):
        for path in ("/v1/completions", STREAM):
            assert scripted.request("POST", path, body).status == 400
    assert scripted.request("GET", "/v1/completions").status == 405
    assert scripted.request("POST", "/v2/models/other/generate_stream", b"{}").status == 404
    assert scripted.request("POST", "/v2/models/scripted/infer", b"{}").status == 404
    large = scripted.request("POST", "/v1/completions", b" " * 200_000)
    assert large.status == 413
    packed = scripted.request("POST", "/v1/completions", b"{}", {"Content-Encoding": "gzip"})
    assert packed.status == 400


def test_the_documents_about_the_model(scripted: Server) -> None:
    def get(path: str) -> Any:
        answer = scripted.request("GET", path)
        assert answer.status == 200
        return json.loads(answer.body)

    (model,) = get("/v1/models")["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("scripted", "model", 256)
    assert get("/v2/models/scripted")["inputs"][0] == {"name": "input_ids", "datatype": "INT32", "shape": [-1]}
    parameters = get("/v2/models/scripted/config")["parameters"]
    shown = {name: parameters[name]["string_value"] for name in ("engine", "slots", "max_length", "vocabulary", "eos")}
    assert shown == {"engine": "scripted", "slots": "4", "max_length": "256", "vocabulary": "1000", "eos": "0"}
    assert get("/gpu-info")["schema"].startswith("abserve.gpu-info/")
    assert scripted.status("/v2/models/scripted/ready") == 200
    assert get("/v2")["extensions"][0] == "generate"


def test_statistics_count_tokens(scripted: Server) -> None:
    names = (
        *("prompt_tokens_total", "output_tokens_total", "requests_success_total"),
        "first_token_duration_seconds_count",
    )

    def counts() -> list[float]:
        return [scripted.metric(f"abserve_native_{name}{{") for name in names]

    before = counts()
    completion_events(scripted)
    completion_events(scripted)
    # The engine sends tokens before it counts them.
    wait_until(lambda: sum(counts()) >= sum(before) + 22, "all are counted")
    assert [after - was for after, was in zip(counts(), before, strict=True)] == [6, 12, 2, 2]
    assert scripted.metric("abserve_native_slots_in_use{") == 0
    assert scripted.metric("abserve_native_pending_requests{") == 0
    assert scripted.model_stats()["inference_stats"]["success"]["count"] >= 2
