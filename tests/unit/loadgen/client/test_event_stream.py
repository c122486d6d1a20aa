"""A stream means the same however the network cuts it, and whatever a server may send ends in tokens or a sentence."""

from __future__ import annotations

import json
from array import array
from dataclasses import replace
from itertools import accumulate, pairwise
from time import process_time_ns
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.client.event_stream import ReceivedStream
from loadgen.client.generation import StreamedAnswer, read_answer_stream
from loadgen.records.tokens import (
    BY_EVENTS,
    BY_IDS,
    BY_LENGTH,
    BY_RUNNING_USAGE,
    BY_TOTAL_USAGE,
    BY_WORDS,
    LENGTH,
    OTHER,
    STOP,
)

ASKED = 64
SECOND_NS = 10**9


def received(raw: bytes, cuts: list[int] | None = None, *, chunked: bool = False) -> ReceivedStream:
    """A stream that was read in pieces which end at these places, one per second from 0 on."""
    ends = sorted({*(cut for cut in cuts or [] if 0 < cut < len(raw)), len(raw)}) if raw else []
    return ReceivedStream(raw, array("q", ends), array("q", range(0, len(ends) * SECOND_NS, SECOND_NS)), chunked)


def events(*documents: object, end: str = "\n\n") -> bytes:
    return "".join(f"data: {text if isinstance(text, str) else json.dumps(text)}{end}" for text in documents).encode()


def choice(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": "", "logprobs": None, "finish_reason": None, **fields}]}


def usage(prompt: int, completion: int, cached: int | None = None) -> dict[str, Any]:
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    return {"usage": {"prompt_tokens": prompt, "completion_tokens": completion, **details}}


def read(*documents: object) -> StreamedAnswer:
    """The answer of documents that one read brought."""
    return read_answer_stream(received(events(*documents)), ASKED)


def streamed(*documents: object, step_ns: int = SECOND_NS) -> StreamedAnswer:
    """The answer of documents each of which has a read of its own."""
    parts = [events(document) for document in documents]
    ends = array("q", accumulate(map(len, parts)))
    moments = array("q", range(0, len(parts) * step_ns, step_ns))
    return read_answer_stream(ReceivedStream(b"".join(parts), ends, moments), ASKED)


def tokens(answer: StreamedAnswer) -> list[int]:
    return [chunk.tokens for chunk in answer.chunks]


def times(answer: StreamedAnswer) -> list[int]:
    return [chunk.at_ns // SECOND_NS for chunk in answer.chunks]


LINES = st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=12)
ENDS = st.sampled_from(["\n", "\r\n", "\r"])


@st.composite
def written(draw: st.DrawFn) -> tuple[bytes, list[bytes]]:
    """The bytes of some events, and their data."""
    end = draw(ENDS)
    text, expected = "", []
    for lines in draw(st.lists(st.lists(LINES, min_size=1, max_size=3), max_size=6)):
        for comment in draw(st.lists(LINES, max_size=2)):
            text += f":{comment}{end}"
        text += "".join(f"data: {line}{end}" for line in lines) + f"id: 7{end}{end}"
        if (data := "\n".join(lines).encode()).strip():  # without data it keeps the connection alive
            expected.append(data)
    return text.encode(), expected


@st.composite
def in_chunks(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """A body, and the same in chunked coding."""
    body, _ = draw(written())
    places = sorted({0, len(body), *draw(st.lists(st.integers(0, len(body)), max_size=8))})
    parts = [body[start:end] for start, end in pairwise(places) if end > start]
    coded = b"".join(b"%x%s\r\n%s\r\n" % (len(part), draw(st.sampled_from([b"", b";a=b"])), part) for part in parts)
    return body, coded + b"0\r\n\r\n"


@given(written(), st.lists(st.integers(0, 400), max_size=20))
def test_any_cut_gives_the_same_events(stream: tuple[bytes, list[bytes]], cuts: list[int]) -> None:
    raw, expected = stream
    found = list(received(raw, cuts).events())
    assert [event.data for event in found] == expected
    assert all(event.ended for event in found)
    reads = [event.read for event in found]
    assert reads == sorted(reads)


@given(in_chunks(), st.lists(st.integers(0, 600), max_size=20))
def test_chunked_coding_changes_nothing(streams: tuple[bytes, bytes], cuts: list[int]) -> None:
    body, coded = streams
    plain, chunked = list(received(body).events()), received(coded, cuts, chunked=True)
    assert [event.data for event in chunked.events()] == [event.data for event in plain]
    for event in chunked.events():
        before = 0 if event.read == 0 else chunked.ends[event.read - 1]
        until = chunked.ends[event.read]
        sooner = ReceivedStream(coded[:before], array("q", [before]), array("q", [0]), chunked=True)
        later = ReceivedStream(coded[:until], array("q", [until]), array("q", [0]), chunked=True)
        whole = [event for event in later.events() if event.ended]
        assert len([event for event in sooner.events() if event.ended]) < len(whole), "complete before its read"


@given(st.binary(max_size=300), st.booleans())
def test_no_bytes_make_it_fail(raw: bytes, chunked: bool) -> None:
    answer = read_answer_stream(received(raw, [7, 50], chunked=chunked), ASKED)
    assert answer.output_tokens == 0 or answer.chunks


@given(st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**40) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["choices", "usage", "error", "token_ids", "text", "index", "finish_reason", "prompt_tokens"]),
        inner, max_size=4,
    ), max_leaves=12,
))  # fmt: skip
def test_no_document_makes_it_fail(document: object) -> None:
    answer = read(document, document)
    assert answer.output_tokens == sum(chunk.tokens for chunk in answer.chunks)


def test_tokens_of_completions() -> None:
    answer = streamed(
        choice(text=""),
        choice(text=" t7", token_ids=[7], prompt_token_ids=[1, 2]) | usage(2, 1),
        choice(text=" t8 t9", token_ids=[8, 9]) | usage(2, 3),
        choice(token_ids=[]) | usage(2, 3),
        choice(text=" t7", token_ids=[7], finish_reason="length") | usage(2, 4, cached=0),
        {"choices": [], **usage(2, 4)},
        "[DONE]",
    )
    assert (tokens(answer), times(answer), answer.counted) == ([1, 2, 1], [1, 2, 4], BY_IDS)
    assert (answer.ids, answer.prompt_ids) == ([7, 8, 9, 7], [1, 2])
    assert (answer.prompt_tokens, answer.usage_tokens, answer.cached_tokens) == (2, 4, 0)
    assert (answer.finish, answer.ended, answer.has_ids, answer.text_bytes) == (LENGTH, True, True, 12)
    assert answer.fault(4) is None
    assert answer.fault(5) == "answered 4 of 5 tokens (finish reason length)"
    assert answer.fault(5, of_any_length=True) is None


def test_what_one_read_brings_is_one_chunk() -> None:
    ids = [choice(token_ids=[number]) for number in range(8)]
    assert [(chunk.tokens, chunk.events) for chunk in read(*ids).chunks] == [(8, 8)]
    assert [(chunk.tokens, chunk.events) for chunk in streamed(*ids).chunks] == [(1, 1)] * 8
    bursting = streamed(*ids, step_ns=19_000)
    assert [(chunk.tokens, chunk.at_ns) for chunk in bursting.chunks] == [(8, 7 * 19_000)], (
        "no model is as fast as that"
    )
    assert tokens(streamed(*ids, step_ns=50_000)) == [1] * 8


def test_tokens_of_the_generate_extension() -> None:
    about = {"model_name": "m", "model_version": "1"}
    answer = read(
        about | {"token_ids": 7, "prompt_tokens": [3]},
        about | {"token_ids": [8, 9]},
        about | {"token_ids": 1, "finish_reason": ["stop"]},
    )
    assert answer.ids == [7, 8, 9, 1]
    assert (answer.prompt_tokens, answer.finish, answer.usage_tokens) == (3, STOP, -1)
    assert answer.fault(4) is None
    assert answer.fault(6) == "answered 4 of 6 tokens (finish reason stop)"
    assert read(about | {"token_ids": 7}).fault(1) is None
    assert read(about | {"token_ids": 7}).fault(2) == "the stream ended without a finish reason after 1 of 2 tokens"


def chat(**delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}


def final(completion: int, **details: object) -> dict[str, Any]:
    """The last event, with the usage of the whole answer."""
    return {"choices": [], "usage": {"completion_tokens": completion, "completion_tokens_details": details}}


def test_a_chat_with_only_a_role_is_no_token() -> None:
    ended = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
    role = chat(role="assistant", content="")
    answer = streamed(role, chat(content=" t5"), chat(reasoning_content="abc"), ended, final(2), "[DONE]")
    assert (tokens(answer), times(answer), answer.counted) == ([1, 1], [1, 2], BY_TOTAL_USAGE)
    assert (answer.ids, answer.output_tokens, answer.usage_tokens, answer.finish) == ([], 2, 2, LENGTH)
    counted = streamed(role | usage(4, 1), chat(role="assistant", content="a") | usage(4, 2), ended | usage(4, 2))
    assert (tokens(counted), times(counted)) == ([2], [1]), "a count with the role waits for the first text"


@pytest.mark.parametrize(
    ("delta", "text"),
    [
        ({"content": "abc"}, "abc"),
        ({"reasoning": "abc", "content": None}, "abc"),
        ({"reasoning_content": "abc", "reasoning": "abc"}, "abc"),
        ({"thinking": "a", "content": "bc"}, "abc"),
        ({"content": [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}]}, "abc"),
        ({"refusal": "abc", "role": "assistant"}, "abc"),
        ({"tool_calls": [{"index": 0, "id": "x", "type": "function", "function": {"name": "a", "arguments": "bc"}}]},
         "abc"),
        ({"role": "assistant", "content": ""}, ""),
        ({"content": 5, "audio": None}, ""),
    ],
)  # fmt: skip
def test_any_text_of_a_delta_counts(delta: dict[str, Any], text: str) -> None:
    assert read(chat(**delta)).text == text


def test_a_total_is_spread_over_the_text() -> None:
    eights = [chat(content="abcd" * 8)] * 8
    whole = streamed(*eights, final(64))
    assert (tokens(whole), whole.counted) == ([8] * 8, BY_TOTAL_USAGE)
    uneven = streamed(chat(content="abcd" * 56), *[chat(content="abcd")] * 8, final(64))
    assert tokens(uneven) == [56, *[1] * 8], "tokens have about the same text, and chunks have not"
    repeated = [choice(text="abcd" * number) for number in range(1, 9)]
    assert tokens(streamed(*repeated, final(8))) == [1] * 8, "each event has the whole text so far"
    like_ids = streamed(*[choice(text=" t29")] * 32, final(64))
    assert (tokens(like_ids), like_ids.ids, like_ids.fault(64)) == ([2] * 32, [], None)
    by_length = streamed(*[chat(content="abcd" * 8)] * 8, {"choices": [{"finish_reason": "length", "delta": {}}]})
    assert (tokens(by_length), by_length.counted, by_length.fault(64)) == ([8] * 8, BY_LENGTH, None)


def test_a_running_count_belongs_to_the_text_since_the_last_one() -> None:
    grown = streamed(choice(text="ab") | usage(1, 2), choice(text="") | usage(1, 3), choice(text="b") | usage(1, 3))
    assert (tokens(grown), times(grown), grown.counted) == ([2, 1], [0, 2], BY_RUNNING_USAGE)
    empty_first = streamed(choice(text="") | usage(1, 1), *[choice(text="abc") | usage(1, n) for n in range(2, 6)])
    assert (tokens(empty_first), times(empty_first)) == ([2, 1, 1, 1], [1, 2, 3, 4])
    every_second = [choice(text="abc") | (usage(1, n) if n % 2 == 0 else {}) for n in range(1, 9)]
    assert tokens(streamed(*every_second)) == [1] * 8
    constant = streamed(*[choice(text="abcd") | usage(1, 1)] * 8, final(8))
    assert constant.output_tokens == 8, "a count of each event by itself does not grow"
    without_text = streamed(*[choice(text="abcd") | usage(1, n) for n in range(1, 5)], choice(text="") | usage(1, 9))
    assert (tokens(without_text), times(without_text)) == ([1, 1, 1, 1, 5], [0, 1, 2, 3, 4]), "the time of the count"


def test_words_and_events_count_where_the_server_counts_nothing() -> None:
    words = streamed(choice(text="t5 t17"), choice(text=" t3"))
    assert (words.ids, tokens(words), words.counted) == ([5, 17, 3], [2, 1], BY_WORDS)
    prose = streamed(choice(text="Once"), choice(text=" upon a"), {"choices": [], **usage(1, 4)}, "[DONE]")
    assert (sum(tokens(prose)), prose.fault(4)) == (4, None)
    unknown = streamed(choice(text="Once"), choice(text=" more", finish_reason="length"))
    assert (unknown.counted, unknown.output_tokens, unknown.fault(ASKED)) == (BY_LENGTH, ASKED, None)
    stopped = read(choice(text="Once", finish_reason="stop"))
    assert stopped.counted == BY_EVENTS
    assert stopped.fault(9) == "answered 1 of 9 tokens (finish reason stop)"


def test_thoughts_that_are_counted_and_not_streamed() -> None:
    visible = [chat(content="abcd")] * 14
    hidden = streamed(*visible, final(64, reasoning_tokens=50))
    assert (hidden.hidden_tokens, tokens(hidden), hidden.fault(64)) == (50, [51, *[1] * 13], None)
    short = streamed(chat(role="assistant"), final(2, reasoning_tokens=2), "[DONE]")
    assert (short.fault(2, of_any_length=True), short.fault(2) is None) == (None, False), (
        "it warms up, and shows nothing"
    )
    streams = streamed(*[chat(reasoning="abcd")] * 50, *visible, final(64, reasoning_tokens=50))
    assert (streams.hidden_tokens, tokens(streams)) == (0, [1] * 64)
    inline = streamed(chat(content="<think>"), *[chat(content="abcd")] * 63, final(64, reasoning_tokens=50))
    assert inline.hidden_tokens == 0


@pytest.mark.parametrize(
    "documents",
    [
        [chat(content="abc"), final(ASKED)],
        [*[choice(text="abcd") | usage(1, n) for n in range(1, 9)], final(4)],
        [choice(token_ids=list(range(200)))],
        [choice(text="a") | usage(1, 2**31 - 1)],
        [choice(text="a") | usage(1, 2**40)],
        [choice(text="a") | usage(2**40, 1)],
        [chat(content="abc") | {"id": "1"}, chat(content="abc") | {"id": "2"}],
        [choice(text="a", finish_reason="length"), choice(text="b")],
        [choice(token_ids=[1], finish_reason="stop"), choice(token_ids=[2])],
        [choice(text="") | usage(1, 64), "[DONE]"],
    ],
    ids=["more tokens than bytes", "counts back", "too many ids", "claims", "no int32", "prompt", "two answers",
         "text after its end", "ids after its end", "nothing but a count"],
)  # fmt: skip
def test_a_contradiction_is_no_answer(documents: list[object]) -> None:
    assert streamed(*documents).fault(ASKED, of_any_length=True) is not None


@pytest.mark.parametrize("error", ["", {}, None, False, 0, [], {"message": "", "code": None}])
def test_an_empty_error_is_none(error: object) -> None:
    assert read(choice(token_ids=[1]) | {"error": error}).fault(1) is None


def test_what_is_not_used_may_be_anything() -> None:
    odd = {"logprobs": float("nan"), "usage": [], "system_fingerprint": {"a": [1]}, "created": "now", "id": 7}
    assert read(choice(token_ids=[1], logprobs="?") | odd).fault(1) is None
    raw = b'event: ping\ndata: {"type": "ping"}\n\nevent: ping\ndata: pong\n\ndata:\n\ndata: \n\n'
    half_pair = b'data: {"choices": [{"text": "\\ud83d", "token_ids": [1]}]}\n\n'
    assert read_answer_stream(received(raw + half_pair), 1).fault(1) is None


@pytest.mark.parametrize(
    ("head", "body", "words"),
    [
        (
            b"content-type: application/json",
            b'{"choices": [{"text": "all at once"}]}',
            ["application/json", "all at once"],
        ),
        (b"content-type: text/html", b"<html><title>Busy &amp; gone</title>", ["text/html", "title Busy & gone"]),
        (b"content-type: application/json", b'{"error": {"message": "no such model"}}', [": no such model"]),
        (b"content-encoding: gzip", b"\x1f\x8b\x00", ["compressed (gzip)"]),
        (b"content-type: application/x-ndjson", b'{"response": "t1"}\n', ["application/x-ndjson"]),
    ],
)
def test_what_is_no_stream_is_named(head: bytes, body: bytes, words: list[str]) -> None:
    """The same words whether the body came whole or in chunks."""
    faults = set()
    for chunked, raw in ((False, body), (True, b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))):
        stream = replace(received(raw, chunked=chunked), head=b"http/1.1 200 ok\r\n" + head + b"\r\n\r\n")
        faults.add(read_answer_stream(stream, ASKED).fault(ASKED))
    (fault,) = faults
    assert fault is not None
    assert all(word in fault for word in words)


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        ({"error": {"message": "out of memory", "code": 500}}, "error event: out of memory"),
        ({"error": "in one word"}, "error event: in one word"),
        ({"object": "error", "message": "the old form"}, "error event: the old form"),
        ({"error": "two\nlines \x1b[31m"}, "error event: two lines �[31m"),
    ],
)
def test_an_error_event_is_no_token(document: object, sentence: str) -> None:
    assert read(document).fault(4) == sentence
    later = read(choice(token_ids=[1]), document)
    assert later.fault(4) == f"{sentence} (after 1 of 4 tokens)"
    assert later.output_tokens == 1


@pytest.mark.parametrize(
    "text",
    [
        '{"token_ids": -1}', '{"token_ids": 1e99}', '{"token_ids": 99999999999}', '{"token_ids": "7"}', "[1]",
        '{"token_ids": ' + "[" * 100_000, "NaN", "\ufffe\ud83d",
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_said(text: str) -> None:
    fault = read_answer_stream(received(f"data: {text}\n\n".encode("utf-8", "surrogatepass")), ASKED).fault(4)
    assert fault is not None
    assert len(fault) < 500


def test_half_an_event_at_the_end() -> None:
    whole = events(choice(token_ids=[1]), choice(token_ids=[2], finish_reason="length"))
    for cut in range(1, len(whole)):
        answer = read_answer_stream(received(whole[:cut]), ASKED)
        assert answer.output_tokens <= 2
        assert (answer.fault(2) is None) == (cut >= len(whole) - 2), "the empty line alone may be missing"
    torn = read_answer_stream(received(whole[:-9]), ASKED)
    assert (torn.torn, torn.fault(2)) == (True, "the stream ended inside an event after 1 of 2 tokens")
    nothing = read_answer_stream(received(b""), ASKED)
    assert nothing.fault(2) == "the stream ended without a finish reason after 0 of 2 tokens"
    after_done = events(choice(token_ids=[1]), "[DONE]") + b"data: {"
    assert read_answer_stream(received(after_done), ASKED).fault(1) is None


def test_an_answer_without_end_is_read_in_time() -> None:
    """The limit of the client is tried with what takes longest to read."""
    for line in (b"\n", b"\r\n", b": \n", b"data:\n\n", b'data: {"token_ids":5}\n\n', b'data: {"choices":[]}\n\n'):
        raw = line * (2**20 // len(line))
        began_ns = process_time_ns()
        assert read_answer_stream(received(raw), ASKED).fault(ASKED) is not None
        assert process_time_ns() - began_ns < 5 * SECOND_NS, line


def test_other_words_for_the_end() -> None:
    assert read(choice(token_ids=[1], finish_reason="abort")).finish == OTHER
    assert read(choice(token_ids=[1], finish_reason="eos_token")).finish == STOP
    long = read(choice(token_ids=[1], finish_reason="x" * 500)).fault(2)
    assert long is not None
    assert len(long) < 100
