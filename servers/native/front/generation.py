"""Language models: the served model of a front end, the link to its engine, and the requests that it answers over HTTP.

A request is checked here, passed to the engine, and answered from the messages of its steps: for each token of a
streamed answer one event, written to the connection in the callback that has received the message.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Protocol

from servers.engines.interface import EngineDescription
from servers.language.engine import GENERATE_INPUTS, GENERATE_OUTPUTS
from servers.native.front.engine_link import ENGINE_ENDED, EngineSocket
from servers.native.front.inference import ModelService
from servers.native.front.token_requests import TokenRequest
from servers.native.shared.errors import INTERNAL_ERROR, FailureLog
from servers.native.shared.interface import ApplyStatus, FrontEndOpened, ModelStatus
from servers.native.shared.ipc import (
    Cancel,
    Control,
    Done,
    Generate,
    Generated,
    Message,
    UnusableMessage,
    error_of,
    failed,
)
from servers.native.shared.settings import NativeSettings
from servers.native.shared.statistics import Statistics
from servers.protocol.errors import ContractError, InternalError, TooLargeError, UnavailableError
from servers.protocol.records import ModelSignature

log = FailureLog("abserve.front")

BODY_BYTES = 64 * 1024
BODY_BYTES_PER_TOKEN = 24
"""A longer body cannot be a prompt that the model takes: an id has at most ten digits, and some blanks around it."""
NUMBERS_PER_FRONT_END = 2**40
"""Requests are numbered over all front ends: each has so many numbers of its own."""


class AnswerSink(Protocol):
    """What takes the tokens of one answer; belongs to the event loop."""

    def tokens(self, tokens: Sequence[int]) -> None:
        """Some more of them."""

    def finished(self, tokens: Sequence[int], finish: str) -> None:
        """The last ones."""

    def failed(self, error: ContractError) -> None:
        """There will be no more."""


class GenerationLink(EngineSocket):
    """The socket to the engine's process, or to its thread."""

    def __init__(self, number: int, apply: Callable[[ModelStatus], None], on_end: Callable[[], None]) -> None:
        """`number` is the front end's; `apply` learns the engine's state, `on_end` is called once it has ended."""
        super().__init__(on_end, number * NUMBERS_PER_FRONT_END)
        self._apply = apply
        self._sinks: dict[int, AnswerSink] = {}

    async def open(self, connected: socket.socket) -> None:
        """Begin to use a connected socket."""
        await asyncio.get_running_loop().create_connection(lambda: self, sock=connected)

    def opened(self) -> None:
        """Tell the engine that clients are answered now."""
        self._send(Control(next(self._numbers), FrontEndOpened()))

    def submit(self, sink: AnswerSink, request: TokenRequest, received_ns: int, client: str = "") -> int:
        """Queue a checked request; returns its number. `client` is its address where its requests are limited, else
        empty. Raises `UnavailableError`."""
        if self._ended:
            raise UnavailableError(ENGINE_ENDED)
        number = next(self._numbers)
        self._sinks[number] = sink
        self._send(Generate(number, request.prompt, request.max_tokens, request.ignore_eos, received_ns, client))
        return number

    def cancel(self, number: int) -> None:
        """The engine forgets a request before its next step; the sink hears nothing more."""
        if self._sinks.pop(number, None) is not None:
            self._send(Cancel(number))

    # EngineSocket

    def _take(self, message: Message) -> None:
        if isinstance(message, Generated):
            self._pass_on(message)
        elif isinstance(message, Control) and isinstance(message.operation, ApplyStatus):
            self._apply(message.operation.models[0])
            self._send(Done([message.number]))

    def _pass_on(self, message: Generated) -> None:
        sinks = self._sinks
        single = zip(message.numbers, zip(message.tokens), strict=True)
        for number, tokens in chain(single, message.several):
            if (sink := sinks.get(number)) is not None:  # else it has been cancelled
                try:
                    sink.tokens(tokens)
                except Exception:
                    log.exception("an answer could not be sent")
                    self._lose(number)
        for done in message.finished:
            if (sink := sinks.pop(done.number, None)) is None:
                continue
            try:
                if done.failure is None:
                    sink.finished(done.tokens, done.finish)
                else:
                    sink.failed(error_of(done.failure))
            except Exception:
                log.exception("an answer could not be sent")
                self._tell(sink, InternalError(INTERNAL_ERROR))

    def _fail(self, message: UnusableMessage, *, sent: bool) -> None:
        if message.kind in (Generate, Generated):
            for number in message.numbers:
                self._lose(number)
        for reply in () if sent else failed(message):
            self._send(reply)

    def _lose(self, number: int) -> None:
        """An answer without some of its tokens is wrong, so it fails; it must not stop the others."""
        if (sink := self._sinks.get(number)) is not None:
            self.cancel(number)
            self._tell(sink, InternalError(INTERNAL_ERROR))

    def _lose_all(self) -> None:
        sinks, self._sinks = self._sinks, {}
        for sink in sinks.values():
            self._tell(sink, InternalError(ENGINE_ENDED))

    def _tell(self, sink: AnswerSink, error: ContractError) -> None:
        try:
            sink.failed(error)
        except Exception:
            log.exception("the end of an answer could not be sent")


class GenerationService(ModelService):
    """One language model, whose engine is at the other end of `link`."""

    generates = True

    def __init__(
        self, name: str, label: str, settings: NativeSettings, statistics: Statistics, link_number: int
    ) -> None:
        signature = ModelSignature(name, "1", GENERATE_INPUTS, GENERATE_OUTPUTS, max_batch_size=0)
        super().__init__(signature, settings, statistics)
        self.label = label
        self.vocabulary = 0
        self.max_length = 0
        """Both as the engine says once it is loaded."""
        self.link = GenerationLink(link_number, self._apply, self.fail)

    def submit(
        self, sink: AnswerSink, request: TokenRequest, received_ns: int, transport: asyncio.BaseTransport
    ) -> int:
        """See `GenerationLink.submit`; `transport` is the client's."""
        peer = transport.get_extra_info("peername") if self.settings.max_client_requests else None
        client = str(peer[0]) if isinstance(peer, tuple) and peer else ""
        return self.link.submit(sink, request, received_ns, client)

    @property
    def largest_body_bytes(self) -> int:
        """A body with more bytes holds more than a prompt."""
        return min(self.settings.max_body_bytes, BODY_BYTES + BODY_BYTES_PER_TOKEN * self.max_length)

    def parameters(self, description: EngineDescription) -> dict[str, str]:
        details = {name: value for name, value in description.details.items() if not isinstance(value, dict)}
        own = {"spinning": description.spinning, "model": self.label, "fronts": self.settings.fronts}
        return {name: text for name, value in (details | own).items() if (text := _as_text(value))}

    def batching(self) -> dict[str, object]:
        return {"model_transaction_policy": {"decoupled": True}}

    def _apply(self, status: ModelStatus) -> None:
        if status.description is not None:
            details = status.description.details
            self.vocabulary, self.max_length = int(str(details["vocabulary"])), int(str(details["max_length"]))
        self.set_status(status)


def _as_text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ",".join(map(str, value))
    return "" if value is None else str(value)


def too_large(size: int, largest: int) -> TooLargeError:
    """The refusal of a body, or of a message, that holds more than a prompt."""
    return TooLargeError(f"the body has {size} bytes; a prompt that the model takes has at most {largest}")
