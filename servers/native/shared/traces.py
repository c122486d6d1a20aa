"""Spans of requests and of their batches, by OpenTelemetry's SDK and OTLP.

A front end has the span of a request and that of its answer. The engine's side has queue, execution and the batch,
which links to its traced requests, as their executions link to it. A request is traced if its `traceparent` says so or,
without one, as one of a share. Without `--traces` no other package is imported.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import SpanContext

    from servers.native.shared.interface import QueuedRequest
    from servers.native.shared.settings import NativeSettings
    from servers.protocol.records import ModelSignature

TRACE_HEADERS = (b"traceparent", b"tracestate")
"""What a client sends of its trace, over HTTP and as metadata of gRPC."""
SEND_EVERY_MS = 1000
TRACE_ID_BYTES = 16


def tracer_of(settings: NativeSettings) -> Tracer | None:
    """The one of this process; None without `--traces`."""
    return _tracer_to(settings.traces, settings.trace_share) if settings.traces else None


@cache
def _tracer_to(url: str, share: float) -> Tracer:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    exporter = OTLPSpanExporter(endpoint=url)
    return Tracer(BatchSpanProcessor(exporter, schedule_delay_millis=SEND_EVERY_MS), share)


def flush_traces(settings: NativeSettings, seconds: float = 2.0) -> None:
    """Send what this process has not sent yet, at its end."""
    if (tracer := tracer_of(settings)) is not None:
        tracer.processor.force_flush(round(1000 * seconds))


class Tracer:
    """Makes the spans of one process; any thread.

    A span is made once it has ended, as all about it is known then: one that the SDK begins and ends takes several
    times as long.
    """

    def __init__(self, processor: SpanProcessor, share: float) -> None:
        """`share` of the requests without a `traceparent` are traced."""
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self.processor = processor
        self._share = share
        self._api = trace
        self._sampled = trace.TraceFlags(trace.TraceFlags.SAMPLED)
        self._numbers = RandomIdGenerator()
        self._resource = Resource.create({"service.name": "abserve"})
        self._propagator = TraceContextTextMapPropagator()
        self._span = partial(ReadableSpan, instrumentation_scope=InstrumentationScope("abserve.native"))
        self._epoch_ns = time.time_ns() - time.perf_counter_ns()

    def begin(self, signature: ModelSignature, start_ns: int, headers: Mapping[str, str] | None) -> RequestTrace | None:
        """The trace of a request that came at `start_ns`, if its `headers` say so or it is one of the share."""
        parent: SpanContext | None = None
        if headers:
            context = self._propagator.extract(headers)
            caller = self._api.get_current_span(context).get_span_context()
            parent = caller if caller.is_valid else None
        if not (random.random() < self._share if parent is None else parent.trace_flags.sampled):
            return None
        attributes = {"abserve.model": signature.name, "abserve.model_version": signature.version}
        return RequestTrace(self, self._context(parent), parent, start_ns, attributes)

    def executed(
        self, requests: Sequence[QueuedRequest], rows: int, formed_ns: int, started_ns: int, finished_ns: int
    ) -> None:
        """A batch of these requests was executed."""
        contexts = [(request, self._received(request.trace)) for request in requests if request.trace is not None]
        if not contexts:
            return
        attributes = {"abserve.batch.requests": sum(request.count for request in requests), "abserve.batch.rows": rows}
        batch = self._context(None)
        links = [self._api.Link(context) for _, context in contexts]
        self.add("batch", batch, None, formed_ns, finished_ns, attributes=attributes, links=links)
        for request, context in contexts:
            self.add("queue", self._context(context), context, request.enqueued_ns, formed_ns)
            link, execution = [self._api.Link(batch)], self._context(context)
            self.add("execution", execution, context, started_ns, finished_ns, attributes=attributes, links=link)

    def add(
        self, name: str, context: SpanContext, parent: SpanContext | None, start_ns: int, end_ns: int, **more: Any
    ) -> None:
        """A span that has ended."""
        span = self._span(
            name,
            context,
            parent,
            self._resource,
            start_time=self._epoch_ns + start_ns,
            end_time=self._epoch_ns + end_ns,
            **more,
        )
        self.processor.on_end(span)

    def of_request(
        self, request: RequestTrace, attributes: Mapping[str, Any], failure: str | None, encode_ns: int
    ) -> None:
        """The spans of a request that is over, now."""
        now_ns = time.perf_counter_ns()
        more: dict[str, Any] = {"kind": self._api.SpanKind.SERVER, "attributes": {**request.attributes, **attributes}}
        if failure is not None:
            more["status"] = self._api.Status(self._api.StatusCode.ERROR, failure)
        else:
            began_ns = request.answer_ns or now_ns - encode_ns
            self.add("answer", self._context(request.span), request.span, began_ns, now_ns)
        self.add("infer", request.span, request.parent, request.start_ns, now_ns, **more)

    def _context(self, parent: SpanContext | None) -> SpanContext:
        """The numbers of a new span."""
        trace_id = self._numbers.generate_trace_id() if parent is None else parent.trace_id
        state = None if parent is None else parent.trace_state
        number = self._numbers.generate_span_id()
        return self._api.SpanContext(trace_id, number, is_remote=False, trace_flags=self._sampled, trace_state=state)

    def _received(self, trace: bytes) -> SpanContext:
        """The span of a request, from a front end."""
        numbers = [int.from_bytes(part) for part in (trace[:TRACE_ID_BYTES], trace[TRACE_ID_BYTES:])]
        return self._api.SpanContext(*numbers, is_remote=True, trace_flags=self._sampled)


@dataclass(slots=True)
class RequestTrace:
    """The trace of one request, until it is over."""

    tracer: Tracer
    span: SpanContext
    parent: SpanContext | None
    start_ns: int
    attributes: dict[str, Any]
    answer_ns: int = 0
    """When its first token was there; 0 for one without tokens."""

    @property
    def context(self) -> bytes:
        """The numbers of the trace and of the span, for the engine's side."""
        return b"".join([self.span.trace_id.to_bytes(TRACE_ID_BYTES), self.span.span_id.to_bytes(8)])

    def first_token(self) -> None:
        """The first token is there, now."""
        self.answer_ns = time.perf_counter_ns()

    def answered(self, receive_ns: int, decode_ns: int, encode_ns: int) -> None:
        """The request is answered, now."""
        stages = {"abserve.receive_us": receive_ns // 1000, "abserve.decode_us": decode_ns // 1000}
        self.tracer.of_request(self, stages, None, encode_ns)

    def failed(self, reason: str) -> None:
        """The request is refused or has failed, now."""
        self.tracer.of_request(self, {}, reason, 0)


def trace_headers(headers: Sequence[tuple[bytes, bytes]]) -> dict[str, str] | None:
    """The headers of a client's trace; None without any."""
    return {name.decode(): value.decode("latin-1") for name, value in headers if name in TRACE_HEADERS} or None
