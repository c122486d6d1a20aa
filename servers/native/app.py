"""Every HTTP route but inference, which the HTTP front end answers itself."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from servers.contract.errors import ContractError, InvalidRequestError
from servers.contract.json_tensors import parse_json
from servers.gpu.info import Runtime, gpu_info
from servers.native import documents
from servers.native.errors import INTERNAL_ERROR
from servers.native.http_answers import error_body, error_headers, error_status
from servers.native.metrics import CONTENT_TYPE, Metrics
from servers.native.regions import RegionTable
from servers.native.served_models import ServedModels

SYSTEM = "/v2/systemsharedmemory"
CUDA = "/v2/cudasharedmemory"
REPOSITORY_MODEL = "/v2/repository/models/{model}"
MODEL = "/v2/models/{model}"
MODEL_VERSION = "/v2/models/{model}/versions/{version}"


def create_app(models: ServedModels, regions: RegionTable) -> FastAPI:
    """The routes behind the HTTP port. The models are started and stopped by whoever runs the application."""
    # No documentation pages: they load scripts from somebody else's host.
    app = FastAPI(title="abserve native server", docs_url=None, redoc_url=None, redirect_slashes=False)
    _add_errors(app)
    _add_server_routes(app, models, regions)
    _add_model_routes(app, models)
    _add_shared_memory_routes(app, regions)
    _add_model_control_routes(app, models)
    return app


def _add_server_routes(app: FastAPI, models: ServedModels, regions: RegionTable) -> None:
    metrics = Metrics(models)

    @app.get("/v2")
    async def server_metadata() -> Response:
        cuda = await regions.offers_cuda()
        return _json(documents.server_metadata(system_memory=regions.allowed, cuda_memory=cuda))

    @app.get("/v2/health/live")
    async def live() -> Response:
        return Response()

    @app.get("/v2/health/ready")
    async def ready() -> Response:
        models.check_ready()
        return Response()

    @app.post("/v2/repository/index")
    async def repository_index(request: Request) -> Response:
        asked = await _json_object(request)
        if not isinstance(asked.get("ready", False), bool):
            raise InvalidRequestError("'ready' must be true or false")
        return _json(documents.repository_index(models, asked.get("ready", False)))

    @app.get("/metrics")
    async def prometheus_metrics() -> Response:
        return Response(metrics.render(), media_type=CONTENT_TYPE)

    @app.get("/gpu-info")
    def gpu_information() -> Response:  # not async: the driver may take its time, so it runs in a worker thread
        return _json(gpu_info(_runtime(models)))


def _add_model_routes(app: FastAPI, models: ServedModels) -> None:
    @app.get("/v2/models/stats")
    async def all_statistics() -> Response:
        return _json(documents.statistics(models))

    for path in (MODEL, MODEL_VERSION):

        @app.get(path)
        async def metadata(model: str, version: str | None = None) -> Response:
            return _json(documents.model_metadata(models.find(model, version)))

        @app.get(f"{path}/ready")
        async def model_ready(model: str, version: str | None = None) -> Response:
            models.find(model, version).check_ready()
            return Response()

        @app.get(f"{path}/config")
        async def config(model: str, version: str | None = None) -> Response:
            return _json(documents.model_config(models.find(model, version)))

        @app.get(f"{path}/stats")
        async def statistics(model: str, version: str | None = None) -> Response:
            return _json(documents.statistics([models.find(model, version)]))


async def _json_object(request: Request) -> Mapping[str, Any]:
    """The body of a control request, empty where there is none. Raises `ContractError`."""
    body = await request.body()  # only small ones get here
    document = parse_json(body) if body else {}
    if not isinstance(document, dict):
        raise InvalidRequestError("the request JSON must be an object")
    return document


def _add_shared_memory_routes(app: FastAPI, regions: RegionTable) -> None:
    """CUDA's without a GPU: nothing can be registered, and the rest answers, because clients ask it first.

    Where a path names no region, all are meant.
    """

    @app.get(f"{SYSTEM}/status")
    @app.get(f"{SYSTEM}/region/{{region}}/status")
    async def status(request: Request) -> Response:
        return _json(documents.region_rows(regions.status(_region(request))))

    @app.post(f"{SYSTEM}/region/{{region}}/register")
    async def register(region: str, request: Request) -> Response:
        regions.check_allowed()
        asked = await _json_object(request)
        key = asked.get("key")
        if not isinstance(key, str):
            raise InvalidRequestError("'key' must be a string, the name that the shared memory was created with")
        regions.register(region, key, _whole_number(asked, "offset", 0), _whole_number(asked, "byte_size", None))
        return Response()

    @app.post(f"{SYSTEM}/unregister")
    @app.post(f"{SYSTEM}/region/{{region}}/unregister")
    async def unregister(request: Request) -> Response:
        regions.unregister(_region(request))
        return Response()

    @app.get(f"{CUDA}/status")
    @app.get(f"{CUDA}/region/{{region}}/status")
    async def cuda_status(request: Request) -> Response:
        return _json(documents.cuda_region_rows(regions.cuda_status(_region(request))))

    @app.post(f"{CUDA}/region/{{region}}/register")
    async def cuda_register(region: str, request: Request) -> Response:
        await regions.check_cuda()
        asked = await _json_object(request)
        handle, device = _handle(asked), _whole_number(asked, "device_id", None, "the number of a GPU")
        await regions.register_cuda(region, handle, device, _whole_number(asked, "byte_size", None))
        return Response()

    @app.post(f"{CUDA}/unregister")
    @app.post(f"{CUDA}/region/{{region}}/unregister")
    async def cuda_unregister(request: Request) -> Response:
        await regions.unregister_cuda(_region(request))
        return Response()


def _region(request: Request) -> str:
    return str(request.path_params.get("region", ""))


def _add_model_control_routes(app: FastAPI, models: ServedModels) -> None:
    """Load and unload; each is answered when it is done."""

    @app.post(f"{REPOSITORY_MODEL}/load")
    async def load(model: str, request: Request) -> Response:
        models.check_control(model)
        parameters = (await _json_object(request)).get("parameters") or {}
        if not isinstance(parameters, dict):
            raise InvalidRequestError("'parameters' must be an object")
        await models.load(model, parameters)
        return Response()

    @app.post(f"{REPOSITORY_MODEL}/unload")
    async def unload(model: str) -> Response:
        await models.unload(model)
        return Response()


def _handle(document: Mapping[str, Any]) -> bytes:
    """Line breaks are let through: perf_analyzer's encoder wraps after 72 characters."""
    try:
        return base64.b64decode("".join(document["raw_handle"]["b64"].split()), validate=True)
    except (KeyError, TypeError, AttributeError, ValueError) as exc:
        raise InvalidRequestError(
            "'raw_handle' must be an object with 'b64', the IPC handle's bytes in base64"
        ) from exc


def _whole_number(
    document: Mapping[str, Any], key: str, default: int | None, what: str = "a whole number of bytes"
) -> int:
    value = document.get(key, default)
    if type(value) is not int:
        raise InvalidRequestError(f"'{key}' must be {what}")
    return value


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(ContractError)
    async def contract_error(_request: Request, error: ContractError) -> Response:
        return _error(error_status(error), str(error))

    @app.exception_handler(HTTPException)
    async def http_error(_request: Request, error: HTTPException) -> Response:
        return _error(error.status_code, error.detail, dict(error.headers or {}))

    @app.exception_handler(RequestValidationError)
    async def validation_error(_request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return _error(400, f"{'.'.join(map(str, first['loc']))}: {first['msg']}")

    @app.exception_handler(Exception)
    async def unexpected(_request: Request, _cause: Exception) -> Response:
        return _error(500, INTERNAL_ERROR)


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    body = error_body(message)
    response = Response(body, status, headers)
    for name, value in error_headers(status, body):
        response.headers[name.decode()] = value.decode()
    return response


def _json(document: object) -> Response:
    return Response(orjson.dumps(document), media_type="application/json")


def _runtime(models: ServedModels) -> Runtime | None:
    """Of the first model that is loaded: all of a process are executed by the same kind of engine."""
    description = next((service.description for service in models if service.description is not None), None)
    if description is None:
        return None
    return Runtime(
        kind=description.kind, version=description.version, device=description.device, details=dict(description.details)
    )
