"""From a batch's rows to the answer of one request: what it asked for, in shared memory where it asked for that."""

from __future__ import annotations

from collections.abc import Mapping

from servers.contract.codec import write_output
from servers.contract.records import InferRequest, InferResponse, OutputTensor, RequestedOutput
from servers.contract.signature import ModelSignature
from servers.contract.tensors import Array


def response_of(signature: ModelSignature, request: InferRequest, outputs: Mapping[str, Array]) -> InferResponse:
    """The answer, when its outputs in shared memory are written; blocks if it `writes_to_device`.

    Raises `ContractError`.
    """
    datatypes = {spec.name: spec.datatype for spec in signature.outputs}
    wanted = (
        [RequestedOutput(name, request.binary_output) for name in datatypes]
        if request.outputs is None
        else request.outputs
    )
    return InferResponse(
        signature.name,
        signature.version,
        request.id,
        tuple(_output(output, datatypes[output.name], outputs[output.name]) for output in wanted),
    )


def writes_to_device(request: InferRequest) -> bool:
    """Whether an output goes to a GPU's memory, which is no work for the event loop."""
    return any(wanted.window is not None and wanted.window.on_device for wanted in request.outputs or ())


def _output(wanted: RequestedOutput, datatype: str, data: Array) -> OutputTensor:
    reference = None if wanted.window is None else write_output(wanted.window, data)
    return OutputTensor(wanted.name, datatype, data, wanted.binary, reference)
