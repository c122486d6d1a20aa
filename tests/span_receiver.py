"""A receiver of OTLP over HTTP, as a collector is one. A test that needs it is skipped without `abserve[traces]`."""

from __future__ import annotations

import re
import threading
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from google.protobuf import json_format

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TRACE, PARENT = CALLER.split("-")[1:3]


@contextmanager
def receiving() -> Iterator[Receiver]:
    """A receiver on a free port."""
    receiver = Receiver()
    yield receiver
    receiver.server.shutdown()
    receiver.server.server_close()


class Receiver:
    """Takes spans as a collector does."""

    def __init__(self) -> None:
        requests = pytest.importorskip(
            "opentelemetry.proto.collector.trace.v1.trace_service_pb2", reason="needs abserve[traces]"
        )
        self.spans: list[Any] = []
        spans = self.spans

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                sent = requests.ExportTraceServiceRequest()
                if self.headers["Content-Type"] == "application/json":  # as Triton sends them
                    numbers = re.sub(r'(Id" *: *")([0-9a-f]+)"', _as_base64, body.decode())
                    json_format.Parse(numbers, sent, ignore_unknown_fields=True)
                else:
                    sent.ParseFromString(body)
                for of_resource in sent.resource_spans:
                    spans.extend(span for scope in of_resource.scope_spans for span in scope.spans)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1/traces"

    def named(self, name: str) -> list[Any]:
        return [span for span in self.spans if span.name == name]


def _as_base64(member: re.Match[str]) -> str:
    """A trace's or a span's number: OTLP's JSON has it in hexadecimal digits, protobuf's in base 64."""
    return f'{member[1]}{b64encode(bytes.fromhex(member[2])).decode()}"'
