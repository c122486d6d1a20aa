"""The models that Triton's python backend executes: an engine behind Triton's batcher, and a decoder of JPEG files.

Runs inside the backend's stub process, the only place with `triton_python_backend_utils`. A repository's `model.py`
imports one of the two classes as `TritonPythonModel`, the name that Triton looks for.

The stub of Triton 2.51 was built for NumPy 1: it reads an element's size where NumPy 2 keeps flags, mostly a zero. Its
conversions then make empty tensors, without an error. Tensors of numbers therefore pass by DLPack, which does not use
that size. DLPack has no type for byte strings (BYTES); `repair_bytes` corrects the stub's conversions of those. All of
this also works with NumPy 1 and with newer stubs.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from servers.engines.batches import warm_up_sizes
from servers.engines.factory import build_engine
from servers.engines.interface import Engine, EngineError, profiled
from servers.models.files import for_python
from servers.models.images import ImageDecoder, ImageError
from servers.models.registry import get_variant
from servers.models.weights import parse_weights
from servers.options.stages import stage, start_line
from servers.protocol.errors import ContractError
from servers.protocol.tensors import Array
from servers.triton.batch_executor import BatchExecutor
from servers.triton.config import (
    REFERENCE,
    contradictions,
    decoding_from_parameters,
    parameters_of_instance,
    settings_from_parameters,
)

CPU = (1, 0)
_CONSUMED = ctypes.c_char_p(b"used_dltensor")
"""A capsule keeps the address of its name, so the name lives as long as this module."""
_NEW_FROM_DESCR = 94
"""Place of PyArray_NewFromDescr in NumPy's table of C functions; the same in NumPy 1 and 2."""
_TABLE_SIZE = 320
_set_name = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_SetName", ctypes.pythonapi))
_repaired: list[object] = []
"""What the stub calls after `repair_bytes`; it must not be freed."""
FAILED = "the engine failed; the server's log has the cause"


class _Capsule:
    """A tensor as `numpy.from_dlpack` takes it, without the arguments that the stub's own method refuses."""

    __slots__ = ("_capsule",)

    def __init__(self, capsule: object) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_options: object) -> object:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return CPU


def array_of(tensor: Any) -> Array:
    """A read-only view of the tensor in shared memory, which keeps the tensor alive; BYTES become an object array."""
    array: Array = tensor.as_numpy()
    if array.dtype.hasobject:
        return array
    capsule: Any = _Capsule(tensor.to_dlpack())
    return np.from_dlpack(capsule)


def tensor_of(name: str, array: Any) -> Any:
    """A tensor with the array's memory, which it keeps alive; a read-only or divided array is copied."""
    if array.dtype.hasobject or not array.size:  # the stub checks the strides of empty DLPack tensors wrongly
        return pb_utils.Tensor(name, array)
    if not (array.flags.c_contiguous and array.flags.writeable):
        array = array.copy()
    capsule = array.__dlpack__()
    tensor = pb_utils.Tensor.from_dlpack(name, capsule)
    # The stub leaves a name that NumPy does not know: NumPy would print an error when it frees the capsule.
    _set_name(capsule, _CONSUMED)
    return tensor


def repair_bytes() -> None:
    """Make the stub convert BYTES under NumPy 2: otherwise the first such input ends its process. Call it before the
    stub handles the first tensor. The stub (pybind11 before 2.12) then takes its functions from
    `numpy.core.multiarray`, which newer code does not use."""
    if _repaired or int(np.__version__.partition(".")[0]) < 2:
        return
    _repair_inputs()
    serialize = pb_utils.serialize_byte_tensor

    def serialize_byte_tensor(array: Array) -> object:
        elements = serialize(array)
        return _measurable(elements) if elements else elements

    pb_utils.serialize_byte_tensor = serialize_byte_tensor


def _repair_inputs() -> None:
    """The stub makes an array of an input's bytes with strides of zero: let NumPy compute the strides."""
    module: Any = importlib.import_module("numpy.core.multiarray")
    pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
        ("PyCapsule_GetPointer", ctypes.pythonapi)
    )
    new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
        ("PyCapsule_New", ctypes.pythonapi)
    )
    table = (ctypes.c_void_p * _TABLE_SIZE)()
    ctypes.memmove(table, pointer(module._ARRAY_API, None), ctypes.sizeof(table))
    address, count = ctypes.c_void_p, ctypes.c_int
    # type, dtype, dimensions, shape, strides, data, flags, object
    new_from_descr = ctypes.PYFUNCTYPE(
        ctypes.py_object, address, address, count, address, address, address, count, address
    )
    original = new_from_descr(table[_NEW_FROM_DESCR] or 0)
    repaired = new_from_descr(
        lambda kind, dtype, dimensions, shape, _strides, *rest: original(kind, dtype, dimensions, shape, None, *rest)
    )
    table[_NEW_FROM_DESCR] = ctypes.cast(repaired, ctypes.c_void_p).value
    module._ARRAY_API = new(ctypes.addressof(table), None, None)
    _repaired.extend((table, original, repaired))


def _measurable(elements: bytes) -> Array:
    """The bytes as an array of which an old and a new stub read the same size. An old stub takes the flags of the
    dtype, here 1, for an element's size, which is 1. No other array has the dtype."""
    dtype: Any = np.dtype([("", np.uint8)])
    array: Array = np.frombuffer(elements, dtype)
    dtype.__setstate__((*dtype.__reduce__()[2][:-1], 1))  # the last part of the state are the flags
    return array


def read_launch(args: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str], Path]:
    """The model's config, its parameters, and the folder of its version."""
    config = json.loads(args["model_config"])
    parameters = {key: value["string_value"] for key, value in config["parameters"].items()}
    return config, parameters, Path(for_python(args["model_repository"])) / args["model_version"]


class EngineModel:
    """An engine of `servers.engines`, loaded and warmed up before Triton reports the model ready. Triton creates one
    per instance and calls its methods from one thread."""

    _engine: Engine
    _executor: BatchExecutor
    _decoder: ImageDecoder | None

    def initialize(self, args: Mapping[str, str]) -> None:
        """Build, load, verify and warm up the engine; a failure fails the load, with its message in Triton's log."""
        started_ns = time.perf_counter_ns()
        config, parameters, folder = read_launch(args)
        parameters = parameters_of_instance(parameters, args["model_instance_device_id"])
        max_batch_size = int(config["max_batch_size"])
        private = json.loads((folder / "engine.json").read_bytes())
        with stage("describe"):
            specification = get_variant(for_python(private["model"]), parameters["payload"])
        settings = settings_from_parameters(parameters, max_batch_size)
        if any(tensor.dtype.hasobject for tensor in (*specification.inputs, *specification.outputs)):
            repair_bytes()

        self._decoder = None
        if specification.payload == "jpeg":
            self._decoder = ImageDecoder(specification.preprocessing, decoding_from_parameters(parameters))
        self._engine = build_engine(
            specification.executed,
            parse_weights(for_python(private["weights"])),
            settings,
            Path(for_python(private["artefact"])) if private["artefact"] is not None else None,
        )
        with stage("load"):
            self._engine.load()
        in_effect = self._engine.describe()
        if differences := contradictions(parameters, max_batch_size, in_effect):
            raise EngineError(f"the engine differs from the model's config: {'; '.join(differences)}")
        loaded_ns = time.perf_counter_ns()
        with stage("warm_up"):
            self._engine.warm_up(warm_up_sizes(max_batch_size))
        warm_ns = time.perf_counter_ns()
        in_effect = profiled(self._engine) or in_effect

        self._input_names = [tensor.name for tensor in specification.inputs]
        self._executor = BatchExecutor(self._engine, specification, max_batch_size, self._decoder, settings.pad_to)
        report = {"in_effect": asdict(in_effect), "load_ns": loaded_ns - started_ns, "warm_up_ns": warm_ns - loaded_ns}
        pb_utils.Logger.log_info(start_line())
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
    requested = set(request.requested_output_names())
    return pb_utils.InferenceResponse([tensor_of(name, array) for name, array in answer.items() if name in requested])


class DecodingModel:
    """The first step of an ensemble whose second step is a native backend: JPEG files in, UINT8 pixels out. Triton
    creates one per instance and calls its methods from one thread."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Read the model and the decoding settings from the config."""
        repair_bytes()
        _, parameters, folder = read_launch(args)
        private = folder / REFERENCE
        reference = private.read_text(encoding="utf-8") if private.is_file() else parameters["model"]
        specification = get_variant(for_python(reference), "jpeg")
        self._files = specification.inputs[0].name
        self._pixels = specification.executed.inputs[0].name
        self._decoder = ImageDecoder(specification.preprocessing, decoding_from_parameters(parameters))

    def execute(self, requests: list[Any]) -> list[Any]:
        """One response per request. Decodes all images in parallel; a bad image fails only its own request."""
        decodings = [
            self._decoder.start(array_of(pb_utils.get_input_tensor_by_name(request, self._files)))
            for request in requests
        ]
        answers = []
        for decoding in decodings:
            try:
                answers.append(pb_utils.InferenceResponse([tensor_of(self._pixels, decoding.result())]))
            except ImageError as exc:
                error = pb_utils.TritonError(str(exc), pb_utils.TritonError.INVALID_ARG)
                answers.append(pb_utils.InferenceResponse(error=error))
        return answers

    def finalize(self) -> None:
        """Stop the threads."""
        self._decoder.close()
