"""The requests of one block to a language model: answers are kept as they came, and taken apart after the window.

While the load runs an answer costs a copy of its bytes and of the times of its reads. What it says, whether it is good
and what is stored of it follows in `finish`. If a block's answers need more than `_MOST_HELD_BYTES` of memory, further
ones are taken apart as they end.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter_ns, sleep
from typing import Any, NamedTuple

import numpy as np

from loadgen.base.documents import one_line
from loadgen.client.connection import ClientConnection, Exchange, failure_message
from loadgen.client.event_stream import ReceivedStream, StreamConnection, StreamExchange
from loadgen.client.generation import PreparedPrompts, StreamedAnswer, in_form_of, prompt_request, read_answer_stream
from loadgen.client.inputs import Array
from loadgen.client.outputs import AnswerError
from loadgen.client.traffic import GOOD, SentRequest, Traffic
from loadgen.client.transports import InferenceTarget
from loadgen.experiment.prompts import SETTLING, PromptPlan
from loadgen.records.samples import Samples, SampleWriter, error_index
from loadgen.records.targets import ROUTES, is_token_transport
from loadgen.records.tokens import ANSWER_DTYPE, CUT, ECHO, ECHO_DIFFERS, EVENT_DTYPE, IDS, TokenRows, store_tokens

_MOST_HELD_BYTES = 2**29
_PAUSE_NS = 50_000_000
"""How often `finish` lets other greenlets run, such as the one that says that this process is alive."""
_NOTHING = ReceivedStream(b"", array("q"), array("q"))
_ERROR_BYTES = 4096
"""How many of an answer's last bytes are searched for an error event while the load runs."""


class _HeldAnswer(NamedTuple):
    sent: SentRequest
    intended_ns: int
    send_ns: int
    end_ns: int
    request_bytes: int
    response_bytes: int
    status: int
    failure: str | None
    stream: ReceivedStream


class TokenTraffic(Traffic):
    """See `Traffic`; `samples` is where the chunks and the answers are stored, beside the sample file. Without it, in a
    warm-up, answers of other lengths than asked are good: a run that measures them is invalid, and says why."""

    def __init__(
        self, target: InferenceTarget, prompts: PreparedPrompts, writer: SampleWriter, samples: Path | None,
        **shared: Any,
    ) -> None:  # fmt: skip
        super().__init__(target, prompts, 1, writer, **shared)
        self._prompts = prompts
        self._reads_text = ROUTES[target.transport].is_text
        """Whether the server makes ids of its own from the prompt."""
        self._samples = samples
        self._held: list[_HeldAnswer] = []
        self._held_bytes = 0
        self._events: list[tuple[int, int, int, int]] = []
        self._rows: list[Samples] = []

    def settling_fault(self, connection: ClientConnection, exchange: Exchange) -> str | None:
        failure = None if exchange.good else failure_message(exchange)
        answer = _read(_received(connection, exchange), SETTLING.output_tokens)
        return answer.fault(SETTLING.output_tokens, failure, of_any_length=True)

    def _take(self, connection: ClientConnection, exchange: Exchange, sent: SentRequest) -> str | None:
        """Hold the answer. What is returned is a first judgement, for the rule that ends the block."""
        fault = self._fault(exchange)
        stream = _received(connection, exchange)
        intended_ns = exchange.send_ns if sent.intended_ns is None else sent.intended_ns
        held = _HeldAnswer(
            sent, intended_ns, exchange.send_ns, exchange.end_ns, exchange.request_bytes, exchange.response_bytes,
            exchange.status, fault, stream,
        )  # fmt: skip
        self.last_end_ns = exchange.end_ns
        if self._held_bytes < _MOST_HELD_BYTES:
            self._held_bytes += len(stream.raw) + 16 * len(stream.ends)
            self._held.append(held)
        else:
            self._judge(held)
        if fault is None and (b'data: {"error"' in stream.raw[-_ERROR_BYTES:] or not stream.raw):
            fault = "error event"
        return fault

    def finish(self) -> None:
        """Take all held answers apart, and store them."""
        paused_ns = perf_counter_ns()
        for held in self._held:
            self._judge(held)
            if perf_counter_ns() - paused_ns > _PAUSE_NS:
                sleep(0.0001)
                paused_ns = perf_counter_ns()
        self._held = []
        if self._samples is not None:
            events = np.array(self._events, dtype=EVENT_DTYPE)
            store_tokens(self._samples, TokenRows(events, np.array(self._rows, dtype=ANSWER_DTYPE)))

    def _judge(self, held: _HeldAnswer) -> None:
        sent, asked = held.sent, self._prompts.shapes[held.sent.body].output_tokens
        answer = _read(held.stream, asked)
        try:
            fault = answer.fault(asked, held.failure, of_any_length=self._samples is None)
            row = self._row(answer, sent)
        except Exception as exc:  # noqa: BLE001 (as in `_read`)
            answer = _unreadable(exc)
            fault, row = answer.error, self._row(answer, sent)
        if fault is None and not sent.measured:
            self.unmeasured += 1
            self.unmeasured_ns += held.end_ns - held.send_ns
            self.unmeasured_tokens += answer.output_tokens
            return
        first_ns = answer.chunks[0].at_ns if answer.chunks else 0
        end_ns = answer.chunks[-1].at_ns if answer.chunks and fault is None else held.end_ns
        sample = self.writer.count
        self.writer.add(
            held.intended_ns, held.send_ns, first_ns, end_ns, held.request_bytes, held.response_bytes,
            1, sent.user, sent.body, held.status, GOOD if fault is None else error_index(self.error_messages, fault),
        )  # fmt: skip
        self.errors += fault is not None
        if self._samples is not None:
            self._events += [(sample, *chunk) for chunk in answer.chunks]
            self._rows.append(row)
        if sent.slot is None or fault is not None or not answer.has_ids:
            return
        if not self._reads_text or self._echoes_prompt(answer, sent):
            kept = partial(self._kept, sent, answer.ids)
            self.answers.keep(sent.slot, sent, kept)

    def _echoes_prompt(self, answer: StreamedAnswer, sent: SentRequest) -> bool:
        """Whether the server has sent back the ids that the prompt was made from."""
        return bool(answer.prompt_ids == self._prompts.prompt(sent.body, sent.first).tolist())

    def _kept(self, sent: SentRequest, ids: Sequence[int]) -> Mapping[str, Array]:
        prompt = self._prompts.prompt(sent.body, sent.first)[np.newaxis]
        return {"prompt": prompt, "tokens": np.array([ids], dtype=np.int32)}

    def _row(self, answer: StreamedAnswer, sent: SentRequest) -> Samples:
        """The answer's row of `ANSWER_DTYPE`."""
        shape = self._prompts.shapes[sent.body]
        flags = IDS if answer.has_ids else 0
        if answer.prompt_ids is not None:
            same = self._echoes_prompt(answer, sent)
            if same or not self._reads_text:
                flags |= ECHO if same else ECHO | ECHO_DIFFERS
        if answer.torn or not (answer.ended or answer.output_tokens == shape.output_tokens):
            flags |= CUT
        prompt_tokens = answer.prompt_tokens
        if prompt_tokens < 0 and answer.prompt_ids is not None:
            prompt_tokens = len(answer.prompt_ids)
        distinct = len(set(answer.ids)) if answer.has_ids else -1
        return np.array((
            shape.output_tokens, shape.prompt_tokens, prompt_tokens, answer.output_tokens, answer.usage_tokens,
            answer.cached_tokens, distinct, len(answer.chunks), answer.text_bytes, answer.hidden_tokens, sent.first,
            answer.finish, answer.counted, flags,
        ), dtype=ANSWER_DTYPE)  # fmt: skip


def _read(stream: ReceivedStream, asked: int) -> StreamedAnswer:
    """The answer of a stream, whatever it holds: what cannot be read is the fault of this answer alone."""
    try:
        return read_answer_stream(stream, asked)
    except Exception as exc:  # noqa: BLE001 (an answer must not end the run)
        return _unreadable(exc)


def _unreadable(exc: Exception) -> StreamedAnswer:
    return StreamedAnswer(error=f"the answer cannot be read ({type(exc).__name__}: {one_line(str(exc), 200)})")


def _received(connection: ClientConnection, exchange: Exchange) -> ReceivedStream:
    """What came in answer to this exchange; nothing if the connection was refused."""
    if isinstance(connection, StreamConnection) and isinstance(exchange, StreamExchange):
        return connection.received()
    return _NOTHING


def ask_tokens(
    target: InferenceTarget, plan: PromptPlan, prompt: Sequence[int], max_tokens: int, *, timeout_s: float = 60.0,
    salt: str | None = None, of_any_length: bool = False,
) -> StreamedAnswer:  # fmt: skip
    """Send one prompt on its own connection and wait for the whole answer; not for measurements under load. Raises
    `AnswerError` with a sentence when it is not an answer of `max_tokens`, or `of_any_length`, `ConnectionRefused` and
    `AddressError`."""
    transport = target.transport
    assert is_token_transport(transport)
    plan = in_form_of(transport, plan)
    encoded = plan.encode(np.array(prompt, dtype=np.int32))
    request = prompt_request(transport, target.model, (encoded, b"", b""), max_tokens, salt=salt, body=target.body)
    sendable = target.sendable(request)
    connection = target.connection((sendable,), timeout_s=timeout_s)
    try:
        connection.connect()
        exchange = connection.send(sendable)
        answer = _read(_received(connection, exchange), max_tokens)
        answer.sent_ns = exchange.send_ns
        failure = None if exchange.good else failure_message(exchange)
        fault = answer.fault(max_tokens, failure, of_any_length=of_any_length)
    finally:
        connection.close()
    if fault is not None:
        raise AnswerError(fault, exchange.status)
    return answer
