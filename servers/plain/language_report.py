"""What abserve adds to the plain server of a language model: the model, its limits, and the settings in effect."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from servers.gpu.info import gpu_info
from servers.language.module import build_module
from servers.language.specification import language_model
from servers.language.weights import weights_sha256
from servers.options.defaults import usable_cores
from servers.plain.report import runtime_of, server_document
from servers.plain.settings import PlainSettings
from servers.protocol.errors import InvalidRequestError


class PlainLanguageModel:
    """The module in its precision on its device, warm as soon as it is made; `settings` are resolved."""

    def __init__(self, settings: PlainSettings) -> None:
        # As the other servers of language models count, which ignore OMP_NUM_THREADS of the caller's environment.
        torch.set_num_threads(settings.threads or usable_cores())
        self.settings, self.device = settings, settings.device
        self.specification = language_model(settings.model, settings.weights)
        self.name, self.eos = self.specification.name, self.specification.eos
        self.vocabulary = self.specification.vocabulary
        self.max_length = settings.max_length or self.specification.max_length
        self.module: Any = build_module(self.specification, settings.device, settings.precision)
        # What a request says about EOS counts alone: where it says nothing, generate() would take what is set here.
        self.module.generation_config.eos_token_id = None
        self.runtime = runtime_of(settings.device, self.module, self._generate_two)

    def _generate_two(self) -> None:
        prompt = torch.full((1, 8), self.specification.prompt_ids[0], device=self.device)
        self.module.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=2, do_sample=False)

    def config(self) -> dict[str, object]:
        """The configuration in Triton's form, with the settings in effect as parameters."""
        weights = self.specification.weights
        parameters = {
            "engine": "generate",
            "engine_version": f"transformers {transformers.__version__}, torch {torch.__version__}",
            "precision": self.runtime.details["precision"],
            "mode": "eager",
            "device": self.runtime.device,
            "weights": weights.label,
            "weights_sha256": weights_sha256(weights, self.specification.fields),
            "model": self.specification.label,
            "max_length": self.max_length,
            "attention": self.module.config._attn_implementation,
        }
        if self.runtime.device == "cpu":
            parameters["threads"] = self.runtime.details["threads"]
        return {
            "name": self.name,
            "platform": "",
            "backend": "transformers",
            "max_batch_size": 0,
            "model_transaction_policy": {"decoupled": True},
            "parameters": {name: {"string_value": str(value)} for name, value in parameters.items()},
        }

    def metadata(self) -> dict[str, object]:
        """The tensors of a request to generate_stream and of its answers."""
        tensors = {"inputs": ("input_ids", "max_tokens", "ignore_eos"), "outputs": ("token_ids", "prompt_tokens")}
        listed = {
            key: [
                {"name": name, "datatype": "BOOL" if name == "ignore_eos" else "INT32", "shape": [-1]} for name in names
            ]
            for key, names in tensors.items()
        }
        return {"name": self.name, "versions": ["1"], "platform": "transformers", **listed}


def openai_error(status: int, message: str) -> dict[str, object]:
    """An error in OpenAI's form."""
    kind = {400: "BadRequestError", 404: "NotFoundError"}.get(status, "InternalServerError")
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def add_language_routes(app: FastAPI, model: PlainLanguageModel) -> None:
    """Every route but generation, and errors in the form of the route's protocol."""
    documents = {
        "/v1/models": lambda: {"object": "list", "data": [_card(model)]},
        "/v2": lambda: server_document("fastapi"),
        f"/v2/models/{model.name}": model.metadata,
        f"/v2/models/{model.name}/config": model.config,
        "/gpu-info": lambda: dict(gpu_info(model.runtime)),
    }
    for path, document in documents.items():
        app.add_api_route(path, document)
    for path in ("/health", "/v2/health/live", "/v2/health/ready", f"/v2/models/{model.name}/ready"):
        app.add_api_route(path, lambda: Response())

    def answer(request: Request, status: int, message: str) -> JSONResponse:
        openai = request.url.path.startswith("/v1/")
        return JSONResponse(openai_error(status, message) if openai else {"error": message}, status)

    @app.exception_handler(HTTPException)
    async def refuse(request: Request, error: HTTPException) -> JSONResponse:
        return answer(request, error.status_code, str(error.detail))

    @app.exception_handler(InvalidRequestError)
    async def refuse_values(request: Request, error: InvalidRequestError) -> JSONResponse:
        return answer(request, 400, str(error))

    @app.exception_handler(RequestValidationError)
    async def refuse_body(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"][1:])) or "the body"
        return answer(request, 400, f"{place}: {first['msg'][:1].lower()}{first['msg'][1:]}")


def _card(model: PlainLanguageModel) -> dict[str, object]:
    return {"id": model.name, "object": "model", "created": 0, "owned_by": "abserve", "max_model_len": model.max_length}
