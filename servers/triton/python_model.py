"""The model that Triton's python backend executes: an engine of `servers.engines` behind Triton's batcher.

Runs inside the backend's stub process, the only place with `triton_python_backend_utils`. Loads and warms up the
engine before Triton reports the model ready, and refuses to load an engine that differs from the config.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import triton_python_backend_utils as pb_utils

from servers.engines.batches import warm_up_sizes
from servers.engines.factory import build_engine
from servers.engines.interface import Engine, EngineError, profiled
from servers.models.file_names import for_python
from servers.models.image_decoder import ImageDecoder
from servers.models.preprocessing import ImageError
from servers.models.registry import get_variant
from servers.models.weights import parse_weights
from servers.protocol.errors import ContractError
from servers.protocol.tensors import Array
from servers.triton.backend_tensors import array_of, repair_bytes, tensor_of
from servers.triton.batch_executor import BatchExecutor
from servers.triton.engine_parameters import (
    EngineFile,
    contradictions,
    decoding_from_parameters,
    settings_from_parameters,
)

FAILED = "the engine failed; the server's log has the cause"


class TritonPythonModel:
    """Triton creates one per instance and calls its methods from one thread."""

    _engine: Engine
    _executor: BatchExecutor
    _decoder: ImageDecoder | None

    def initialize(self, args: Mapping[str, str]) -> None:
        """Build, load, verify and warm up the engine; a failure fails the load, with its message in Triton's log."""
        started_ns = time.perf_counter_ns()
        config = json.loads(args["model_config"])
        parameters = {key: value["string_value"] for key, value in config["parameters"].items()}
        max_batch_size = int(config["max_batch_size"])
        folder = Path(for_python(args["model_repository"])) / args["model_version"]
        private = msgspec.json.decode((folder / "engine.json").read_bytes(), type=EngineFile)
        specification = get_variant(for_python(private.model), parameters["payload"])
        settings = settings_from_parameters(parameters, max_batch_size)
        if any(tensor.dtype.hasobject for tensor in (*specification.inputs, *specification.outputs)):
            repair_bytes()

        self._decoder = None
        if specification.payload == "jpeg":
            self._decoder = ImageDecoder(specification.preprocessing, decoding_from_parameters(parameters))
        self._engine = build_engine(
            specification.executed,
            parse_weights(for_python(private.weights)),
            settings,
            Path(for_python(private.artefact)) if private.artefact is not None else None,
        )
        self._engine.load()
        in_effect = self._engine.describe()
        wrong = contradictions(parameters, max_batch_size, in_effect)
        if wrong:
            raise EngineError(f"the engine differs from the model's config: {'; '.join(wrong)}")
        loaded_ns = time.perf_counter_ns()
        self._engine.warm_up(warm_up_sizes(max_batch_size))
        warm_ns = time.perf_counter_ns()
        in_effect = profiled(self._engine) or in_effect

        self._input_names = [tensor.name for tensor in specification.inputs]
        self._executor = BatchExecutor(self._engine, specification, max_batch_size, self._decoder, settings.pad_to)
        report = {
            "in_effect": asdict(in_effect),
            "load_ns": loaded_ns - started_ns,
            "warm_up_ns": warm_ns - loaded_ns,
        }
        pb_utils.Logger.log_info(f"engine ready: {json.dumps(report, default=str)}")

    def execute(self, requests: list[Any]) -> list[Any]:
        """One response per request of a merged batch; inputs are views of shared memory, valid until this returns."""
        answers = self._executor.execute([self._inputs(request) for request in requests])
        return [_response(answer, request) for answer, request in zip(answers, requests, strict=True)]

    def finalize(self) -> None:
        """Free the engine."""
        if self._decoder is not None:
            self._decoder.close()
        self._engine.close()

    def _inputs(self, request: Any) -> dict[str, Array]:
        return {name: array_of(pb_utils.get_input_tensor_by_name(request, name)) for name in self._input_names}


def _response(answer: Mapping[str, Array] | Exception, request: Any) -> Any:
    if isinstance(answer, ImageError | ContractError):
        return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(answer), pb_utils.TritonError.INVALID_ARG))
    if isinstance(answer, Exception):  # a client must never see a traceback
        pb_utils.Logger.log_error(f"a request failed: {''.join(traceback.format_exception(answer))}")
        return pb_utils.InferenceResponse(error=pb_utils.TritonError(FAILED))
    wanted = set(request.requested_output_names())
    return pb_utils.InferenceResponse([tensor_of(name, array) for name, array in answer.items() if name in wanted])
