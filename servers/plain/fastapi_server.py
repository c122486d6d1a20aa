"""The Open Inference Protocol V2 with FastAPI, uvicorn and torch, as a competent engineer writes it in an afternoon.

The body of a request is a JSON header and then the bytes of its tensors, in the header's order; the HTTP header
Inference-Header-Content-Length is the length of the JSON. The response has the same form.
"""

import asyncio
import json
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from servers.options.stages import stage

with stage("import"):
    import numpy as np
    import torch
    import uvicorn
    from fastapi import FastAPI, Request, Response
    from fastapi.responses import JSONResponse
    from starlette.exceptions import HTTPException

from servers.gpu.info import Runtime
from servers.models.specification import ModelSpecification
from servers.plain.report import DTYPES, check_input, check_values, documents, log_start, module_of, read_runtime
from servers.plain.settings import PlainSettings, of_process
from servers.protocol.tensors import Array

WARM = "ABSERVE_FASTAPI_WARM"
"""The variable with the folder in which each process whose model is warm leaves a file."""
LENGTH = "Inference-Header-Content-Length"


class PlainModel:
    """The torch module in its precision on its device; warmed up as soon as it is made."""

    def __init__(self, settings: PlainSettings) -> None:
        self.spec, self.device, self.dtype = settings.specification(), settings.device, DTYPES[settings.precision]
        self.module = module_of(settings).to(self.device)
        with stage("warm_up"):
            for rows in (*settings.warm_rows(), 1):
                shapes = {tensor: (rows, *self.spec.item_shape(tensor)) for tensor in self.spec.inputs}
                self.infer([[np.zeros(shape, tensor.dtype) for tensor, shape in shapes.items()]])
        log_start()

    @torch.inference_mode()
    def infer(self, requests: Sequence[list[Array]]) -> list[list[Array]]:
        """The answers to requests that are executed as one batch; tensors in the specification's order."""
        merged = [parts[0] if len(parts) == 1 else np.concatenate(parts) for parts in zip(*requests, strict=True)]
        inputs = [torch.from_numpy(array).to(self.device, non_blocking=True) for array in merged]
        answer = self.module(*(tensor.to(self.dtype) if tensor.is_floating_point() else tensor for tensor in inputs))
        outputs = [
            (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).cpu().numpy().astype(spec.dtype, copy=False)
            for spec, tensor in zip(
                self.spec.outputs, answer if isinstance(answer, tuple | list) else [answer], strict=True
            )
        ]
        ends = np.cumsum([len(arrays[0]) for arrays in requests])[:-1]
        return [list(split) for split in zip(*(np.split(output, ends) for output in outputs), strict=True)]


class PlainBatcher:
    """Executes requests that wait together as one batch, in one thread: a GPU gains nothing from two."""

    def __init__(self, model: PlainModel, delay_us: int) -> None:
        self.model, self.delay_s = model, delay_us / 1e6
        self.queue: asyncio.Queue[tuple[list[Array], asyncio.Future[list[Array]]]] = asyncio.Queue()
        self.task: asyncio.Task[None] | None = None

    async def infer(self, arrays: list[Array]) -> list[Array]:
        done: asyncio.Future[list[Array]] = asyncio.get_running_loop().create_future()
        self.task = self.task or asyncio.create_task(self.run())
        self.queue.put_nowait((arrays, done))
        return await done

    async def run(self) -> None:
        loop, thread, held = asyncio.get_running_loop(), ThreadPoolExecutor(1), None
        while True:
            batch = [held or await self.queue.get()]
            held, end = None, loop.time() + self.delay_s
            while held is None and (rows := sum(len(entry[0]) for entry, _ in batch)) < self.model.spec.max_batch_size:
                try:
                    async with asyncio.timeout_at(end if self.queue.empty() else None):
                        entry = await self.queue.get()
                except TimeoutError:
                    break
                alike = [array.shape[1:] for array in entry[0]] == [array.shape[1:] for array in batch[0][0]]
                if alike and rows + len(entry[0][0]) <= self.model.spec.max_batch_size:
                    batch.append(entry)
                else:
                    held = entry
            inputs, futures = zip(*batch, strict=True)
            try:
                answers = await loop.run_in_executor(thread, self.model.infer, inputs)
                for future, answer in zip(futures, answers, strict=True):
                    if not future.done():  # else its client has left
                        future.set_result(answer)
            except Exception as exc:  # noqa: BLE001 - every request of the batch gets 500, and the next batch its turn
                for future in (entry for entry in futures if not entry.done()):
                    future.set_exception(exc)


def decode(spec: ModelSpecification, body: bytes, length: str | None) -> tuple[list[Array], dict[str, Any]]:
    """The inputs in the specification's order, as views of the body, and the JSON header."""
    try:
        end = int(length or len(body))
        header, inputs = json.loads(body[:end]), {}
        for item in header["inputs"]:
            tensor = check_input(spec, item["name"], item["datatype"], item["shape"])
            array = np.frombuffer(body, tensor.dtype, math.prod(item["shape"]), end).reshape(item["shape"])
            check_values(spec, tensor.name, array, item["parameters"]["binary_data_size"])
            inputs[tensor.name], end = array, end + array.nbytes
        arrays = [inputs[tensor.name] for tensor in spec.inputs]
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as exc:
        raise HTTPException(400, f"malformed request: {exc!r}") from exc
    if end != len(body) or len(set(map(len, arrays))) != 1:
        raise HTTPException(400, "the body has other bytes than its tensors, or they differ in their number of rows")
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


def add_routes(
    app: FastAPI, name: str, settings: PlainSettings, runtime: Callable[[], Runtime],
    ready: Callable[[], bool] = lambda: True,
) -> None:  # fmt: skip
    """Every route but inference, and errors as JSON. A process listens only when its model is warm; `ready`: and so are
    the others."""
    for health in ("/v2/health/live", "/v2/health/ready", f"/v2/models/{settings.specification().name}/ready"):
        app.add_api_route(health, lambda: Response(status_code=200 if ready() else 503))
    for path, document in documents(name, settings, runtime).items():
        app.add_api_route(path, document)
    app.add_exception_handler(HTTPException, lambda _, e: JSONResponse({"error": str(e.detail)}, e.status_code))


def make_app() -> FastAPI:
    """The application of this process, whose model is warm."""
    model = PlainModel(settings := of_process())
    runtime = read_runtime(settings, model.module, model.infer)
    batcher, app = PlainBatcher(model, settings.max_queue_delay_us), FastAPI()
    warm = Path(os.environ[WARM])
    (warm / str(os.getpid())).touch()
    add_routes(app, "fastapi", settings, lambda: runtime, lambda: len(list(warm.iterdir())) >= settings.workers)

    @app.post(f"/v2/models/{model.spec.name}/infer")
    async def infer(request: Request) -> Response:
        arrays, header = decode(model.spec, await request.body(), request.headers.get(LENGTH))
        return encode(model.spec, await batcher.infer(arrays), header)

    return app


def main() -> None:
    """One process, or several that accept connections of the same port."""
    settings = of_process()
    with TemporaryDirectory(prefix="abserve-fastapi-") as warm:
        os.environ[WARM] = warm
        app = make_app() if settings.workers == 1 else "servers.plain.fastapi_server:make_app"
        uvicorn.run(
            app, host=settings.host, port=settings.http_port, log_level="warning", factory=settings.workers > 1,
            workers=settings.workers, ssl_certfile=settings.tls_certificate,
            timeout_worker_healthcheck=60,  # a process answers nothing while it loads torch
        )  # fmt: skip


if __name__ == "__main__":
    main()
