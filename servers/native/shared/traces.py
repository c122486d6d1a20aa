"""Spans of requests and of their batches, by OpenTelemetry's SDK and OTLP.

A front end has the span of a request and that of its answer. The engine's side has queue, execution and the batch,
which links to its traced requests, as their executions link to it. A request is traced if its `traceparent` says so or,
without one, as one of a share. Without `--traces` no other package is imported.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

    from servers.native.shared.interface import QueuedRequest
    from servers.native.shared.settings import NativeSettings

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
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    # Not at the end of the interpreter: these processes end by os._exit, after `flush_traces`.
    provider = TracerProvider(resource=Resource.create({"service.name": "abserve"}), shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=url)
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=SEND_EVERY_MS))
    return Tracer(provider, share)


def flush_traces(settings: NativeSettings, seconds: float = 2.0) -> None:
    """Send what this process has not sent yet, at its end."""
    if (tracer := tracer_of(settings)) is not None:
        tracer.provider.force_flush(round(1000 * seconds))


class Tracer:
    """Makes the spans of one process; any thread."""

    def __init__(self, provider: TracerProvider, share: float) -> None:
        """`share` of the requests without a `traceparent` are traced."""
        from opentelemetry import trace
        from opentelemetry.context import Context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self.provider = provider
        self._share = share
        self._api = trace
        self._alone = Context()  # without it the thread's own would be the parent
        self._propagator = TraceContextTextMapPropagator()
        self._tracer = provider.get_tracer("abserve.native")
        self._epoch_ns = time.time_ns() - time.perf_counter_ns()

    def begin(self, model: str, version: str, start_ns: int, headers: Mapping[str, str] | None) -> RequestTrace | None:
        """The trace of a request that came at `start_ns` of `perf_counter_ns`; None for one that is not traced."""
        if headers:
            context = self._propagator.extract(headers)
            caller = self._api.get_current_span(context).get_span_context()
            traced = caller.trace_flags.sampled if caller.is_valid else random.random() < self._share
        else:
            context, traced = None, random.random() < self._share
        if not traced:
            return None
        attributes = {"abserve.model": model, "abserve.model_version": version}
        span = self._span("infer", context, start_ns, self._api.SpanKind.SERVER, attributes=attributes)
        return RequestTrace(self, span)

    def executed(
        self, requests: Sequence[QueuedRequest], rows: int, formed_ns: int, started_ns: int, finished_ns: int
    ) -> None:
        """A batch of these requests was executed."""
        contexts = [(request, self._context(request.trace)) for request in requests if request.trace is not None]
        if not contexts:
            return
        spans = [self._api.get_current_span(context).get_span_context() for _, context in contexts]
        attributes = {"abserve.batch.requests": sum(request.count for request in requests), "abserve.batch.rows": rows}
        batch = self._span(
            "batch", None, formed_ns, links=[self._api.Link(span) for span in spans], attributes=attributes
        )
        self._end(batch, finished_ns)
        link = self._api.Link(batch.get_span_context())
        for request, context in contexts:
            self._end(self._span("queue", context, request.enqueued_ns), formed_ns)
            self._end(self._span("execution", context, started_ns, links=[link], attributes=attributes), finished_ns)

    def answered(self, span: Span, receive_ns: int, decode_ns: int, encode_ns: int) -> None:
        """A request is answered, now."""
        now_ns = time.perf_counter_ns()
        self._end(self._span("answer", self._api.set_span_in_context(span), now_ns - encode_ns), now_ns)
        span.set_attributes({"abserve.receive_us": receive_ns // 1000, "abserve.decode_us": decode_ns // 1000})
        self._end(span, now_ns)

    def failed(self, span: Span, reason: str) -> None:
        """A request is refused or has failed, now."""
        span.set_status(self._api.StatusCode.ERROR, reason)
        self._end(span, time.perf_counter_ns())

    def _span(self, name: str, context: Any, start_ns: int, kind: Any = None, **options: Any) -> Span:
        context, kind = context or self._alone, self._api.SpanKind.INTERNAL if kind is None else kind
        return self._tracer.start_span(name, context, kind, start_time=self._epoch_ns + start_ns, **options)

    def _end(self, span: Span, end_ns: int) -> None:
        span.end(self._epoch_ns + end_ns)

    def _context(self, trace: bytes | None) -> Any:
        assert trace is not None
        numbers = [int.from_bytes(part) for part in (trace[:TRACE_ID_BYTES], trace[TRACE_ID_BYTES:])]
        flags = self._api.TraceFlags(self._api.TraceFlags.SAMPLED)
        parent = self._api.SpanContext(*numbers, is_remote=True, trace_flags=flags)
        return self._api.set_span_in_context(self._api.NonRecordingSpan(parent))


class RequestTrace:
    """The span of one request, until it is answered."""

    __slots__ = ("_span", "_tracer")

    def __init__(self, tracer: Tracer, span: Span) -> None:
        self._tracer = tracer
        self._span = span

    @property
    def context(self) -> bytes:
        """The numbers of the trace and of the span, for the engine's side."""
        context = self._span.get_span_context()
        return b"".join([context.trace_id.to_bytes(TRACE_ID_BYTES), context.span_id.to_bytes(8)])

    def answered(self, receive_ns: int, decode_ns: int, encode_ns: int) -> None:
        """See `Tracer`."""
        self._tracer.answered(self._span, receive_ns, decode_ns, encode_ns)

    def failed(self, reason: str) -> None:
        """See `Tracer`."""
        self._tracer.failed(self._span, reason)


def trace_headers(headers: Sequence[tuple[bytes, bytes]]) -> dict[str, str] | None:
    """The headers of a client's trace; None without any."""
    return {name.decode(): value.decode("latin-1") for name, value in headers if name in TRACE_HEADERS} or None
