"""Every HTTP route except inference, which the HTTP front end answers itself."""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable, Mapping, Sequence
from html import escape
from inspect import isawaitable
from typing import Any, Literal, TypeVar

import msgspec
import orjson
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from servers.gpu.info import Runtime, gpu_info
from servers.native.front import documents
from servers.native.front.documents import CONTENT_TYPE, render
from servers.native.front.generation import GenerationService
from servers.native.front.inference import InferenceService, ModelService, ServedModels
from servers.native.front.region_table import RegionTable
from servers.native.http.parser import refusal
from servers.native.shared.errors import INTERNAL_ERROR, HttpError
from servers.protocol.errors import ContractError, InvalidRequestError
from servers.protocol.examples import completion_commands, infer_commands
from servers.protocol.values import parse_json

T = TypeVar("T")
Document = documents.Document | list[documents.Document]
Method = Callable[[Request], Document | Awaitable[Document | None] | None]
"""The document that answers a request; None for an empty response. Raises `ContractError`."""


class _Index(msgspec.Struct):
    ready: bool = False


class _Load(msgspec.Struct):
    parameters: dict[str, Any] | None = None


class _SystemMemory(msgspec.Struct):
    key: str
    byte_size: int
    offset: int = 0


class _CudaMemory(msgspec.Struct):
    raw_handle: dict[Literal["b64"], str]
    device_id: int
    byte_size: int


def create_app(models: ServedModels[InferenceService], regions: RegionTable) -> FastAPI:
    """The routes behind the HTTP port of models that take and answer tensors."""
    methods = {
        "GET /": lambda request: _welcome(models, [_of_tensors(service, _url(request)) for service in models]),
        "GET /v2": lambda _: documents.server_metadata(regions),
        **_model_methods(models),
        **_region_methods(regions),
    }
    return _app(models, methods)


def create_language_app(models: ServedModels[GenerationService]) -> FastAPI:
    """The routes behind the HTTP port of a language model."""
    methods: dict[str, Method] = {
        "GET /": lambda request: _welcome(
            models, [completion_commands(_url(request), service.signature.name) for service in models]
        ),
        "GET /v2": lambda _: documents.server_metadata(None),
        "GET /v1/models": lambda _: documents.openai_models(models),
        **_model_methods(models),
    }
    return _app(models, methods)


def _app(models: ServedModels[ModelService], methods: Mapping[str, Method]) -> FastAPI:
    # Not FastAPI's documentation pages: they load scripts from other hosts.
    app = FastAPI(title="abserve native server", docs_url=None, redoc_url=None, redirect_slashes=False)
    _add_errors(app)
    for route, method in methods.items():
        verb, _, path = route.partition(" ")
        app.add_api_route(path, _endpoint(method), methods=[verb], name=route)

    @app.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> Response:
        return Response(_docs(await _document(methods["GET /"], request), list(methods)), media_type="text/html")

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(render(models), media_type=CONTENT_TYPE)

    @app.get("/gpu-info")
    def gpu_information() -> Response:  # not async: the driver may be slow, so it runs in a worker thread
        return _json(gpu_info(_runtime(models)))

    return app


def _url(request: Request) -> str:
    """The address under which the client has reached the server."""
    return str(request.base_url).rstrip("/")


def _of_tensors(service: InferenceService, url: str) -> tuple[str, ...]:
    return infer_commands(url, service.signature.name, service.signature.inputs)


def _welcome(models: ServedModels[ModelService], examples: Sequence[tuple[str, ...]]) -> Document:
    """What is served, and commands that send each model a request."""
    served = [
        {"name": service.signature.name, "examples": commands}
        for service, commands in zip(models, examples, strict=True)
    ]
    return {"name": documents.SERVER_NAME, "models": served, "docs": "/docs", "openapi": "/openapi.json"}


_GIVEN = {
    "GET /": "this server's models, with commands that send them a request",
    "GET /v2": "the server and the extensions of the protocol that it offers",
    "GET /v2/health/live": "whether the process runs",
    "GET /v2/health/ready": "whether every model can answer",
    "GET /v2/models/stats": "counts and times of every model",
    "GET /v2/models/{model}": "a model's inputs and outputs",
    "GET /v2/models/{model}/config": "its settings in effect",
    "GET /v2/models/{model}/ready": "whether it can answer",
    "GET /v2/models/{model}/stats": "counts and times",
    "POST /v2/models/{model}/infer": "a request of the Open Inference Protocol, as JSON or with binary tensors",
    "POST /v2/models/{model}/generate_stream": "a streamed answer of a language model",
    "POST /v1/completions": "a streamed or whole answer of a language model, as OpenAI's",
    "POST /v2/repository/index": "every model and its state",
    "GET /metrics": "metrics for Prometheus",
    "GET /gpu-info": "the GPU, its driver, and what uses it",
}
"""What the documentation page says of a route."""


def _docs(welcome: Mapping[str, Any], routes: Sequence[str]) -> str:
    """A page without scripts: a request for every model, and the routes."""
    own = ["POST /v2/models/{model}/infer"]
    if "GET /v1/models" in routes:
        own = ["POST /v1/completions", "POST /v2/models/{model}/generate_stream"]
    examples = "".join(
        f"<h2>{escape(model['name'])}</h2>" + "".join(f"<pre>{escape(text)}</pre>" for text in model["examples"])
        for model in welcome["models"]
    )
    shown = [*own, *routes, "GET /metrics", "GET /gpu-info"]
    rows = "".join(f"<tr><td><code>{escape(route)}</code><td>{_GIVEN.get(route, '')}" for route in shown)
    return (
        f"<!doctype html><meta charset=utf-8><title>{documents.SERVER_NAME}</title>"
        "<style>body{font:16px sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
        "pre{white-space:pre-wrap;overflow-wrap:anywhere}td{padding:.2em 1em .2em 0;vertical-align:top}</style>"
        f"<h1>{documents.SERVER_NAME}</h1>{examples}<h2>Routes</h2><table>{rows}</table>"
        '<p>For programs: <a href="/openapi.json">openapi.json</a></p>'
    )


def _model_methods(models: ServedModels[ModelService]) -> dict[str, Method]:
    """The methods about the server's state and its models, by verb and path."""

    async def repository_index(request: Request) -> Document:
        return documents.repository_index(models, (await _body(request, _Index)).ready)

    async def load(request: Request) -> None:
        await models.load(request.path_params["model"], (await _body(request, _Load)).parameters or {})

    def find(request: Request) -> ModelService:
        return models.find(request.path_params["model"], request.path_params.get("version"))

    methods: dict[str, Method] = {
        "GET /v2/health/live": lambda _: None,
        "GET /v2/health/ready": lambda _: models.check_ready(),
        "GET /v2/models/stats": lambda _: documents.statistics(models),
        "POST /v2/repository/index": repository_index,
        "POST /v2/repository/models/{model}/load": load,
        "POST /v2/repository/models/{model}/unload": lambda request: models.unload(request.path_params["model"]),
    }
    for model in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
        methods |= {
            f"GET {model}": lambda request: documents.model_metadata(find(request)),
            f"GET {model}/ready": lambda request: find(request).check_ready(),
            f"GET {model}/config": lambda request: documents.model_config(find(request)),
            f"GET {model}/stats": lambda request: documents.statistics([find(request)]),
        }
    return methods


def _region_methods(regions: RegionTable) -> dict[str, Method]:
    """The methods about shared memory, by verb and path. A path without a region means all regions of its kind."""

    async def register(request: Request) -> None:
        regions.check_allowed()
        memory = await _body(request, _SystemMemory)
        await regions.register(_region(request), memory.key, memory.offset, memory.byte_size)

    async def register_cuda(request: Request) -> None:
        await regions.check_cuda()
        memory = await _body(request, _CudaMemory)
        try:  # split: perf_analyzer's encoder breaks lines after 72 characters
            handle = base64.b64decode("".join(memory.raw_handle["b64"].split()), validate=True)
        except (KeyError, ValueError) as exc:
            raise InvalidRequestError("'raw_handle' must hold the bytes of the IPC handle in base64") from exc
        await regions.register_cuda(_region(request), handle, memory.device_id, memory.byte_size)

    methods: dict[str, Method] = {
        "POST /v2/systemsharedmemory/region/{region}/register": register,
        "POST /v2/cudasharedmemory/region/{region}/register": register_cuda,
    }
    for region in ("", "/region/{region}"):
        methods |= {
            f"GET /v2/systemsharedmemory{region}/status": lambda request: regions.rows(
                _region(request), on_device=False
            ),
            f"GET /v2/cudasharedmemory{region}/status": lambda request: regions.rows(_region(request), on_device=True),
            f"POST /v2/systemsharedmemory{region}/unregister": lambda request: regions.unregister(
                _region(request), on_device=False
            ),
            f"POST /v2/cudasharedmemory{region}/unregister": lambda request: regions.unregister(
                _region(request), on_device=True
            ),
        }
    return methods


async def _document(method: Method, request: Request) -> Any:
    answer = method(request)
    return await answer if isawaitable(answer) else answer


def _endpoint(method: Method) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        document = await _document(method, request)
        return Response() if document is None else _json(document)

    return endpoint


def _region(request: Request) -> str:
    return str(request.path_params.get("region", ""))


async def _body(request: Request, kind: type[T]) -> T:
    """The JSON of a control request, which is small; no body means an empty object. Raises `InvalidRequestError`."""
    return parse_json(await request.body() or b"{}", msgspec.json.Decoder(kind))


def _add_errors(app: FastAPI) -> None:
    async def failed(_request: Request, error: Exception) -> Response:
        own: ContractError | HttpError = HttpError(500, INTERNAL_ERROR)
        headers: Mapping[str, str] = {}
        if isinstance(error, ContractError):
            own = error
        elif isinstance(error, HTTPException):
            own, headers = HttpError(error.status_code, error.detail), error.headers or {}
        answer = refusal(own)
        own_headers = {name.decode(): value.decode() for name, value in answer.headers}
        return Response(answer.body, answer.status, {**headers, **own_headers})

    for kind in (ContractError, HTTPException, Exception):
        app.add_exception_handler(kind, failed)


def _json(document: object) -> Response:
    return Response(orjson.dumps(document), media_type="application/json")


def _runtime(models: ServedModels[ModelService]) -> Runtime | None:
    """The engine of the first loaded model: all models of a process are executed by the same kind."""
    description = next((service.description for service in models if service.description is not None), None)
    if description is None:
        return None
    return Runtime(
        kind=description.kind, version=description.version, device=description.device, details=dict(description.details)
    )
