"""The HTTP routes that change the server: shared-memory regions, and loading and unloading of models."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any, NoReturn

import orjson
from fastapi import FastAPI, Request, Response

from servers.contract.errors import InvalidRequestError
from servers.contract.json_tensors import parse_json
from servers.native import documents
from servers.native.model_control import ModelControl
from servers.native.regions import RegionTable

SYSTEM = "/v2/systemsharedmemory"
CUDA = "/v2/cudasharedmemory"
REPOSITORY_MODEL = "/v2/repository/models/{model}"


async def json_object(request: Request) -> Mapping[str, Any]:
    """The body of a control request, empty where there is none. Raises `ContractError`."""
    body = await request.body()  # the door takes small ones only
    document = parse_json(body) if body else {}
    if not isinstance(document, dict):
        raise InvalidRequestError("the request JSON must be an object")
    return document


def add_shared_memory_routes(app: FastAPI, regions: RegionTable) -> None:
    """System shared memory; see `add_cuda_memory_routes`."""

    @app.get(f"{SYSTEM}/status")
    async def system_status() -> Response:
        return _json(documents.region_rows(regions.status("")))

    @app.get(f"{SYSTEM}/region/{{region}}/status")
    async def region_status(region: str) -> Response:
        return _json(documents.region_rows(regions.status(region)))

    @app.post(f"{SYSTEM}/region/{{region}}/register")
    async def register(region: str, request: Request) -> Response:
        regions.check_allowed()
        asked = await json_object(request)
        key = asked.get("key")
        if not isinstance(key, str):
            raise InvalidRequestError("'key' must be a string, the name that the shared memory was created with")
        regions.register(region, key, _whole_number(asked, "offset", 0), _whole_number(asked, "byte_size", None))
        return Response()

    @app.post(f"{SYSTEM}/unregister")
    async def unregister_all() -> Response:
        regions.unregister("")
        return Response()

    @app.post(f"{SYSTEM}/region/{{region}}/unregister")
    async def unregister(region: str) -> Response:
        regions.unregister(region)
        return Response()


def add_cuda_memory_routes(app: FastAPI, regions: RegionTable) -> None:
    """CUDA shared memory. Without a GPU nothing can be registered; the rest answers, because clients ask it first."""

    @app.get(f"{CUDA}/status")
    async def cuda_status() -> Response:
        return _json(documents.cuda_region_rows(regions.cuda_status("")))

    @app.get(f"{CUDA}/region/{{region}}/status")
    async def cuda_region_status(region: str) -> Response:
        return _json(documents.cuda_region_rows(regions.cuda_status(region)))

    @app.post(f"{CUDA}/region/{{region}}/register")
    async def cuda_register(region: str, request: Request) -> Response:
        await regions.check_cuda()
        asked = await json_object(request)
        handle, device = _handle(asked), _whole_number(asked, "device_id", None, "the number of a GPU")
        await regions.register_cuda(region, handle, device, _whole_number(asked, "byte_size", None))
        return Response()

    @app.post(f"{CUDA}/unregister")
    async def cuda_unregister_all() -> Response:
        await regions.unregister_cuda("")
        return Response()

    @app.post(f"{CUDA}/region/{{region}}/unregister")
    async def cuda_unregister(region: str) -> Response:
        await regions.unregister_cuda(region)
        return Response()


def add_model_control_routes(app: FastAPI, control: ModelControl) -> None:
    """Load and unload; each is answered when it is done."""

    @app.post(f"{REPOSITORY_MODEL}/load")
    async def load(model: str, request: Request) -> Response:
        control.check(model)
        parameters = (await json_object(request)).get("parameters") or {}
        if not isinstance(parameters, dict):
            raise InvalidRequestError("'parameters' must be an object")
        await control.load(model, parameters)
        return Response()

    @app.post(f"{REPOSITORY_MODEL}/unload")
    async def unload(model: str) -> Response:
        await control.unload(model)
        return Response()


def _handle(document: Mapping[str, Any]) -> bytes:
    """Line breaks are let through: perf_analyzer's encoder wraps after 72 characters."""
    encoded = document.get("raw_handle")
    text = encoded.get("b64") if isinstance(encoded, dict) else None
    try:
        return base64.b64decode("".join(text.split()), validate=True) if isinstance(text, str) else _no_handle()
    except (binascii.Error, ValueError):
        return _no_handle()


def _no_handle() -> NoReturn:
    raise InvalidRequestError("'raw_handle' must be an object with 'b64', the IPC handle's bytes in base64")


def _whole_number(
    document: Mapping[str, Any], key: str, default: int | None, what: str = "a whole number of bytes"
) -> int:
    value = document.get(key, default)
    if type(value) is not int:
        raise InvalidRequestError(f"'{key}' must be {what}")
    return value


def _json(document: object) -> Response:
    return Response(orjson.dumps(document), media_type="application/json")
