"""A stream means the same however the network cuts it, and whatever a server may send ends in tokens or a sentence."""

from __future__ import annotations

import json
from array import array
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.client.event_stream import ReceivedStream
from loadgen.client.generation import StreamedAnswer, read_answer_stream
from loadgen.records.tokens import ASSUMED, BY_USAGE, COALESCED, LENGTH, OTHER, STOP


def received(raw: bytes, cuts: list[int] | None = None, *, chunked: bool = False) -> ReceivedStream:
    """A stream that was read in pieces which end at these places; the read `i` has the time i."""
    ends = sorted({*(cut for cut in cuts or [] if 0 < cut < len(raw)), len(raw)}) if raw else []
    return ReceivedStream(raw, array("q", ends), array("q", range(len(ends))), chunked)


def events(*documents: object, end: str = "\n\n") -> bytes:
    return "".join(f"data: {text if isinstance(text, str) else json.dumps(text)}{end}" for text in documents).encode()


def choice(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": "", "logprobs": None, "finish_reason": None, **fields}]}


def usage(prompt: int, completion: int, cached: int | None = None) -> dict[str, Any]:
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    return {"usage": {"prompt_tokens": prompt, "completion_tokens": completion, **details}}


def read(*documents: object) -> StreamedAnswer:
    return read_answer_stream(received(events(*documents)))


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
        expected.append("\n".join(lines).encode())
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
    found = received(raw, cuts).events()
    assert [event.data for event in found] == expected
    assert all(event.ended for event in found)
    reads = [event.read for event in found]
    assert reads == sorted(reads)


@given(in_chunks(), st.lists(st.integers(0, 600), max_size=20))
def test_chunked_coding_changes_nothing(streams: tuple[bytes, bytes], cuts: list[int]) -> None:
    body, coded = streams
    plain, chunked = received(body).events(), received(coded, cuts, chunked=True)
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
    answer = read_answer_stream(received(raw, [7, 50], chunked=chunked))
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
    answer = read(
        choice(text=""),
        choice(text=" t7", token_ids=[7], prompt_token_ids=[1, 2]) | usage(2, 1),
        choice(text=" t8 t9", token_ids=[8, 9]) | usage(2, 3),
        choice(token_ids=[]) | usage(2, 3),
        choice(text=" t7", token_ids=[7], finish_reason="length") | usage(2, 4, cached=0),
        {"choices": [], **usage(2, 4)},
        "[DONE]",
    )
    assert [chunk.tokens for chunk in answer.chunks] == [1, 2, 1]
    assert (answer.ids, answer.prompt_ids) == ([7, 8, 9, 7], [1, 2])
    assert (answer.prompt_tokens, answer.usage_tokens, answer.cached_tokens) == (2, 4, 0)
    assert (answer.finish, answer.ended, answer.has_ids) == (LENGTH, True, True)
    assert [chunk.flags for chunk in answer.chunks] == [0, COALESCED, COALESCED]
    assert answer.fault(4) is None
    assert answer.fault(5) == "answered 4 of 5 tokens (finish reason length)"
    assert answer.fault(5, of_any_length=True) is None


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


def test_a_chat_with_only_a_role_is_no_token() -> None:
    ended = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
    role = chat(role="assistant", content="")
    answer = read(
        role, chat(content=" t5"), chat(reasoning_content="b"), ended, {"choices": [], **usage(4, 2)}, "[DONE]"
    )
    assert [(chunk.tokens, chunk.at_ns) for chunk in answer.chunks] == [(1, 0), (1, 0)]
    assert (answer.ids, answer.output_tokens, answer.usage_tokens, answer.finish) == ([], 2, 2, LENGTH)
    assert {chunk.flags & ASSUMED for chunk in answer.chunks} == {ASSUMED}
    counted = read(role | usage(4, 1), chat(role="assistant", content="a") | usage(4, 2), ended | usage(4, 3))
    assert [chunk.tokens for chunk in counted.chunks] == [2, 1], "a count with the role waits for the first text"


def test_text_is_counted_by_usage_by_words_or_by_chunks() -> None:
    grown = read(choice(text="a") | usage(1, 2), choice(text="") | usage(1, 3), choice(text="b") | usage(1, 3))
    assert [(chunk.tokens, chunk.flags & BY_USAGE) for chunk in grown.chunks] == [(2, BY_USAGE), (1, BY_USAGE)]
    words = read(choice(text="t5 t17"), choice(text=" t3"))
    assert (words.ids, [chunk.tokens for chunk in words.chunks]) == ([5, 17, 3], [2, 1])
    prose = read(choice(text="Once"), choice(text=" upon a"), {"choices": [], **usage(1, 4)}, "[DONE]")
    assert [chunk.tokens for chunk in prose.chunks] == [1, 3]
    assert all(chunk.flags & ASSUMED for chunk in prose.chunks)
    assert prose.fault(4) is None
    unknown = read(choice(text="Once"), choice(text=" more", finish_reason="length"))
    assert (unknown.counted, unknown.fault(9)) == (False, None)
    assert read(choice(text="Once", finish_reason="stop")).fault(9) == "answered 1 of 9 tokens (finish reason stop)"


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
    ("text", "sentence"),
    [
        ('{"token_ids": -1}', "event 1 of the stream cannot be read: Expected `int` >= 0"),
        ('{"token_ids": 1e99}', "event 1 of the stream cannot be read: "),
        ('{"token_ids": 99999999999}', "event 1 of the stream cannot be read: "),
        ('{"token_ids": ' + "[" * 100_000, "event 1 of the stream cannot be read: "),
        ("NaN", "event 1 of the stream cannot be read: "),
        ("\ufffe\ud83d", "event 1 of the stream cannot be read: "),
    ],
)
def test_what_cannot_be_read_is_said(text: str, sentence: str) -> None:
    fault = read_answer_stream(received(f"data: {text}\n\n".encode("utf-8", "surrogatepass"))).fault(4)
    assert fault is not None
    assert fault.startswith(sentence)
    assert len(fault) < 200


def test_half_an_event_at_the_end() -> None:
    whole = events(choice(token_ids=[1]), choice(token_ids=[2], finish_reason="length"))
    for cut in range(len(whole)):
        answer = read_answer_stream(received(whole[:cut]))
        assert answer.output_tokens <= 2
        assert (answer.fault(2) is None) == (cut >= len(whole) - 2), "the empty line alone may be missing"
    assert read_answer_stream(received(whole[:-9])).fault(2) == "the stream ended inside an event after 1 of 2 tokens"
    assert read_answer_stream(received(b"")).fault(2) == "the stream ended without a finish reason after 0 of 2 tokens"
    after_done = events(choice(token_ids=[1]), "[DONE]") + b"data: {"
    assert read_answer_stream(received(after_done)).fault(1) is None


def test_other_words_for_the_end() -> None:
    assert read(choice(token_ids=[1], finish_reason="abort")).finish == OTHER
    assert read(choice(token_ids=[1], finish_reason="eos_token")).finish == STOP
    long = read(choice(token_ids=[1], finish_reason="x" * 500)).fault(2)
    assert long is not None
    assert len(long) < 100
