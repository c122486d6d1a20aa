"""Inference requests and responses as data, for HTTP, gRPC and shared memory, and their check against a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from servers.protocol.errors import InvalidRequestError
from servers.protocol.tensors import Array, Axis, TensorSpec

Parameter = str | int | float | bool

REGION = "shared_memory_region"
BYTE_SIZE = "shared_memory_byte_size"
OFFSET = "shared_memory_offset"
MAX_REGION_NAME_CHARACTERS = 256


def shown(name: str) -> str:
    """A client's name in a message: escaped, and never longer than a line."""
    return repr(name if len(name) <= 64 else name[:61] + "...")


def shape_text(shape: tuple[int, ...]) -> str:
    """A shape as the protocol's JSON writes it: [1,3,224,224]."""
    return "[" + ",".join(map(str, shape)) + "]"


@dataclass(frozen=True, slots=True)
class RegionReference:
    """A piece of a shared-memory region as a request names it, in bytes from the region's beginning."""

    region: str
    byte_size: int
    offset: int

    def as_parameters(self) -> dict[str, str | int]:
        parameters: dict[str, str | int] = {REGION: self.region, BYTE_SIZE: self.byte_size}
        return {**parameters, OFFSET: self.offset} if self.offset else parameters


class RegionMemory(Protocol):
    """Registered memory that the server reads and writes itself. Every method raises `ContractError`."""

    def check(self) -> None:
        """Raises if the memory is known to be gone."""

    def read(self, offset: int, destination: Array) -> None:
        """Fill `destination`, a contiguous array of bytes."""

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Copy `data` into the region."""


@dataclass(eq=False, slots=True)
class RegionWindow:
    """The piece of a region that one request names. An input is copied from it once, into memory of the server.
    `memory` is None for memory on a GPU: the engine reads and writes it, not who has the window. `allocate` returns
    memory for an input, or raises `ContractError` where the server's limits forbid it."""

    memory: RegionMemory | None
    reference: RegionReference
    allocate: Callable[[int], Array]
    _input: Array | None = None

    @property
    def on_device(self) -> bool:
        """Whether the memory is on a GPU."""
        return self.memory is None

    @property
    def place(self) -> tuple[str, int, int]:
        """Region, offset and size."""
        return self.reference.region, self.reference.offset, self.reference.byte_size

    def view(self) -> memoryview:
        """The memory that `fetch` fills. Raises `ContractError`."""
        return self._host().data

    def fetch(self, start: int = 0, stop: int | None = None) -> None:
        """Copy the region's present bytes, or those between two places, to `view`; blocks. Raises `ContractError` if
        the region is gone."""
        assert self.memory is not None
        self.memory.read(self.reference.offset + start, self._host()[start:stop])

    def write(self, data: bytes | memoryview) -> None:
        """Write an output. Raises `ContractError`, also when the output does not fit."""
        assert self.memory is not None
        if len(data) > self.reference.byte_size:
            raise InvalidRequestError(
                f"the output has {len(data)} bytes, but the request gives it {self.reference.byte_size} bytes"
            )
        self.memory.write(self.reference.offset, data)

    def _host(self) -> Array:
        if self._input is None:
            assert self.memory is not None
            self.memory.check()
            self._input = self.allocate(self.reference.byte_size)
        return self._input


FindWindow = Callable[[RegionReference], RegionWindow]
"""Raises `ContractError` for an unknown region and for a piece outside of it."""


def parse_reference(parameters: Mapping[str, object], owner: str) -> RegionReference | None:
    """The region that the parameters name, or None. Raises `InvalidRequestError`."""
    region = parameters.get(REGION)
    if region is None:
        if BYTE_SIZE in parameters or OFFSET in parameters:
            raise InvalidRequestError(f"{owner} has a shared-memory size or offset, but no '{REGION}'")
        return None
    if not isinstance(region, str) or not 0 < len(region) <= MAX_REGION_NAME_CHARACTERS:
        raise InvalidRequestError(f"'{REGION}' of {owner} must have 1 to {MAX_REGION_NAME_CHARACTERS} characters")
    byte_size, offset = parameters.get(BYTE_SIZE), parameters.get(OFFSET, 0)
    if type(byte_size) is not int or byte_size < 0:
        raise InvalidRequestError(f"'{BYTE_SIZE}' of {owner} must be a whole number ≥ 0")
    if type(offset) is not int or offset < 0:
        raise InvalidRequestError(f"'{OFFSET}' of {owner} must be a whole number ≥ 0")
    return RegionReference(region, byte_size, offset)


@dataclass(frozen=True, slots=True)
class InputTensor:
    """One input as it arrived.

    `data` has exactly `shape` and the dtype of `datatype` (an object array of `bytes` for BYTES). It may be a read-only
    or unaligned view over the receive buffer, so its holder keeps that buffer alive. With a `window` its bytes are in
    shared memory: call the window's `fetch` before reading it, and `read_elements` for BYTES.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: Array
    window: RegionWindow | None = None


@dataclass(frozen=True, slots=True)
class RequestedOutput:
    """One requested output: as JSON, as bytes (`binary`) or in shared memory (`window`)."""

    name: str
    binary: bool
    window: RegionWindow | None = None


@dataclass(frozen=True, slots=True)
class InferRequest:
    """A well-formed request, not yet checked against a model. `outputs` is None when the client named none: it then
    gets all of them, as bytes if `binary_output`."""

    id: str
    inputs: tuple[InputTensor, ...]
    outputs: tuple[RequestedOutput, ...] | None = None
    binary_output: bool = False
    parameters: Mapping[str, Parameter] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """One output of a response. With a `reference` its bytes are in shared memory, and the response only says where."""

    name: str
    datatype: str
    data: Array
    binary: bool
    reference: RegionReference | None = None


@dataclass(frozen=True, slots=True)
class InferResponse:
    """A response; `id` is the request's, empty when it had none."""

    model_name: str
    model_version: str
    id: str
    outputs: tuple[OutputTensor, ...]


@dataclass(frozen=True, slots=True)
class ModelSignature:
    """The part of a model that a request is checked against."""

    name: str
    version: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch_size: int
    """0: the model has no batch dimension, and a request is one item."""
    axes: tuple[Axis, ...] = ()
    id_counts: Mapping[str, int] = field(default_factory=dict)
    """By input of ids, such as token ids, how many ids the model knows: 0 to one less."""

    def validate(self, request: InferRequest) -> tuple[int, Mapping[str, Array]]:
        """The number of items and the inputs by name. Raises `InvalidRequestError` at the first contradiction."""
        specs = {spec.name: spec for spec in self.inputs}
        arrays: dict[str, Array] = {}
        rows = None if self.max_batch_size else 1
        for tensor in request.inputs:
            spec = specs.get(tensor.name)
            if spec is None:
                raise InvalidRequestError(
                    f"unexpected inference input {shown(tensor.name)} for model '{self.name}', "
                    f"expected {', '.join(map(repr, specs))}"
                )
            if tensor.name in arrays:
                raise InvalidRequestError(f"input '{tensor.name}' is given more than once")
            if tensor.datatype != spec.datatype:
                raise InvalidRequestError(
                    f"inference input '{tensor.name}' data-type is '{tensor.datatype}', "
                    f"but model '{self.name}' expects '{spec.datatype}'"
                )
            self._check_shape(spec, tensor.shape)
            if self.max_batch_size:
                if rows not in (None, tensor.shape[0]):
                    raise InvalidRequestError(f"inputs have different batch sizes, {rows} and {tensor.shape[0]}")
                rows = tensor.shape[0]
            arrays[tensor.name] = tensor.data
        required = [name for name, spec in specs.items() if not spec.optional]
        missing = [name for name in required if name not in arrays]
        if missing or rows is None:
            least = "" if len(required) == len(specs) else f"{len(required)} to "
            raise InvalidRequestError(
                f"expected {least}{len(specs)} inputs but got {len(arrays)} inputs for model '{self.name}', "
                f"missing {', '.join(map(repr, missing))}"
            )
        self.check_sizes({name: array.shape for name, array in arrays.items()})
        self._check_outputs([output.name for output in request.outputs or ()])
        return rows, arrays

    def check_sizes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raises `InvalidRequestError` for sizes beyond an axis or unequal on it, and for 0 where items are padded: all
        places would be padding. Elsewhere 0 is for the model to judge, as for Triton."""
        for axis in self.axes:
            sizes = {name: shapes[name][place] for name, place in axis.places.items() if name in shapes}
            if len(set(sizes.values())) > 1:
                listed = ", ".join(f"'{name}' {size}" for name, size in sizes.items())
                raise InvalidRequestError(f"inputs of model '{self.name}' differ in their {axis.name} size: {listed}")
            if axis.padded and 0 in sizes.values():
                name = next(iter(sizes))
                raise InvalidRequestError(
                    f"input '{name}' of model '{self.name}' has no elements: {shape_text(shapes[name])}"
                )
            if sizes and max(sizes.values()) > axis.largest:
                raise InvalidRequestError(
                    f"the {axis.name} size of model '{self.name}' is at most {axis.largest}, got {max(sizes.values())}"
                )

    def check_values(self, arrays: Mapping[str, Array]) -> None:
        """Raises `InvalidRequestError` for an id that the model does not know: on a GPU it would end the process."""
        for name, count in self.id_counts.items():
            ids: Any = arrays.get(name)
            if ids is not None and (wrong := ids[(ids < 0) | (ids >= count)]).size:
                raise InvalidRequestError(
                    f"input '{name}' of model '{self.name}' holds {wrong[0]}, its ids are 0 to {count - 1}"
                )

    def _check_shape(self, spec: TensorSpec, shape: tuple[int, ...]) -> None:
        if len(shape) != len(spec.shape) or any(
            expected not in (-1, got) for expected, got in zip(spec.shape, shape, strict=True)
        ):
            raise InvalidRequestError(
                f"unexpected shape for input '{spec.name}' for model '{self.name}', "
                f"expected {shape_text(spec.shape)}, got {shape_text(shape)}"
            )
        if self.max_batch_size and not 1 <= shape[0] <= self.max_batch_size:
            raise InvalidRequestError(
                f"inference request batch-size must be between 1 and {self.max_batch_size} for '{self.name}', "
                f"got {shape[0]}"
            )

    def _check_outputs(self, names: list[str]) -> None:
        available = [spec.name for spec in self.outputs]
        for name in names:
            if name not in available:
                raise InvalidRequestError(
                    f"unexpected inference output {shown(name)} for model '{self.name}', "
                    f"expected {', '.join(map(repr, sorted(available)))}"
                )
        if len(set(names)) < len(names):
            raise InvalidRequestError("an output is requested more than once")
