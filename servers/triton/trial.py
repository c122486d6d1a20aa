"""Starts a tritonserver for a moment, as a launch would, so that `abserve doctor` ticks only what has run here.

It gets a repository with a model per backend that answers max(0, x), and a request for each. The tensorrt backend only
has to load: a plan runs only on the GPU for which it was built.
"""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from servers.options.launch import bind
from servers.triton.installation import (
    CODE,
    STUB,
    Installation,
    TritonDiedError,
    TritonError,
    library_name,
    missing_library,
)
from servers.triton.launch import prepare_trial, search_path
from servers.triton.process import CODE_OF_ERROR, TritonProcess
from servers.triton.settings import TritonSettings

USED = ("onnxruntime", "tensorrt", "python")
"""The backends that abserve uses."""
READY_SECONDS = 60.0
"""A tritonserver whose files are in the disk's cache is ready in less than one."""
REQUEST_SECONDS = 10.0
_POLL_SECONDS = 0.02
_SENT, _EXPECTED = [-1.0, 2.0], [0.0, 2.0]
_NOT_LOADED = re.compile(r"unable to (?:find backend|load shared) library|cannot open shared object|undefined symbol")
_CONFIG = """backend: "{backend}"
default_model_filename: "{file}"
max_batch_size: 0
input [ {{ name: "x" data_type: TYPE_FP32 dims: [ 2 ] }} ]
output [ {{ name: "y" data_type: TYPE_FP32 dims: [ 2 ] }} ]
instance_group [ {{ kind: {kind} count: 1 }} ]
parameters {{ key: "intra_op_thread_count" value: {{ string_value: "1" }} }}
"""
RELU = bytes.fromhex(
    "0808" "3a36" "0a0c0a0178120179220452656c75" "120472656c75"
    "5a0f0a0178120a0a08080112040a020802" "620f0a0179120a0a08080112040a020802" "42040a00100d"
)  # fmt: skip
"""An ONNX file with one operator, y = Relu(x), of IR version 8 and opset 13, which old runtimes have, too."""
MODEL_PY = b"""import numpy
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        inputs = [numpy.from_dlpack(pb_utils.get_input_tensor_by_name(request, "x")) for request in requests]
        outputs = [pb_utils.Tensor.from_dlpack("y", numpy.maximum(x, numpy.float32(0))) for x in inputs]
        return [pb_utils.InferenceResponse([output]) for output in outputs]
"""
_FILES = {"onnxruntime": ("model.onnx", RELU), "tensorrt": ("model.plan", b""), "python": (CODE, MODEL_PY)}


@dataclass(frozen=True, slots=True)
class ServerTrial:
    """What a tritonserver did here."""

    ready_seconds: float
    failure: str | None
    """Why the server does not start; then its backends were not tried, except for what their files show."""
    backends: Mapping[str, str | None]
    """Of each backend that abserve uses, why it does not work; None for one that works. A python backend for another
    Python is left out."""

    @property
    def working(self) -> tuple[str, ...]:
        """The backends that work, in the order of `USED`."""
        return () if self.failure else tuple(name for name in USED if self.backends.get(name, "") is None)


def try_installation(installation: Installation, device: str = "cpu") -> ServerTrial:
    """Start it with the backends that are there and stop it again, within a minute or so. `device` is that of the ONNX
    model, cpu or cuda:0."""
    faults = {name: fault for name in USED if (fault := _fault_of_files(installation, name))}
    tried = [name for name in USED if name in installation.backends and name not in faults]
    if installation.stub is None:
        tried = [name for name in tried if not installation.runs_in_python(name)]
    began, ready = time.monotonic(), 0.0
    failure: str | None = None
    answers: dict[str, str | None] = {}
    with TemporaryDirectory(prefix="abserve-triton-") as name:
        folder = Path(name)
        try:
            for backend in tried:
                _write_model(folder / "models" / backend, backend, device)
            (folder / "models").mkdir(exist_ok=True)
            plan = prepare_trial(_settings(folder), installation, folder / "models")
            with TritonProcess(plan, folder / "log", needs_all=False) as server:
                try:
                    server.wait_live(READY_SECONDS)
                    ready = time.monotonic() - began
                    answers = {backend: _fault(plan.http_url, backend) for backend in tried}
                finally:
                    server.stop(timeout_seconds=0)  # an orderly end takes seconds
        except TritonDiedError as exc:
            words = str(exc).removesuffix(f"; its log is {folder / 'log'}")  # which goes with the folder
            failure = ": ".join((words, *exc.log_lines[-1:]))
        except (TritonError, OSError, ValueError) as exc:
            failure = str(exc)
    return ServerTrial(ready, failure, {**answers, **faults})


def _settings(folder: Path) -> TritonSettings:
    with ExitStack() as stack:
        http, grpc, metrics = (stack.enter_context(bind("127.0.0.1", 0)).getsockname()[1] for _ in range(3))
    return TritonSettings(
        host="127.0.0.1", work_dir=folder / "work", http_port=http, grpc_port=grpc, metrics_port=metrics
    )


def _fault_of_files(installation: Installation, backend: str) -> str | None:
    """What the files of a backend's folder show; None without a folder, or if they show nothing."""
    folder = installation.backend_folder / backend
    if not folder.is_dir():
        return None
    if backend not in installation.backends:
        return f"{folder} has no {library_name(backend)}"
    stub = installation.stub if installation.runs_in_python(backend) else None
    missing = None if stub is None else missing_library(stub, search_path(installation))
    return None if missing is None else f"its process {STUB} does not start: {missing}"


def _write_model(folder: Path, backend: str, device: str) -> None:
    file, content = _FILES[backend]
    kind = "KIND_CPU" if device == "cpu" or backend == "python" else "KIND_GPU"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / file).write_bytes(content)
    (folder / "config.pbtxt").write_text(_CONFIG.format(backend=backend, file=file, kind=kind), encoding="utf-8")


def _fault(url: str, backend: str) -> str | None:
    """Why the model of a backend does not answer right; None if it does."""
    index = {row.get("name"): row for row in _post(f"{url}/v2/repository/index", {})}
    row = index.get(backend, {})
    if row.get("state") != "READY":
        words = str(row.get("reason") or "Triton does not say why its model was not loaded")
        if backend == "tensorrt" and "reason" in row and not _NOT_LOADED.search(words):
            return None
        return re.sub(f"^{CODE_OF_ERROR}", "", words).partition("\n")[0].partition(", try specifying")[0]
    try:
        tensor = {"name": "x", "shape": [2], "datatype": "FP32", "data": _SENT}
        answer = _post(f"{url}/v2/models/{backend}/infer", {"inputs": [tensor]})
        values = answer["outputs"][0]["data"]
    except (OSError, KeyError, IndexError, ValueError) as exc:
        return f"its model was loaded, and a request failed: {exc}"
    return None if values == _EXPECTED else f"its model answers {values} instead of {_EXPECTED}"


def _post(url: str, document: Any) -> Any:
    request = urllib.request.Request(url, json.dumps(document).encode(), {"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=REQUEST_SECONDS) as answer:
        return json.loads(answer.read())
