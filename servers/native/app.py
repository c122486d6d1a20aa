"""Every HTTP route but inference, which never reaches this: the HTTP door answers it itself."""

from __future__ import annotations

from importlib.metadata import version as package_version

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from servers.contract.errors import ContractError, InvalidRequestError
from servers.gpu.info import Runtime, gpu_info
from servers.native import documents
from servers.native.answers import error_body, error_headers, error_status
from servers.native.control_routes import (
    add_cuda_memory_routes,
    add_model_control_routes,
    add_shared_memory_routes,
    json_object,
)
from servers.native.metrics import CONTENT_TYPE, Metrics
from servers.native.model_control import ModelControl
from servers.native.regions import RegionTable
from servers.native.served_models import ServedModels

MODEL = "/v2/models/{model}"
MODEL_VERSION = "/v2/models/{model}/versions/{version}"


def create_app(models: ServedModels, regions: RegionTable, control: ModelControl) -> FastAPI:
    """The routes behind the HTTP port. The models are started and stopped by whoever runs the application."""
    # No documentation pages: they load scripts from somebody else's host.
    app = FastAPI(title="abserve native server", docs_url=None, redoc_url=None, redirect_slashes=False)
    _add_errors(app)
    _add_server_routes(app, models, regions)
    _add_model_routes(app, models)
    add_shared_memory_routes(app, regions)
    add_cuda_memory_routes(app, regions)
    add_model_control_routes(app, control)
    return app


def _add_server_routes(app: FastAPI, models: ServedModels, regions: RegionTable) -> None:
    metrics = Metrics(models)
    server_version = package_version("abserve")

    @app.get("/v2")
    async def server_metadata() -> Response:
        cuda = await regions.offers_cuda()
        return _json(documents.server_metadata(server_version, system_memory=regions.allowed, cuda_memory=cuda))

    @app.get("/v2/health/live")
    async def live() -> Response:
        return Response()

    @app.get("/v2/health/ready")
    async def ready() -> Response:
        models.check_ready()
        return Response()

    @app.post("/v2/repository/index")
    async def repository_index(request: Request) -> Response:
        asked = await json_object(request)
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
            service = models.find(model, version)
            kind = service.description.kind if service.description is not None else ""
            return _json(documents.model_metadata(service.signature, kind))

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
        return _error(500, "internal error, the server's log has it")


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
