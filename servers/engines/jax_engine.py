"""JAX: the model's own module through torchax, one jitted executable per bucket, on the CPU and on CUDA.

A bucket is a batch size, for a model with a padded axis times a size of that axis; a model with another axis gets an
executable for each shape. Batches are padded to their bucket and the answers are cut back. Integers have 32 bits, JAX's
default. At load one batch is compared with the model's own module in FP32 on the CPU.

JAX and torchax are imported by `load`, because they need an environment with an older torch: see
`servers.engines.factory`. JAX starts threads, so a process that has loaded this engine must not fork.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from servers.engines.agreement import Disagreement, disagreement, proof_at_load
from servers.engines.batches import axis_buckets, bucket_of, bucket_sizes, check_sizes, random_inputs, valid_inputs
from servers.engines.interface import Engine, EngineDescription, EngineError
from servers.engines.padding import fill_rows
from servers.engines.processors import cuda_index, thread_count
from servers.engines.settings import KINDS, PARAMETER_TYPES, EngineKind
from servers.gpu.cuda_library import device_uuid
from servers.models.specification import ModelSpecification, reason_of
from servers.models.weights import WeightsError
from servers.protocol.errors import InvalidRequestError
from servers.protocol.tensors import Array, TensorSpec

LIBRARIES = ("jax", "torchax")
INSTALL = "make engines"
"""JAX needs an environment of its own: `pip install 'abserve[servers,jax]'` makes one outside a checkout."""

KIND = EngineKind(
    "servers.engines.jax_engine:JaxEngine",
    {"cpu": ("jit",), "cuda": ("jit",)},
    {"cpu": ("fp32",), "cuda": ("fp32", "tf32", "bf16", "fp16")},
    LIBRARIES,
    install=INSTALL,
)


def _of_the_jax_file(kind: EngineKind, install: str) -> EngineKind:
    """The kind of an ONNX engine, changed to execute the file that jax2onnx makes from the JAX function."""
    return replace(kind, libraries=(*kind.libraries, *LIBRARIES, "jax2onnx"), executes="jax", install=install)


ONNX_KIND = _of_the_jax_file(KINDS["onnxruntime"], INSTALL)
TENSORRT_KIND = _of_the_jax_file(KINDS["tensorrt"], f"{INSTALL} && .venv-engines/bin/pip install 'abserve[tensorrt]'")

MATRIX_PRECISIONS = {"fp32": "highest", "tf32": "tensorfloat32", "fp16": "highest", "bf16": "highest"}
"""By precision, JAX's name of it for products of FP32 values; products of 16-bit values do not depend on it."""
PRECISIONS_OF_TYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
THREADS_VARIABLE = "PJRT_NPROC"
"""XLA reads the number of its CPU threads from it when JAX first uses the CPU, and never again."""
THREAD_NAME = "tf_XLAEigen"

Shapes = tuple[tuple[int, ...], ...]
"""The shape of each input, in the order of the specification."""
Function = Callable[[Any, Sequence[Any]], tuple[Any, ...]]
"""A JAX function of the weights and the inputs, in order, that returns the outputs, in order."""


class _Executable(NamedTuple):
    """A compiled function for one shape of the inputs."""

    call: Callable[[Any, Sequence[Any]], Sequence[Any]]
    compile_seconds: float
    products: frozenset[str]
    """The precisions of its products that XLA was asked for."""


class JaxEngine(Engine):
    """Executes a model by JAX. The number of CPU threads applies to JAX and torch in the whole process."""

    _device: Any = None
    _weights_on_device: Any = None
    _function: Any = None
    _checked: Disagreement | None = None

    def load(self) -> None:
        """Convert the module, put its weights on the device, and compare one padded batch with the module."""
        specification, settings = self._specification, self._settings
        self._executables: dict[Shapes, _Executable] = {}
        self._executed: dict[int, Shapes] = {}
        """By the number of rows of a batch: the shapes that were executed for them."""
        self._inputs_on_device: dict[Shapes, list[Any]] = {}
        """Inputs on the device for executions without copies."""
        axis = specification.padded_axis
        self._rows = bucket_sizes(settings.max_batch_size, settings.buckets, halves=False)
        self._sizes = () if axis is None else axis_buckets(axis, settings.pad_to)
        self._device = device = start_jax(settings.device_here(), settings.threads)
        import jax
        import torch

        from servers.engines.torch.forms import check_datatypes, expected_answers
        from servers.models.uint8_module import executed_module, to_precision

        check_datatypes(specification)
        assert self._weights is not None
        try:
            module = specification.load_module(self._weights)
        except WeightsError as exc:
            raise EngineError(str(exc)) from exc
        executed = executed_module(specification, module)
        proof = proof_at_load(specification, settings.max_batch_size)
        with self.checking():
            expected = proof.expected(partial(expected_answers, specification, executed))
        dtype = PARAMETER_TYPES[settings.precision]
        try:
            with jax.default_device(device):
                weights, function = as_jax(specification, to_precision(executed, getattr(torch, dtype)), dtype)
            self._weights_on_device = jax.device_put(weights, device)
            self._function = jax.jit(function)
            self.checks_values = any(tensor.datatype in ("INT64", "UINT64") for tensor in specification.inputs)
            answers = proof.without_padding(self.infer(proof.inputs))
        except EngineError:
            raise
        except Exception as exc:  # the model's own code runs here, and torchax and JAX raise errors of every kind
            raise self._refusal(exc) from exc
        self._checked = disagreement(specification, expected, answers, settings.precision)
        if self._checked.fault is not None:
            remedy = "use --engine torch" if settings.precision == "fp32" else "use --precision fp32"
            raise EngineError(
                f"JAX on {_name_of(device)} in {settings.precision} does not compute the model: {self._checked.fault}, "
                f"compared with its own module in FP32 on each item alone; {remedy}"
            )

    def warm_up(self, batch_sizes: Sequence[int]) -> None:
        """Compile every bucket of these batch sizes: at the sizes of `pad_to`, or at the axis' default size."""
        axis = self._specification.padded_axis
        listed = [] if axis is None else [size for size in self._settings.pad_to if size <= axis.largest]
        along = [{axis.name: size} for size in listed] if axis is not None and listed else [{}]
        for rows, sizes in product(sorted({bucket_of(self._rows, size) for size in batch_sizes}), along):
            self.infer(valid_inputs(self._specification, rows, sizes))

    def check_values(self, inputs: Mapping[str, Array]) -> None:
        """Raises `InvalidRequestError` for integers beyond 32 bits."""
        for name, array in inputs.items():
            if (reason := _beyond_32_bits(name, array)) is not None:
                raise InvalidRequestError(reason)

    def infer(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """Execute one batch, padded to its bucket; a bucket without an executable is compiled first. Raises
        `ValueError` for a batch beyond the largest bucket or the largest size of an axis."""
        if self._function is None:
            raise EngineError("the jax engine is not loaded")
        specification, axis = self._specification, self._specification.padded_axis
        check_sizes(specification, inputs)
        rows = len(inputs[specification.inputs[0].name])
        size = 0 if axis is None else axis.size_of(inputs)
        padded_size = bucket_of(self._sizes, size) if axis is not None else 0
        arrays = [
            _with_32_bits(
                tensor.name, self._padded(tensor, inputs[tensor.name], bucket_of(self._rows, rows), padded_size)
            )
            for tensor in specification.inputs
        ]
        shapes = tuple(array.shape for array in arrays)
        executable = self._executable(shapes)
        self._executed[rows] = shapes
        try:
            fetched = [np.asarray(output) for output in executable.call(self._weights_on_device, arrays)]
        except Exception as exc:  # JAX's errors share no base but Exception
            raise EngineError(f"JAX failed to execute the batch: {reason_of(exc)}") from exc
        answers = {}
        for tensor, array in zip(specification.outputs, fetched, strict=True):
            rows_of_request = array[:rows] if axis is None else axis.cut(tensor.name, array[:rows], size)
            # A copy: JAX may have returned the input's memory, and its arrays are read-only.
            answers[tensor.name] = np.array(rows_of_request, tensor.dtype)
        return answers

    def executed_rows(self, rows: int) -> int:
        return bucket_of(self._rows, rows)

    def run_only(self, rows: int) -> bool:
        """Execute on inputs that lie on the device."""
        import jax

        if (prepared := self._prepared(rows)) is not None:
            call, inputs = prepared
            jax.block_until_ready(call(self._weights_on_device, inputs))
        return prepared is not None

    def describe(self) -> EngineDescription:
        """Read back from the weights, the compiled functions, the device and the threads of XLA."""
        import jax

        if self._function is None:
            raise EngineError("the jax engine is not loaded")
        on_cpu = self._device.platform == "cpu"
        leaves = jax.tree.leaves(self._weights_on_device)
        weights = [weight for weight in leaves if str(weight.dtype) in PRECISIONS_OF_TYPES]
        largest = max(weights, key=lambda weight: weight.size, default=None)
        dtype = PARAMETER_TYPES[self._settings.precision] if largest is None else str(largest.dtype)
        products = frozenset[str]().union(*(executable.products for executable in self._executables.values()))
        precision = PRECISIONS_OF_TYPES[dtype]
        if precision == "fp32" and not on_cpu and products - {"HIGHEST"}:
            precision = "tf32"
        details: dict[str, object] = {
            "torchax": version("torchax"),
            "platform_version": self._device.client.platform_version.partition("\n")[0],
            "parameters": sum(weight.size for weight in weights),
            "weights_devices": sorted({_name_of(device) for weight in weights for device in weight.devices()}),
            "products": sorted(products),
            "buckets": list(self._rows),
            "compile_seconds": {
                " ".join("×".join(map(str, shape)) for shape in shapes): round(executable.compile_seconds, 3)
                for shapes, executable in self._executables.items()
            },
            "memory": self._device.memory_stats() or None,
        }
        if (axis := self._specification.padded_axis) is not None:
            details[f"{axis.name}_buckets"] = list(self._sizes)
        if not on_cpu:
            details |= {
                "device_name": self._device.device_kind,
                "device_uuid": device_uuid(self._device.local_hardware_id),
            }
        if self._checked is not None:
            details |= self._checked.details("fp32")
        return self._description(
            version=jax.__version__,
            precision=precision,
            mode="jit",
            device=_name_of(self._device),
            threads=cpu_threads() if on_cpu else None,
            details=details,
        )

    def close(self) -> None:
        self._function = self._weights_on_device = None
        self._executables, self._executed = {}, {}

    def _padded(self, tensor: TensorSpec, array: Array, rows: int, size: int) -> Array:
        """The input padded to the rows and the size of its executable; padding rows repeat the last one."""
        axis = self._specification.padded_axis
        place = None if axis is None else axis.places.get(tensor.name)
        shape = (rows, *array.shape[1:])
        if place is not None:
            shape = (*shape[:place], size, *shape[place + 1 :])
        if shape == array.shape:
            return array
        padded = np.empty(shape, array.dtype)
        filled = fill_rows(padded, [array], tensor.name, axis)
        padded[filled:] = padded[filled - 1]
        return padded

    def _executable(self, shapes: Shapes) -> _Executable:
        if (executable := self._executables.get(shapes)) is None:
            executable = self._executables[shapes] = self._compiled(shapes)
        return executable

    def _compiled(self, shapes: Shapes) -> _Executable:
        import jax

        started_ns = time.perf_counter_ns()
        dtypes = [jax.dtypes.canonicalize_dtype(tensor.dtype) for tensor in self._specification.inputs]
        inputs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
        with (
            jax.default_device(self._device),
            jax.default_matmul_precision(MATRIX_PRECISIONS[self._settings.precision]),
        ):
            try:
                lowered = self._function.lower(self._weights_on_device, inputs)
                compiled = lowered.compile()
            except EngineError:
                raise
            except Exception as exc:  # as in `load`
                raise self._refusal(exc) from exc
        seconds = (time.perf_counter_ns() - started_ns) / 1e9
        return _Executable(compiled, seconds, _product_precisions(lowered.as_text()))

    def _refusal(self, exc: Exception) -> EngineError:
        reason = reason_of(exc).rstrip(".")
        return EngineError(f"JAX cannot execute {self._specification.name}: {reason}; use --engine torch")

    def _prepared(self, rows: int) -> tuple[Callable[..., Any], list[Any]] | None:
        """The executable of the last batch of `rows`, and inputs of its shapes on the device."""
        import jax

        if (shapes := self._executed.get(rows)) is None:
            return None
        if shapes not in self._inputs_on_device:  # those of one shape are kept, for many runs one by one
            specification = self._specification
            sizes = {
                axis.name: shape[axis.places[tensor.name]]
                for axis in specification.axes
                for tensor, shape in zip(specification.inputs, shapes, strict=True)
                if tensor.name in axis.places
            }
            inputs = random_inputs(specification, shapes[0][0], 0, sizes)
            arrays = [_with_32_bits(tensor.name, inputs[tensor.name]) for tensor in specification.inputs]
            self._inputs_on_device = {shapes: jax.block_until_ready(jax.device_put(arrays, self._device))}
        return self._executable(shapes).call, self._inputs_on_device[shapes]


def start_jax(device: str, threads: int) -> Any:
    """JAX's device of that name, `cpu` or `cuda:N`; on the CPU with so many threads, 0: all cores. For the CPU no GPU
    is touched. Raises `EngineError` where JAX has no such device, and where this process has already started it
    otherwise."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else JAX takes 75 % of the GPU's memory at once
    index, count = cuda_index(device), thread_count(threads)
    if index is None:
        os.environ[THREADS_VARIABLE] = str(count)
    import jax

    jax.config.update("jax_platforms", "cpu" if index is None else "cuda,cpu")
    try:
        devices = jax.devices("cpu" if index is None else "cuda")
    except RuntimeError as exc:
        if index is None:
            raise EngineError(f"JAX {jax.__version__} cannot start on the CPU: {reason_of(exc)}") from exc
        raise EngineError(
            f"device {device}: JAX finds no CUDA device ({reason_of(exc)}); install JAX's CUDA plugin "
            "beside it with pip install 'jax[cuda13]', or cuda12 for an older driver, or use --device cpu"
        ) from exc
    if index is None:
        import torch

        if (started := cpu_threads()) != count:
            raise EngineError(
                f"threads {threads}: JAX has already started with {started} in this process, and cannot change that; "
                "use another process"
            )
        torch.set_num_threads(count)
        return devices[0]
    if index >= len(devices):
        raise EngineError(f"device {device}: JAX finds {len(devices)} CUDA device(s)")
    return devices[index]


def cpu_threads() -> int:
    """The threads among which XLA divides an operation on the CPU, counted in this process."""
    names = (path / "comm" for path in Path("/proc/self/task").iterdir())
    return sum(name.read_text().strip() == THREAD_NAME for name in names)


def as_jax(specification: ModelSpecification, module: Any, dtype: str) -> tuple[Any, Function]:
    """A module in eval mode as its weights and a JAX function, with the outputs in the specification's datatypes.
    Floating-point inputs are converted to `dtype`, the type of the module's parameters. Raises `EngineError` while the
    function is traced, for a module that does not return what the specification says."""
    import jax
    import torchax
    from jax import numpy as jnp

    state, forward = torchax.extract_jax(module)

    def function(weights: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        arrays = tuple(array.astype(dtype) if jnp.issubdtype(array.dtype, jnp.floating) else array for array in inputs)
        outputs = jax.tree.leaves(forward(weights, arrays))
        if len(outputs) != len(specification.outputs):
            raise EngineError(
                f"{specification.name}: the module returns {len(outputs)} outputs, not {len(specification.outputs)}"
            )
        return tuple(
            output.astype(jax.dtypes.canonicalize_dtype(tensor.dtype))
            for tensor, output in zip(specification.outputs, outputs, strict=True)
        )

    return state, function


def _with_32_bits(name: str, array: Array) -> Array:
    """The array in a type that JAX computes with. Raises `EngineError` for integers that do not fit."""
    narrow = {"i8": "i4", "u8": "u4", "f8": "f4"}.get(array.dtype.str[1:])
    if narrow is None:
        return array
    if (reason := _beyond_32_bits(name, array)) is not None:
        raise EngineError(f"{reason}; use --engine torch")
    return array.astype(narrow)


def _beyond_32_bits(name: str, array: Array) -> str | None:
    """Why JAX cannot compute with an input's integers; None if it can."""
    narrow = {"i8": "i4", "u8": "u4"}.get(array.dtype.str[1:])
    if narrow is None or not array.size:
        return None
    limits = np.iinfo(narrow)
    if array.min() >= limits.min and array.max() <= limits.max:
        return None
    return f"{name} has values beyond 32 bits, {limits.min} to {limits.max}, which JAX does not compute with"


def _name_of(device: Any) -> str:
    return "cpu" if device.platform == "cpu" else f"cuda:{device.local_hardware_id}"


def _product_precisions(program: str) -> frozenset[str]:
    """The precisions of the products and convolutions in a StableHLO program; XLA's own choice is DEFAULT."""
    products = [
        line for line in program.splitlines() if "stablehlo.dot_general" in line or "stablehlo.convolution" in line
    ]
    return frozenset(
        name for line in products for name in (re.findall(r"\b(DEFAULT|HIGHEST|HIGH)\b", line) or ["DEFAULT"])
    )
