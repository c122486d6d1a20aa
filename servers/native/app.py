"""Every HTTP route except inference, which the HTTP front end answers itself."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
import orjson
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from servers.contract.errors import ContractError, InvalidRequestError
from servers.contract.json_tensors import parse_json
from servers.gpu.info import Runtime, gpu_info
from servers.native import documents
from servers.native.cuda_regions import CudaRegion
from servers.native.errors import INTERNAL_ERROR, HttpError, http_status
from servers.native.http_answers import refusal
from servers.native.metrics import CONTENT_TYPE, render
from servers.native.regions import R, RegionTable, SystemRegion
from servers.native.served_models import ServedModels

SYSTEM = "/v2/systemsharedmemory"
CUDA = "/v2/cudasharedmemory"
REPOSITORY_MODEL = "/v2/repository/models/{model}"
MODELS = ("/v2/models/{model}", "/v2/models/{model}/versions/{version}")

T = TypeVar("T")


class _Index(msgspec.Struct):
    ready: bool = False


class _Load(msgspec.Struct):
    parameters: dict[str, Any] | None = None


class _SystemMemory(msgspec.Struct):
    key: str
    byte_size: int
    offset: int = 0


class _Handle(msgspec.Struct):
    b64: str


class _CudaMemory(msgspec.Struct):
    raw_handle: _Handle
    device_id: int
    byte_size: int


def create_app(models: ServedModels, regions: RegionTable) -> FastAPI:
    """The routes behind the HTTP port."""
    # No documentation pages: they load scripts from other hosts.
    app = FastAPI(title="abserve native server", docs_url=None, redoc_url=None, redirect_slashes=False)
    _add_errors(app)
    _add_server_routes(app, models, regions)
    _add_model_routes(app, models)
    _add_shared_memory_routes(app, regions)
    return app


def _add_server_routes(app: FastAPI, models: ServedModels, regions: RegionTable) -> None:
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

    @app.get("/metrics")
    async def prometheus_metrics() -> Response:
        return Response(render(models), media_type=CONTENT_TYPE)

    @app.get("/gpu-info")
    def gpu_information() -> Response:  # not async: the driver may be slow, so it runs in a worker thread
        return _json(gpu_info(_runtime(models)))


def _add_model_routes(app: FastAPI, models: ServedModels) -> None:
    @app.get("/v2/models/stats")
    async def all_statistics() -> Response:
        return _json(documents.statistics(models))

    for path in MODELS:

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

    @app.post("/v2/repository/index")
    async def repository_index(request: Request) -> Response:
        return _json(documents.repository_index(models, (await _body(request, _Index)).ready))

    @app.post(f"{REPOSITORY_MODEL}/load")
    async def load(model: str, request: Request) -> Response:
        await models.load(model, (await _body(request, _Load)).parameters or {})
        return Response()

    @app.post(f"{REPOSITORY_MODEL}/unload")
    async def unload(model: str) -> Response:
        await models.unload(model)
        return Response()


def _add_shared_memory_routes(app: FastAPI, regions: RegionTable) -> None:
    """Without a GPU only registering fails: clients ask for the status first."""
    _add_region_routes(app, regions, SYSTEM, SystemRegion)
    _add_region_routes(app, regions, CUDA, CudaRegion)

    @app.post(f"{SYSTEM}/region/{{region}}/register")
    async def register(region: str, request: Request) -> Response:
        regions.check_allowed()
        memory = await _body(request, _SystemMemory)
        regions.register(region, memory.key, memory.offset, memory.byte_size)
        return Response()

    @app.post(f"{CUDA}/region/{{region}}/register")
    async def cuda_register(region: str, request: Request) -> Response:
        await regions.check_cuda()
        memory = await _body(request, _CudaMemory)
        try:  # split: perf_analyzer's encoder breaks lines after 72 characters
            handle = base64.b64decode("".join(memory.raw_handle.b64.split()), validate=True)
        except ValueError as exc:
            raise InvalidRequestError("'raw_handle' must hold the bytes of the IPC handle in base64") from exc
        await regions.register_cuda(region, handle, memory.device_id, memory.byte_size)
        return Response()


def _add_region_routes(app: FastAPI, regions: RegionTable, path: str, kind: type[R]) -> None:
    """A path without a region means all of this kind."""

    @app.get(f"{path}/status")
    @app.get(f"{path}/region/{{region}}/status")
    async def status(request: Request) -> Response:
        return _json(regions.rows(kind, request.path_params.get("region", "")))

    @app.post(f"{path}/unregister")
    @app.post(f"{path}/region/{{region}}/unregister")
    async def unregister(request: Request) -> Response:
        await regions.unregister(kind, request.path_params.get("region", ""))
        return Response()


async def _body(request: Request, kind: type[T]) -> T:
    """The JSON of a control request, which is small; no body means an empty object. Raises `InvalidRequestError`."""
    return parse_json(await request.body() or b"{}", msgspec.json.Decoder(kind))


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(ContractError)
    async def contract_error(_request: Request, error: ContractError) -> Response:
        return _error(http_status(error), str(error), {})

    @app.exception_handler(HTTPException)
    async def http_error(_request: Request, error: HTTPException) -> Response:
        return _error(error.status_code, error.detail, error.headers or {})

    @app.exception_handler(Exception)
    async def unexpected(_request: Request, _cause: Exception) -> Response:
        return _error(500, INTERNAL_ERROR, {})


def _error(status: int, message: str, headers: Mapping[str, str]) -> Response:
    answer = refusal(HttpError(status, message))
    own = {name.decode(): value.decode() for name, value in answer.headers}
    return Response(answer.body, status, {**headers, **own})


def _json(document: object) -> Response:
    return Response(orjson.dumps(document), media_type="application/json")


def _runtime(models: ServedModels) -> Runtime | None:
    """The engine of the first loaded model: all models of a process are executed by the same kind."""
    description = next((service.description for service in models if service.description is not None), None)
    if description is None:
        return None
    return Runtime(
        kind=description.kind, version=description.version, device=description.device, details=dict(description.details)
    )
