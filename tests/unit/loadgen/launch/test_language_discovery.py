"""What two URLs serve and how they are asked: real answers over HTTP of servers of language models, and of others."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.base.headers import read_headers
from loadgen.client.endpoint import CompletionsEndpoint, Endpoint, EndpointError
from loadgen.launch import discovery
from loadgen.launch.deployment import DeploymentError
from loadgen.launch.discovery import Refusal, ServedTokens, find_language_models, fitting_body
from loadgen.records.run import TOKENS_PLACE, Access, ArmRequest, Label
from loadgen.records.targets import TOKEN_TRANSPORTS, TokenTransport
from tests.hostile_server import HostileServer, hostile_server
from tests.toy_language_server import toy_server

Toy = Callable[..., str]
Answers = Mapping[str, tuple[int, dict[str, str], bytes]]
TENSORS: Answers = {"/v2/health/live": (200, {}, b""), "/v2/repository/index": (200, {}, b"[]")}
OPENAI = "--routes ids,text,chat"


@pytest.fixture
def toy() -> Iterator[Toy]:
    """Starts servers that stream without a delay; returns their URL."""
    with ExitStack() as running:
        yield lambda flags=OPENAI: running.enter_context(toy_server(f"--first-ms 0 --step-ms 0 {flags}")).url


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostileServer]:
    monkeypatch.setattr(discovery, "RUNNING_READY_SECONDS", 0.5)
    with hostile_server() as server:
        yield server


def found(*urls: str, certain: bool = False, **of_b: object) -> Mapping[Label, ServedTokens] | None:
    arms = [ArmRequest(label=label, target=url) for label, url in zip("abc", urls, strict=False)]
    arms[1] = ArmRequest(label="b", target=urls[1], **of_b)  # type: ignore[arg-type]  # any of its fields
    return find_language_models(arms, "default", certain=certain)


def refusal(*urls: str, certain: bool = False, **of_b: object) -> str:
    """The error, which is about B alone."""
    with pytest.raises(DeploymentError) as caught:
        found(*urls, certain=certain, **of_b)
    words = str(caught.value)
    assert words.startswith(f"--b {urls[1]}")
    assert urls[0] not in words
    return words


def test_an_arm_that_wants_a_key_is_named_and_gets_one(toy: Toy) -> None:
    a, b = toy(), toy(f"{OPENAI} --key s3cret-key")
    said = refusal(a, b)
    assert (
        "GET /v1/models answers 401 (Incorrect API key provided); add --b-header 'Authorization: Bearer $KEY'" in said
    )
    wrong = Access(header=read_headers({"Authorization": "Bearer other-key"}))
    assert refusal(a, b, access=wrong).endswith("check the value of --b-header")
    right = Access(header=read_headers({"Authorization": "Bearer s3cret-key"}))
    served = found(a, b, access=right)
    assert served is not None
    assert [tokens.model for tokens in served.values()] == ["planted", "planted"]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((403, {}, b'{"detail": "no bearer-value here"}'), "403 (no … here); check the value of --b-header"),
        ((307, {"Location": "/API/v1/models"}, b""), "307 (redirects to /API/v1/models); give the URL to which"),
        ((200, {}, b"<html><title>Chat</title></html>"), "200 (a web page with the title Chat); correct the URL, or"),
        ((404, {}, b"no such page"), "404 (no such page); correct the URL, or"),
        ((503, {}, b'{"error": "Loading model"}'), "503 (Loading model); read that server's log"),
        ((200, {}, b'{"data": []}'), "it serves no language model that it lists (GET /v1/models: 200 (no models)"),
    ],
)
def test_the_arm_at_fault_is_named_with_route_status_and_words(
    toy: Toy, other: HostileServer, answer: tuple[int, dict[str, str], bytes], words: str
) -> None:
    """Two models keep A's from being tried on B."""
    other.answers["/v1/models"] = answer
    header = Access(header=read_headers({"Authorization": "Bearer bearer-value"}))
    said = refusal(toy(f"{OPENAI} --model x --models several"), other.url, access=header, model=None)
    assert words in said


def test_nothing_is_blamed_on_a_healthy_arm_whatever_the_other_is(toy: Toy, other: HostileServer) -> None:
    a = toy()
    other.answers |= TENSORS
    assert "it serves no language model that it lists" in refusal(a, other.url)
    assert "start it, or correct the URL" in refusal(a, "http://127.0.0.1:1")
    other.answers = {"/v2/health/live": (500, {}, b"")}
    assert "GET /v1/models answers 404 (Not Found); correct the URL, or" in refusal(a, other.url)


def test_servers_of_tensors_are_none_of_language_models(other: HostileServer, toy: Toy) -> None:
    other.answers |= TENSORS
    assert found(other.url, other.url) is None
    assert found(other.url, "http://127.0.0.1:1") is None
    assert found(other.url, toy("--key k")) is None  # which is then judged as one of tensors
    assert found(other.url, toy("--routes generate")) is None


@pytest.mark.parametrize("transport", TOKEN_TRANSPORTS)
def test_a_server_without_a_list_needs_a_name_and_may_have_a_protocol(toy: Toy, transport: TokenTransport) -> None:
    a, b = toy(), toy("--models 404")
    served = found(a, b, model="planted", transport=transport, certain=True)
    assert served is not None
    assert [*served["b"].bodies] == [transport]
    of_only_model = found(a, toy(f"{OPENAI} --models 404"))
    assert of_only_model is not None
    assert (of_only_model["b"].model, [*of_only_model["b"].bodies]) == ("planted", ["completions", "text"])


def test_a_list_that_fails_makes_no_server_of_tensors(toy: Toy) -> None:
    """Both speak the Open Inference Protocol, too."""
    served = found(toy(), toy("--models 500"), model="planted")
    assert served is not None
    assert served["b"].model == "planted"


def test_a_name_that_is_not_listed_is_tried(toy: Toy) -> None:
    served = found(toy(), toy(f"{OPENAI} --models adapters"), model="lora")
    assert served is not None
    assert (served["b"].model, served["b"].notes) == ("lora", ())
    one = toy(f"{OPENAI} --models one")
    served = found(toy(), one, model="lora")
    assert served is not None
    assert served["b"].notes == (f"{one} lists planted, and answers prompts to lora",)
    said = refusal(toy(), toy(), model="typo")
    assert "The model `typo` does not exist." in said
    assert "it serves planted: choose one with --b-model" in said


def test_adapters_are_offered_and_not_mistaken_for_a_second_model(toy: Toy) -> None:
    served = found(toy(), toy(f"{OPENAI} --models adapters"))
    assert served is not None
    assert (served["a"].notes, served["b"].model) == ((), "planted")
    assert "lora" in served["b"].notes[0]
    assert "--b-model" in served["b"].notes[0]


@pytest.mark.parametrize("answer", [
    b'[{"id": "planted"}]', b'{"data": [{"id": "planted", "parent": "planted", "root": {"a": 1}}]}',
    b'{"data": [{"id": "planted", "parent": "x"}, {"id": "x", "parent": "planted", "root": "planted"}, {"id": 3}, 4]}',
])  # fmt: skip
def test_odd_lists_are_read(toy: Toy, other: HostileServer, answer: bytes) -> None:
    """The model is found, and only its prompts fail, since this server has no other routes."""
    for more in (b"", b" " * 2**21):  # as long as the list of a gateway
        other.answers["/v1/models"] = (200, {}, answer + more)
        assert "planted answers no prompt (HTTP 404: Not Found)" in refusal(toy(), other.url)


@pytest.mark.parametrize(
    "answer", [b"null", b"3", b'{"data": null}', b'{"data": {}}', b"\xff", b"[[", b'{"data": [3]}']
)
def test_what_is_no_list_is_named(toy: Toy, other: HostileServer, answer: bytes) -> None:
    other.answers["/v1/models"] = (200, {}, answer)
    assert "GET /v1/models" in refusal(toy(), other.url).splitlines()[0]


def test_several_models_are_left_to_the_user_unless_one_is_common(toy: Toy) -> None:
    assert "planted, embedding; choose one with --b-model" in refusal(toy("--model x"), toy("--models several"))
    served = found(toy(), toy("--models several"))
    assert served is not None
    assert served["b"].model == "planted"


@pytest.mark.parametrize("like", ["vllm", "openai", "fastapi"])
@pytest.mark.parametrize(
    ("flags", "changes"),
    [
        ("--refuse cache_salt", {"cache_salt": None}),
        ("--refuse ignore_eos,return_token_ids", {"ignore_eos": None, "return_token_ids": None}),
        ("--refuse max_tokens", {"max_tokens": None, "max_completion_tokens": TOKENS_PLACE}),
        ("--refuse temperature,stream_options", {"temperature": None, "stream_options": None}),
        ("--strict", {"cache_salt": None, "return_token_ids": None, "ignore_eos": None}),
    ],
)
def test_what_a_server_refuses_is_left_out_for_it(toy: Toy, like: str, flags: str, changes: dict[str, object]) -> None:
    served = found(toy(), toy(f"{OPENAI} --refuse-like {like} {flags}"))
    assert served is not None
    assert served["a"].bodies["completions"] == {}
    assert served["b"].bodies["completions"] == changes


def test_what_the_user_says_is_not_searched(toy: Toy) -> None:
    b = toy(f"{OPENAI} --refuse cache_salt,top_k,ignore_eos")
    served = found(toy(), b, body={"cache_salt": None})
    assert served is not None
    assert served["b"].bodies["text"] == {"cache_salt": None, "ignore_eos": None}
    assert "top_k" in refusal(toy(), b, body={"top_k": 1})


def test_a_table_has_every_question_and_an_error_quotes_it(toy: Toy) -> None:
    shown: list[str] = []
    arms = [ArmRequest(label="a", target=toy()), ArmRequest(label="b", target=toy("--routes chat --instead 500"))]
    with pytest.raises(DeploymentError) as caught:
        find_language_models(arms, "default", certain=False, show=shown.append)
    table = shown[0].splitlines()
    of_b = table[table.index(f"B {arms[1].target} was asked:") :]
    assert str(caught.value).splitlines()[1:] == of_b
    assert [line.split()[:2] for line in of_b[1:]] == [
        ["GET", "/v1/models"], ["GET", "/v2/health/live"], ["POST", "/v1/completions"], ["and", "7"],
        ["POST", "/v1/completions"], ["and", "7"], ["POST", "/v1/chat/completions"], ["and", "6"],
    ]  # fmt: skip
    assert "500: the server answers 500" in of_b[-2]


FIELDS = ("cache_salt", "return_token_ids", "ignore_eos", "stream_options", "max_tokens", "temperature")


@given(st.sets(st.sampled_from(FIELDS)), st.sampled_from(["none", "first", "all", "all of the request"]))
def test_the_smallest_change_is_found_whatever_a_refusal_names(refused: set[str], names: str) -> None:
    """Also by a server that says no more than that the request is bad."""

    def ask(body: Mapping[str, object]) -> Refusal | None:
        sent = [name for name in FIELDS if name not in body or body[name] is not None]
        bad = [name for name in sent if name in refused]
        named = {"none": [], "first": bad[:1], "all": bad, "all of the request": sent}[names]
        return Refusal(400, f"bad request: {', '.join(named)}") if bad else None

    body, failed = fitting_body(ask, "completions", {})
    assert failed is None
    assert {name for name, value in body.items() if value is None} == refused
    assert ("max_completion_tokens" in body) == ("max_tokens" in refused)
    assert "stream_options" in refused or "stream_options" not in body


def test_a_route_that_is_refused_does_not_keep_others_from_being_tried(toy: Toy, other: HostileServer) -> None:
    """A gateway may keep a key from one route."""
    other.answers["/v1/models"] = (200, {}, b'{"data": [{"id": "planted", "root": "", "parent": null}]}')
    other.answers["/v1/completions"] = (403, {}, b'{"message": "not this route"}')
    stream = (
        b'data: {"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": "length"}]}\n\ndata: [DONE]\n\n'
    )
    other.answers["/v1/chat/completions"] = (200, {"Content-Type": "text/event-stream"}, stream)
    served = found(toy(), other.url)
    assert served is not None
    assert [*served["b"].bodies] == ["chat"]


def test_a_length_that_has_no_effect_is_asked_for_under_its_other_name(toy: Toy, other: HostileServer) -> None:
    """This server answers with nine tokens whatever it is asked."""
    other.answers["/v1/models"] = (200, {}, b'{"data": [{"id": "planted"}]}')
    token = b'data: {"choices": [{"index": 0, "text": " a", "token_ids": [7]}]}\n\n'
    other.answers["/v1/completions"] = (200, {"Content-Type": "text/event-stream"}, 9 * token + b"data: [DONE]\n\n")
    said = refusal(toy(), other.url)
    assert "max_tokens has no effect: the answer has 9 tokens instead of 2" in said
    assert "without max_tokens and with max_completion_tokens={output_tokens}" in said


def test_a_chat_is_tried_on_all_where_one_has_nothing_else(toy: Toy) -> None:
    served = found(toy(), toy("--routes chat"))
    assert served is not None
    assert [sorted(tokens.bodies) for tokens in served.values()] == [["chat", "completions", "text"], ["chat"]]
    served = found(toy("--routes ids"), toy("--routes chat"))
    assert served is not None
    assert [*served["a"].bodies] == ["completions"]


def test_a_page_for_every_path_is_no_document(other: HostileServer) -> None:
    page = (200, {"Content-Type": "text/html; charset=utf-8"}, b"<html>")
    other.answers = dict.fromkeys(("/v2", "/v1/models", "/v2/health/live", "/v2/repository/index"), page)
    assert not Endpoint(other.url).live()
    assert CompletionsEndpoint(other.url).document("/v2") is None
    assert CompletionsEndpoint(other.url).ready("any")
    with pytest.raises(EndpointError, match="no connection"):
        CompletionsEndpoint("http://127.0.0.1:1").document("/v2")


@pytest.mark.parametrize("status", [0, 200, 401, 404, 429, 503])
def test_other_faults_are_asked_once(status: int) -> None:
    asked = itertools.count()
    body, failed = fitting_body(lambda _: Refusal(status, f"number {next(asked)}"), "chat", {"x": 1})
    assert (body, failed) == ({"x": 1}, Refusal(status, "number 0"))
    assert next(asked) == 1


def test_counts_in_the_stream_are_left_out_before_all_counts() -> None:
    def ask(body: Mapping[str, object]) -> Refusal | None:
        options = body.get("stream_options", {"continuous_usage_stats": True})
        refused = isinstance(options, dict) and "continuous_usage_stats" in options
        return Refusal(422, "stream_options.continuous_usage_stats: Extra inputs") if refused else None

    assert fitting_body(ask, "chat", {}) == ({"stream_options": {"include_usage": True}}, None)
