"""The Open Inference Protocol V2 with FastAPI, uvicorn and torch, as a competent engineer writes it in an afternoon.

The body of a request is a JSON header and then the bytes of its tensors, in the header's order; the HTTP header
Inference-Header-Content-Length is the length of the JSON. The response has the same form.
"""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

import numpy as np
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from servers.contract.tensors import Array
from servers.gpu.info import Runtime, gpu_info
from servers.models.specification import ModelSpecification
from servers.plain.model import EXTENSIONS, Model, model_config, model_metadata
from servers.plain.settings import PlainSettings, from_argv

LENGTH = "Inference-Header-Content-Length"


class Batcher:
    """Executes requests that wait together as one batch, in one thread: a GPU gains nothing from two."""

    def __init__(self, model: Model, delay_us: int) -> None:
        self.model, self.delay_s = model, delay_us / 1e6
        self.queue: asyncio.Queue[tuple[list[Array], asyncio.Future[list[Array]]]] = asyncio.Queue()

    async def infer(self, arrays: list[Array]) -> list[Array]:
        done: asyncio.Future[list[Array]] = asyncio.get_running_loop().create_future()
        self.queue.put_nowait((arrays, done))
        return await done

    async def run(self) -> None:
        loop, thread, held = asyncio.get_running_loop(), ThreadPoolExecutor(1), None
        while True:
            batch = [held or await self.queue.get()]
            held, end = None, loop.time() + self.delay_s
            while held is None and (rows := sum(len(one[0]) for one, _ in batch)) < self.model.spec.max_batch_size:
                try:
                    async with asyncio.timeout_at(end if self.queue.empty() else None):
                        one = await self.queue.get()
                except TimeoutError:
                    break
                alike = [array.shape[1:] for array in one[0]] == [array.shape[1:] for array in batch[0][0]]
                if alike and rows + len(one[0][0]) <= self.model.spec.max_batch_size:
                    batch.append(one)
                else:
                    held = one
            inputs, futures = zip(*batch, strict=True)
            try:
                answers = await loop.run_in_executor(thread, self.model.infer_merged, inputs)
                for future, answer in zip(futures, answers, strict=True):
                    if not future.done():  # else its client has left
                        future.set_result(answer)
            except Exception as exc:  # noqa: BLE001 - every request of the batch gets 500, and the next batch its turn
                for future in (one for one in futures if not one.done()):
                    future.set_exception(exc)


def read_tensor(spec: ModelSpecification, one: dict[str, Any], body: bytes, begin: int) -> Array:
    """An input of the header, as a view of the body. Raises an error of Python's own for anything malformed."""
    tensor, shape = next(t for t in spec.inputs if t.name == one["name"]), one["shape"]
    fits = all(size == fixed or (fixed == -1 and size > 0) for size, fixed in zip(shape, tensor.shape, strict=True))
    too_long = any(shape[axis.places[tensor.name]] > axis.largest for axis in spec.axes if tensor.name in axis.places)
    if one["datatype"] != tensor.datatype or not fits or too_long or shape[0] > spec.max_batch_size:
        raise ValueError(f"the model takes {tensor}, at most {spec.max_batch_size} rows")
    array = np.frombuffer(body, tensor.dtype, math.prod(shape), begin).reshape(shape)
    if one["parameters"]["binary_data_size"] != array.nbytes:
        raise ValueError(f"{tensor.name} needs a binary_data_size of {array.nbytes}")
    if (ids := spec.id_counts.get(tensor.name)) and not 0 <= array.min() <= array.max() < ids:
        raise ValueError(f"{tensor.name} must be from 0 to {ids - 1}")
    return array


def decode(spec: ModelSpecification, body: bytes, length: str | None) -> tuple[list[Array], dict[str, Any]]:
    """The inputs in the specification's order, and the JSON header."""
    try:
        end = int(length or len(body))
        header, given = json.loads(body[:end]), {}
        for one in header["inputs"]:
            given[one["name"]] = array = read_tensor(spec, one, body, end)
            end += array.nbytes
        arrays = [given[tensor.name] for tensor in spec.inputs]
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError, StopIteration) as exc:
        raise HTTPException(400, f"malformed request: {exc!r}") from exc
    if end != len(body) or len({len(array) for array in arrays}) != 1:
        raise HTTPException(400, "the body is longer than its tensors, or they differ in their number of rows")
    return arrays, header


def encode(spec: ModelSpecification, outputs: list[Array], header: dict[str, Any]) -> Response:
    """The response, with every output as bytes after the JSON."""
    tensors = [
        {"name": t.name, "datatype": t.datatype, "shape": a.shape, "parameters": {"binary_data_size": a.nbytes}}
        for t, a in zip(spec.outputs, outputs, strict=True)
    ]
    answer = {"id": header.get("id", ""), "model_name": spec.name, "model_version": spec.version, "outputs": tensors}
    text = json.dumps(answer).encode()
    return Response(b"".join([text, *(array.tobytes() for array in outputs)]), headers={LENGTH: str(len(text))})


def add_routes(app: FastAPI, settings: PlainSettings, runtime: Callable[[], Runtime]) -> None:
    """Every route but inference, and errors as JSON. The server listens only when the model is warm, so it is ready."""
    spec = settings.specification()
    model, server = (
        f"/v2/models/{spec.name}",
        {"name": app.title, "version": version("abserve"), "extensions": EXTENSIONS},
    )
    for health in ("/v2/health/live", "/v2/health/ready", f"{model}/ready"):
        app.add_api_route(health, lambda: Response())
    app.add_api_route("/v2", lambda: server)
    app.add_api_route(model, lambda: model_metadata(spec))
    app.add_api_route(f"{model}/config", lambda: model_config(settings, spec, runtime()))
    app.add_api_route("/gpu-info", lambda: gpu_info(runtime()))
    app.add_exception_handler(HTTPException, lambda _, e: JSONResponse({"error": str(e.detail)}, e.status_code))


def main() -> None:
    settings = from_argv()
    batcher = Batcher(model := Model(settings), settings.max_queue_delay_us)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(batcher.run())
        yield
        task.cancel()

    app = FastAPI(title="fastapi", lifespan=lifespan)
    add_routes(app, settings, lambda: model.runtime)

    @app.post(f"/v2/models/{model.spec.name}/infer")
    async def infer(request: Request) -> Response:
        arrays, header = decode(model.spec, await request.body(), request.headers.get(LENGTH))
        return encode(model.spec, await batcher.infer(arrays), header)

    uvicorn.run(app, host=settings.host, port=settings.http_port, log_level="warning")


if __name__ == "__main__":
    main()
