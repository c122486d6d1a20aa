"""Commands for a shell that send one request to a served model: what `abserve serve` prints and `/` answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import prod
from shlex import quote
from urllib.parse import quote as in_url

from servers.protocol.tensors import TensorSpec

MOST_INLINE = 64
"""Most values that a command holds; more are made by Python."""
_SIZE = 8
"""Of a dimension of variable size."""


def in_path(name: str) -> str:
    """A model's name as one segment of a URL's path, whatever characters it holds."""
    return in_url(name, safe="!$&'()*+,;=:@")


def infer_commands(url: str, name: str, inputs: Sequence[TensorSpec], *, takes_json: bool = True) -> tuple[str, ...]:
    """A request of zeros as bytes and, where the server and the datatypes allow it, as JSON; of a single input of
    BYTES, such as JPEG, with the user's file."""
    send = f"curl -sS {quote(f'{url}/v2/models/{in_path(name)}/infer')}"
    inputs = [spec for spec in inputs if not spec.optional]
    if [spec.datatype for spec in inputs] == ["BYTES"]:
        return (f"{send} -H 'Inference-Header-Content-Length: 0' --data-binary @FILE",)
    if any(spec.datatype == "BYTES" for spec in inputs):
        return ()
    shapes = [[_SIZE if size < 0 else size for size in spec.shape] for spec in inputs]
    for spec, shape in zip(inputs, shapes, strict=True):
        shape[:1] = [1] if spec.shape[:1] == (-1,) else shape[:1]
    tensors = [
        {"name": spec.name, "shape": shape, "datatype": spec.datatype}
        for spec, shape in zip(inputs, shapes, strict=True)
    ]
    counts = [prod(shape) for shape in shapes]
    sizes = [spec.dtype.itemsize * count for spec, count in zip(inputs, counts, strict=True)]
    sized = [{**tensor, "parameters": {"binary_data_size": size}} for tensor, size in zip(tensors, sizes, strict=True)]
    header = json.dumps({"inputs": sized, "parameters": {"binary_data_output": True}}, separators=(",", ":"))
    as_bytes = (
        f"(printf %s {quote(header)}; head -c {sum(sizes)} /dev/zero) | {send} "
        f"-H 'Inference-Header-Content-Length: {len(header)}' --data-binary @- -o answer.bin"
    )
    if not takes_json or any(spec.datatype == "FP16" for spec in inputs):
        return (as_bytes,)
    zeros = [{"FP": 0.0, "BO": False}.get(spec.datatype[:2], 0) for spec in inputs]
    if sum(counts) <= MOST_INLINE:
        filled = [{**t, "data": [zero] * count} for t, zero, count in zip(tensors, zeros, counts, strict=True)]
        return as_bytes, f"{send} -d {quote(json.dumps({'inputs': filled}))}"
    made = ", ".join(
        f"{{**{tensor!r}, 'data': [{zero}] * {count}}}"
        for tensor, zero, count in zip(tensors, zeros, counts, strict=True)
    )
    python = quote(f"import json; print(json.dumps({{'inputs': [{made}]}}))")
    return as_bytes, f"python3 -c {python} | {send} -d @-"


def completion_commands(url: str, name: str) -> tuple[str, ...]:
    """A streamed answer of a language model over OpenAI's completions."""
    body = json.dumps({"model": name, "prompt": [5, 17], "max_tokens": 8, "stream": True})
    return (f"curl -sSN {quote(f'{url}/v1/completions')} -H 'Content-Type: application/json' -d {quote(body)}",)


def generate_commands(url: str, name: str) -> tuple[str, ...]:
    """A streamed answer of a language model over Triton's generate extension."""
    body = json.dumps({"input_ids": [5, 17], "max_tokens": 8})
    return (f"curl -sSN {quote(f'{url}/v2/models/{in_path(name)}/generate_stream')} -d {quote(body)}",)
