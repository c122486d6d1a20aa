"""The HTTP door to inference: one request from its bytes to its answer, as plain ASGI in front of FastAPI.

Works under any ASGI server; under `DirectBodyProtocol` the body is not copied on its way here.
"""

from __future__ import annotations

import asyncio
import json
import time
import zlib
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import numpy as np
import structlog

from servers.contract.codec import HEADER_LENGTH, decode_request, encode_response, parse_header_length
from servers.contract.errors import (
    ContractError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    TooLargeError,
    UnavailableError,
    UnsupportedError,
)
from servers.native.direct_body import SCOPE_KEY, DirectBody
from servers.native.errors import ClientGoneError, failure_reason
from servers.native.inference import InferenceService
from servers.native.regions import RegionTable
from servers.native.served_models import ServedModels
from servers.native.statistics import RequestTimes

log = structlog.get_logger("abserve.http")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

_STATUS: tuple[tuple[type[ContractError], int], ...] = (
    (InvalidRequestError, 400),
    (NotFoundError, 404),
    (TooLargeError, 413),
    (UnavailableError, 503),
    (UnsupportedError, 501),
    (InternalError, 500),
)
_HEADER_LENGTH = HEADER_LENGTH.lower().encode()


def error_status(error: ContractError) -> int:
    """Triton's mapping of an error to an HTTP status."""
    return next((status for kind, status in _STATUS if isinstance(error, kind)), 500)


def error_body(message: str) -> bytes:
    """`{"error": …}`; pure ASCII, since a message may quote anything that a client sent."""
    return json.dumps({"error": message}).encode()


def error_headers(status: int, body: bytes) -> Headers:
    """Headers of an error's answer."""
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if status == 503:
        headers.append((b"retry-after", b"1"))
    return headers


class InferRoute:
    """`POST /v2/models/{model}[/versions/{version}]/infer`."""

    def __init__(self, models: ServedModels, max_body_bytes: int, regions: RegionTable) -> None:
        self._models = models
        self._regions = regions
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As an ASGI application behind a router that has put the names into the scope."""
        names = scope["path_params"]
        await self.handle(scope, receive, send, names["model"], names.get("version"))

    async def handle(self, scope: Scope, receive: Receive, send: Send, model: str, version: str | None) -> None:
        """Answer one request, always with a status of the protocol; nobody is answered when the client has left."""
        body: DirectBody | None = scope.get(SCOPE_KEY)
        times = RequestTimes(time.perf_counter_ns() if body is None else body.start_ns)
        service = self._models.default  # who counts a request that names no model of ours
        status = 200
        try:
            if body is not None:
                task = asyncio.current_task()
                assert task is not None
                body.watch(task.cancel)
            service = self._models.find(model, version)
            payload, json_bytes = await self._answer(scope["headers"], receive, body, times, service)
            headers = [(b"content-length", b"%d" % len(payload))]
            if json_bytes is None:
                headers.append((b"content-type", b"application/json"))
            else:
                headers.append((b"content-type", b"application/octet-stream"))
                headers.append((_HEADER_LENGTH, b"%d" % json_bytes))
            service.statistics.record_success(times)
        except ClientGoneError:
            service.statistics.record_disconnect()
            return
        except asyncio.CancelledError:
            if body is None or not body.gone:
                raise  # the server is being stopped by force
            service.statistics.record_disconnect()
            return
        except ContractError as error:
            status, payload, headers = _refuse(error, service, times)
        except Exception:
            log.exception("a request failed unexpectedly")
            fault = InternalError("internal error, the server's log has it")
            status, payload, headers = _refuse(fault, service, times)
        finally:
            if body is not None:
                body.answered = True
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": payload})

    async def _answer(
        self,
        headers: Headers,
        receive: Receive,
        body: DirectBody | None,
        times: RequestTimes,
        service: InferenceService,
    ) -> tuple[bytes, int | None]:
        service.check_ready()
        length = header_length = encoding = None
        for name, value in headers:
            if name == b"content-length":
                length = value
            elif name == _HEADER_LENGTH:
                header_length = value
            elif name == b"content-encoding":
                encoding = value
        if body is not None:
            data = await body.received()
        else:
            data = await read_body(receive, self._max_body_bytes, length)
        received_ns = time.perf_counter_ns()
        if encoding is not None:
            data = await self._decompressed(data, encoding.decode("latin-1").strip().lower())
        json_bytes = None if header_length is None else parse_header_length(header_length.decode("latin-1"), len(data))
        request = decode_request(data, json_bytes, service.signature, self._regions)
        decoded_ns = time.perf_counter_ns()
        times.receive_ns = received_ns - times.start_ns
        times.decode_ns = decoded_ns - received_ns
        response = await service.infer(request, times)
        inferred_ns = time.perf_counter_ns()
        payload = encode_response(response)
        times.encode_ns = time.perf_counter_ns() - inferred_ns
        return payload

    async def _decompressed(self, data: memoryview, encoding: str) -> memoryview:
        if encoding == "identity":
            return data
        if encoding not in ("gzip", "deflate"):
            raise InvalidRequestError("Content-Encoding must be identity, gzip or deflate")
        return await asyncio.get_running_loop().run_in_executor(None, decompress, data, self._max_body_bytes)


def _refuse(error: ContractError, service: InferenceService, times: RequestTimes) -> tuple[int, bytes, Headers]:
    service.statistics.record_failure(failure_reason(error), times.start_ns)
    status, payload = error_status(error), error_body(str(error))
    return status, payload, error_headers(status, payload)


def decompress(data: memoryview, limit: int) -> memoryview:
    """Raises `TooLargeError` before more than `limit` bytes exist, `InvalidRequestError` for other formats."""
    decoder = zlib.decompressobj(wbits=47)  # 32 + 15: gzip or zlib, by its own header
    try:
        text = decoder.decompress(data, limit + 1)
    except zlib.error as exc:
        raise InvalidRequestError("the body is not what its Content-Encoding says") from exc
    if len(text) > limit:
        raise TooLargeError(f"the body has more than {limit} bytes after decompression, the server's limit")
    if not decoder.eof:
        raise InvalidRequestError("the compressed body ends too early")
    return memoryview(text)


async def read_body(receive: Receive, limit: int, length: bytes | None) -> memoryview:
    """A body of known size into one buffer, a chunked one into a growing one.

    Raises `TooLargeError` above `limit` bytes, `ClientGoneError` when it never ends.
    """
    known = int(length) if length is not None and length.isdigit() and len(length) < 19 else None
    too_large = TooLargeError(f"the body has more than {limit} bytes, the server's limit")
    if known is not None and known > limit:
        raise too_large
    view = np.empty(known, np.uint8).data if known is not None else None
    grown = bytearray()
    filled = 0
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError("the client left before its request was complete")
        chunk = message.get("body", b"")
        more = message.get("more_body", False)
        end = filled + len(chunk)
        if end > (limit if known is None else known):
            raise too_large
        if view is None:
            grown += chunk
        else:
            view[filled:end] = chunk
        filled = end
    return memoryview(grown) if view is None else view[:filled]


def infer_target(path: str) -> tuple[str, str | None] | None:
    """Model and version of an inference route, None for every other path."""
    match path.split("/"):
        case ["", "v2", "models", model, "infer"]:
            return model, None
        case ["", "v2", "models", model, "versions", version, "infer"]:
            return model, version
        case _:
            return None
