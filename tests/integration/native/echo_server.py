"""A native server that answers an input of each datatype with itself: `echo_server.py PORT [--option value …]`.

Its model `echo` has inputs in_DATATYPE and outputs out_DATATYPE of any width up to 64, which cannot be padded with
`--pad-to none`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from servers.engines.null import NullEngine
from servers.engines.settings import EngineSettings
from servers.models.specification import ModelSpecification
from servers.native.server import configure_logs, serve
from servers.native.shared.settings import NativeSettings
from servers.options.command_line import from_argument
from servers.options.launch import bind
from servers.protocol.tensors import DATATYPES, Array, Axis, TensorSpec

NAMES = (*DATATYPES, "BYTES")
INPUTS, OUTPUTS = (tuple(TensorSpec(f"{end}_{name}", name, (-1, -1)) for name in NAMES) for end in ("in", "out"))
SPECIFICATION = ModelSpecification(
    name="echo",
    title="echo",
    version="1",
    inputs=INPUTS,
    outputs=OUTPUTS,
    max_batch_size=32,
    load_module=lambda _weights: None,  # type: ignore[arg-type,return-value]
    axes=(
        Axis(
            *("width", 4, 64, {tensor.name: 1 for tensor in (*INPUTS, *OUTPUTS)}),
            padding={} if '"none"' in sys.argv[-1] else {tensor.name: 0 for tensor in INPUTS},
        ),
    ),
)


class Echo(NullEngine):
    """Copies, since the caller owns the answer."""

    def infer(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        return {f"out_{name}": inputs[f"in_{name}"].copy() for name in NAMES}


def main() -> int:
    settings = from_argument(NativeSettings, sys.argv[2:])
    configure_logs(settings.log_level)

    def build(_settings: EngineSettings) -> Echo:
        return Echo(SPECIFICATION, EngineSettings("null", max_batch_size=settings.max_batch_size))

    grpc = bind("127.0.0.1", settings.grpc_port) if settings.grpc_port else None
    return serve(settings, [(SPECIFICATION, build)], bind("127.0.0.1", settings.http_port), grpc)


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)
