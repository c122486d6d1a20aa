"""Which recorded requests a block sends, and when: a pure function of the folder, the workload and a seed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from loadgen.base.documents import DocumentError, decode_json
from loadgen.base.quantities import join
from loadgen.experiment.prompts import MOST_ID, PromptShape
from loadgen.experiment.schedule import Offsets
from loadgen.records.imported import read_traffic
from loadgen.records.targets import ROUTES, TOKEN_TRANSPORTS, Kind, TokenTransport, Transport, is_token_transport
from loadgen.records.tokens import MOST_TOKENS
from loadgen.records.traffic import MOST_CONTENT_BYTES, STRETCH_S, RecordedRequest, RecordedTraffic, TrafficError, plain

INFER = re.compile(r"/v2/models/[^/]+(?:/versions/[^/]+)?/infer$")
_PROMPTS = re.compile(r"/(completions|chat/completions|generate|generate_stream)$")
MODEL_INFER = "/inference.GRPCInferenceService/ModelInfer"
MOST_BYTES = 2**30
"""Most bytes of the contents of one replay, which every process of the load generator holds."""
_MOST_TRACE_TOKENS = 2**24
"""Most tokens of all prompts of a replayed trace together, which are encoded before it."""
_WRONG = {"http": range(400, 500), "grpc": (3, 5, 7, 12, 16)}
"""The statuses of requests that were wrong themselves, such as INVALID_ARGUMENT of gRPC. They are not replayed. Those
that a server failed to answer are: they were a part of its load."""
_TRIES = 1000
_COUNTED = re.compile(rb'"completion_tokens"\s*:\s*([0-9]{1,7})')
_READ = re.compile(rb'"prompt_tokens"\s*:\s*([0-9]{1,7})')
_CHARACTERS_PER_TOKEN = 4
"""About, of English text: where nobody has counted the tokens of a prompt."""


class Replay(msgspec.Struct, frozen=True):
    """Blocks of this many seconds of the traffic in a folder, over one transport, `speed` times as fast. Of a trace of
    lengths all blocks are the first seconds, and `loadgen.client.recorded` makes prompts for it."""

    folder: str
    transport: Transport
    """Of recorded prompts the protocol of a language model."""
    seconds: float
    speed: float = 1.0

    @property
    def source(self) -> tuple[str, str]:
        """What decides its requests, whichever of them a block sends, and when."""
        return self.folder, self.transport

    @property
    def is_trace(self) -> bool:
        """Whether its prompts have lengths and no contents. Raises `TrafficError`."""
        return _traffic(self.folder).is_trace

    @property
    def _part_s(self) -> float | None:
        """The part of a trace that is replayed, in seconds of the trace; None: windows of everything."""
        return self.seconds * self.speed if self.is_trace else None

    def requests(self) -> tuple[RecordedRequest, ...]:
        """The requests of the folder that can be replayed. Raises `TrafficError`."""
        return _replayable(self.folder, self.transport, self._part_s)

    def content(self, request: RecordedRequest) -> bytes:
        """The body of one of them. Raises `TrafficError`."""
        return _traffic(self.folder).content(request) or b""

    def answer(self, request: RecordedRequest) -> bytes | None:
        """The recorded answer to one of them, if it is kept and no error. Raises `TrafficError`."""
        return _traffic(self.folder).answer(request) if has_answer(request) else None

    def shape(self, request: RecordedRequest) -> PromptShape:
        """The lengths of a recorded prompt, and of its answer. Raises `TrafficError`."""
        return _prompt(self.folder, request).shape

    def shapes(self) -> list[PromptShape]:
        """Those of all prompts; none of tensors. Raises `TrafficError`."""
        return [self.shape(request) for request in self.requests()] if is_token_transport(self.transport) else []

    def longest(self) -> PromptShape:
        """The lengths of the request with the most tokens, prompt and answer together. Raises `TrafficError`."""
        return max(self.shapes(), key=lambda shape: shape.prompt_tokens + shape.output_tokens)

    def prompt(self, request: RecordedRequest) -> tuple[dict[str, Any], list[int]]:
        """The fields of a recorded request for an answer, and the ids of its prompt, if it has them. Raises
        `TrafficError`."""
        prompt = _prompt(self.folder, request)
        return prompt.fields, prompt.ids

    def rate_per_s(self) -> float:
        """Mean rate of the replay."""
        requests = self.requests()
        return self.speed * (len(requests) - 1) / ((requests[-1].at_ns - requests[0].at_ns) / 1e9)

    def left_out_seconds(self) -> float:
        """How much of the recording was left out."""
        return float(STRETCH_S * len(_traffic(self.folder).recording.left_out))

    def window(self, seed: int) -> tuple[int, Offsets]:
        """The first request of a block, and when each of its requests is due. The window is random, among those without
        a gap in the recording. Raises `TrafficError` if every window has one."""
        at_ns, missing = _times_ns(self.folder, self.transport, self._part_s)
        span_ns = min(int(self.seconds * self.speed * 1e9), int(at_ns[-1] - at_ns[0]))
        random = np.random.default_rng(seed)
        for _ in range(_TRIES):
            start_ns = random.integers(at_ns[0], at_ns[-1] - span_ns, endpoint=True)
            first, end = np.searchsorted(at_ns, [start_ns, start_ns + span_ns + 1])
            stretches = range(
                int(start_ns // (STRETCH_S * 10**9)), int((start_ns + span_ns) // (STRETCH_S * 10**9)) + 1
            )
            if end - first >= 2 and missing.isdisjoint(stretches):
                offsets = (at_ns[first:end] - at_ns[first]) / self.speed
                return int(first), np.asarray(np.round(offsets), dtype=np.int64)
        raise TrafficError(
            f"{self.folder}: no window of {self.seconds * self.speed:g} s without a gap has two requests; lower "
            "--open-seconds or --speed"
        )

    def of_every_shape(self, each: int) -> dict[str, list[int]]:
        """The numbers of `each` requests of every shape with different contents, by the shape in words; those with a
        recorded answer first."""
        found: dict[str, dict[str, int]] = {}
        requests = self.requests()
        for number in sorted(range(len(requests)), key=lambda number: not has_answer(requests[number])):
            request = requests[number]
            of_shape = found.setdefault(request.shape, {})
            if len(of_shape) < each and request.content is not None:
                of_shape.setdefault(request.content, number)
        return {shape: list(numbers.values()) for shape, numbers in found.items()}


class _Prompt(msgspec.Struct, frozen=True):
    """What a recorded request to a language model asks for."""

    transport: TokenTransport | None
    """None: any, of a trace."""
    fields: dict[str, Any]
    ids: list[int]
    """Of its prompt, if it was sent as ids."""
    shape: PromptShape


@lru_cache(maxsize=4)
def _prompts_read(folder: str) -> dict[tuple[str | None, str | None, str], _Prompt]:  # noqa: ARG001 (one for each)
    return {}


def _prompt(folder: str, request: RecordedRequest) -> _Prompt:
    read, key = _prompts_read(folder), (request.content, request.answer, request.route)
    if key not in read:
        read[key] = _read_prompt(folder, request)
    return read[key]


def _read_prompt(folder: str, request: RecordedRequest) -> _Prompt:
    traffic = _traffic(folder)
    at = f"{folder}: the prompt after {request.at_ns / 1e9:.3f} s"
    content = traffic.content(request)
    if content is None:
        raise TrafficError(f"{folder} has no contents; record it again without --no-contents")
    content = plain(content, request.headers.get("content-encoding"))
    try:
        fields: dict[str, Any] = decode_json(content, dict[str, Any], most_bytes=MOST_CONTENT_BYTES)
    except DocumentError as exc:
        raise TrafficError(f"{at} cannot be read: {exc}") from exc
    if traffic.is_trace:
        return _Prompt(None, fields, [], PromptShape(fields["input_length"], fields["output_length"]))
    prompt = fields.get("input_ids", fields.get("prompt", fields.get("text_input", fields.get("messages"))))
    ids = prompt if isinstance(prompt, list) and all(type(each) is int for each in prompt) else []
    transport: TokenTransport = "completions" if ids else "text"
    if "messages" in fields:
        transport = "chat"
    elif not request.route.endswith("completions"):
        transport = "generate_stream"
    answer = traffic.answer(request) if request.succeeded else None
    answer = plain(answer or b"", request.answer_headers.get("content-encoding"))
    counted = _answered_tokens(answer)
    output = counted or fields.get("max_tokens") or fields.get("max_completion_tokens")
    if not isinstance(output, int) or not 0 < output <= MOST_TOKENS:
        raise TrafficError(f"{at} has no max_tokens and no recorded answer; record it again with --answers")
    if not prompt or len(ids) > MOST_TOKENS or any(not 0 <= each <= MOST_ID for each in ids):
        raise TrafficError(f"{at} has no prompt that can be replayed")
    read = _READ.findall(answer)
    length = len(ids) or int(read[-1] if read else 0) or len(content) // _CHARACTERS_PER_TOKEN
    return _Prompt(transport, fields, ids, PromptShape(min(max(length, 1), MOST_TOKENS), output))


def _answered_tokens(answer: bytes) -> int:
    """The tokens of a recorded answer, by the server's count, else by its ids, else one for each event of a stream; 0
    if nothing says it."""
    if counts := _COUNTED.findall(answer):
        return int(counts[-1])
    return sum(_tokens_of(line[5:]) for line in answer.splitlines() if line.startswith(b"data:"))


def _tokens_of(event: bytes) -> int:
    try:
        document = decode_json(event, Any, most_bytes=MOST_CONTENT_BYTES)
    except DocumentError:  # [DONE]
        return 0
    choices = document.get("choices") if isinstance(document, dict) else None
    part = choices[0] if isinstance(choices, list) and choices else document
    ids = part.get("token_ids") if isinstance(part, dict) else None
    return len(ids) if isinstance(ids, list) else 1


def recorded_protocol(folder: str) -> TokenTransport | None:
    """The protocol of most prompts in a folder; None: any, of a trace. Raises `TrafficError`."""
    counts = Counter(_prompt(folder, request).transport for request in _prompts(folder))
    if not counts:
        raise TrafficError(
            f"{folder} has no prompts of language models and has {_held(folder)}; choose another --model"
        )
    return None if None in counts else max(TOKEN_TRANSPORTS, key=lambda transport: counts[transport])


def _prompts(folder: str) -> Iterator[RecordedRequest]:
    for request in _traffic(folder).requests:
        if request.transport == "http" and request.status not in _WRONG["http"] and _PROMPTS.search(request.route):
            yield request


def _wanted(folder: str, transport: Transport) -> Iterator[RecordedRequest]:
    """The requests over a transport, but for those that were wrong themselves."""
    if is_token_transport(transport):
        over = None, transport
        yield from (request for request in _prompts(folder) if _prompt(folder, request).transport in over)
        return
    for request in _traffic(folder).requests:
        inference = INFER.search(request.route) if transport == "http" else request.route == MODEL_INFER
        if inference and request.transport == transport and request.status not in _WRONG[request.transport]:
            yield request


def has_answer(request: RecordedRequest) -> bool:
    """Whether its answer is recorded, and no error."""
    return request.succeeded and request.answer is not None


@lru_cache(maxsize=4)
def _traffic(folder: str) -> RecordedTraffic:
    return read_traffic(folder)


@lru_cache(maxsize=4)
def _replayable(folder: str, transport: Transport, part_s: float | None) -> tuple[RecordedRequest, ...]:
    requests = tuple(_wanted(folder, transport))
    if requests and part_s is not None:
        requests = _first_part(folder, requests, part_s)
    if any(request.content is None for request in requests):
        raise TrafficError(f"{folder} has no contents; record it again without --no-contents")
    if len(requests) < 2 or requests[0].at_ns == requests[-1].at_ns:
        what = {Kind.TENSORS: "inferences of tensors", Kind.TOKENS: "prompts"}[ROUTES[transport].kind]
        raise TrafficError(
            f"{folder} has fewer than two {what} over {transport} and has {_held(folder)}; choose another --transport, "
            "or a model that takes them"
        )
    _require_one_model(folder, requests)
    size = sum({request.content: request.content_bytes for request in requests}.values())
    if size > MOST_BYTES:
        raise TrafficError(
            f"{folder} has {size:,} bytes of different contents, more than the limit of {MOST_BYTES:,}; replay a part "
            "of it, made with abserve.load_traffic(…).save(…), or record with --max-bytes"
        )
    return requests


def _first_part(folder: str, requests: Sequence[RecordedRequest], part_s: float) -> tuple[RecordedRequest, ...]:
    """The first seconds of a trace. Raises `TrafficError`."""
    until_ns = requests[0].at_ns + part_s * 1e9
    part = tuple(request for request in requests if request.at_ns < until_ns)
    if len(part) < 2:
        raise TrafficError(f"{folder} has fewer than two requests in its first {part_s:g} s")
    if (tokens := sum(_prompt(folder, request).shape.prompt_tokens for request in part)) > _MOST_TRACE_TOKENS:
        raise TrafficError(
            f"the first {part_s:g} s of the trace {folder} have {tokens:,} prompt tokens, more than the limit of "
            f"{_MOST_TRACE_TOKENS:,}; replay less of it"
        )
    if part[0].at_ns == part[-1].at_ns:
        raise TrafficError(f"all requests of the trace {folder} have one timestamp; give them times in ms")
    return part


def _held(folder: str) -> str:
    """What the requests of a folder are, in words."""
    kinds = Counter(
        f"inferences over {each.transport}" if each.tensors or each.transport == "grpc" else "prompts"
        for each in _traffic(folder).requests
    )
    return join([f"{count:,} {kind}" for kind, count in sorted(kinds.items())]) or "nothing else"


def _require_one_model(folder: str, requests: Sequence[RecordedRequest]) -> None:
    models = sorted({request.model or "" for request in requests})
    if len(models) > 1:
        raise TrafficError(
            f"{folder} has requests to {len(models)} models ({', '.join(models[:5])}); save those to one of them with "
            "abserve.load_traffic(…).save(…)"
        )


@lru_cache(maxsize=4)
def _times_ns(folder: str, transport: Transport, part_s: float | None) -> tuple[Offsets, frozenset[int]]:
    """The arrivals, and the stretches that the recording left out."""
    at_ns = np.array([request.at_ns for request in _replayable(folder, transport, part_s)], dtype=np.int64)
    return at_ns, frozenset(_traffic(folder).recording.left_out)
