"""An inference request and its answer as data, the same for every door and every way a tensor can arrive."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from servers.contract.shared_memory import RegionReference, RegionWindow
from servers.contract.tensors import Array

Parameter = str | int | float | bool


@dataclass(frozen=True, slots=True)
class InputTensor:
    """One input as it came.

    `data` has exactly `shape` and the dtype that `datatype` names (an object array of `bytes` for BYTES). It may be
    a read-only or unaligned view over the receive buffer, so whoever holds it keeps that buffer alive. With a `window`
    it is to come from shared memory: reading it needs the window's `fetch` before, and for BYTES `read_elements`.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: Array
    window: RegionWindow | None = None


@dataclass(frozen=True, slots=True)
class RequestedOutput:
    """One output that the client named, and whether it wants it as bytes rather than JSON, or in shared memory."""

    name: str
    binary: bool
    window: RegionWindow | None = None


@dataclass(frozen=True, slots=True)
class InferRequest:
    """A request that is well-formed; whether it fits a model is for `ModelSignature.validate` to say.

    `outputs` is None when the client named none: it then gets all of them, as bytes if `binary_output`.
    """

    id: str
    inputs: tuple[InputTensor, ...]
    outputs: tuple[RequestedOutput, ...] | None = None
    binary_output: bool = False
    parameters: Mapping[str, Parameter] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """One output of an answer; `binary` says how it is to travel over HTTP.

    With a `reference` it lies in shared memory already, and the answer only says where.
    """

    name: str
    datatype: str
    data: Array
    binary: bool
    reference: RegionReference | None = None


@dataclass(frozen=True, slots=True)
class InferResponse:
    """An answer; `id` is the request's own and empty when it gave none."""

    model_name: str
    model_version: str
    id: str
    outputs: tuple[OutputTensor, ...]
