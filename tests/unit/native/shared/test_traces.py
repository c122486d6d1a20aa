"""Spans of a batch and what the options of traces refuse; the ways of spans are tested with real servers."""

from __future__ import annotations

import pytest

from servers.models.registry import get_variants
from servers.native.http.parser import HeadReader
from servers.native.shared import settings as settings_module
from servers.native.shared.interface import QueuedRequest
from servers.native.shared.settings import NativeSettings
from servers.native.shared.traces import Tracer, tracer_of
from servers.options.defaults import OptionError
from servers.protocol.records import ModelSignature


def test_a_batch_links_to_its_traced_requests() -> None:
    pytest.importorskip("opentelemetry.sdk.trace", reason="needs abserve[traces]")
    export = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    processors = pytest.importorskip("opentelemetry.sdk.trace.export")
    kept = export.InMemorySpanExporter()
    tracer = Tracer(processors.SimpleSpanProcessor(kept), 1.0)
    requests = [QueuedRequest({}, 2, (), None, None, enqueued_ns=enqueued) for enqueued in (10, 20, 30)]
    for request in requests[:2]:
        trace = tracer.begin(ModelSignature("m", "3", (), (), 4), 5, None)
        assert trace is not None
        request.trace = trace.context
    tracer.executed(requests, 6, 100, 150, 200)
    batch, *of_requests = kept.get_finished_spans()
    assert dict(batch.attributes) == {"abserve.batch.requests": 3, "abserve.batch.rows": 6}
    assert (batch.parent, batch.end_time - batch.start_time) == (None, 100)
    contexts = [link.context for link in batch.links]
    assert [span.name for span in of_requests] == ["queue", "execution"] * 2
    assert [span.parent.span_id for span in of_requests[::2]] == [context.span_id for context in contexts]
    assert [span.end_time - span.start_time for span in of_requests] == [90, 50, 80, 50]
    assert {span.links[0].context.span_id for span in of_requests[1::2]} == {batch.context.span_id}
    tracer.executed(requests[2:], 2, 100, 150, 200)
    assert len(kept.get_finished_spans()) == 5


def test_traces_are_refused_without_an_address_or_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    (specification, *_) = get_variants(NativeSettings().model, "")
    with pytest.raises(OptionError, match=r"give an address"):
        NativeSettings(traces="127.0.0.1:4317").resolved(specification)
    monkeypatch.setattr(settings_module, "traces_installed", lambda: False)
    with pytest.raises(OptionError, match=r"abserve\[traces\]"):
        NativeSettings(traces="http://127.0.0.1:4318").resolved(specification)
    assert tracer_of(NativeSettings()) is None


def test_heads_with_the_number_of_a_trace_take_no_place_of_others() -> None:
    heads = HeadReader(NativeSettings())
    plain = b"POST /v2/models/m/infer HTTP/1.1\r\ncontent-length: 4\r\n\r\n"
    known = heads.read(plain)
    for number in range(300):
        head = heads.read(plain[:-2] + b"Traceparent: 00-%032x-%016x-01\r\n\r\n" % (number + 1, 7))
        assert head.trace_headers == {"traceparent": f"00-{number + 1:032x}-{7:016x}-01"}
    assert heads.read(plain) is known
