"""A recorder in a process of its own, before a real server; and traffic as one would have recorded it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from loadgen.client.grpc_messages import ModelInferRequest, ModelInferResponse
from loadgen.records.traffic import RecordedRequest, RecordedTensor, RecordedTraffic, TrafficRecording, TrafficWriter


@dataclass
class RecorderProcess:
    """`abserve record`, running; its folder is read at any time."""

    process: subprocess.Popen[Any]
    folder: Path
    ports: list[int] = field(default_factory=list)
    """Where it listens: for HTTP, for gRPC, as far as asked for."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports[0]}"

    def end(self) -> RecordedTraffic:
        """Stop it; what it has recorded."""
        self.process.terminate()
        assert self.process.wait(60) == 0, self.process.stderr and self.process.stderr.read()
        return self.read()

    def read(self) -> RecordedTraffic:
        return RecordedTraffic(self.folder)


@contextmanager
def recorder(
    folder: Path, *options: str, to: str | None = None, grpc_to: str | None = None
) -> Iterator[RecorderProcess]:
    """Before these servers, until the end of the block."""
    given = [("to", "listen", to), ("grpc-to", "grpc-listen", grpc_to)]
    ways = [
        f"--{name}={value}" for way, place, to in given if to for name, value in ((way, to), (place, "127.0.0.1:0"))
    ]
    command = [sys.executable, "-m", "loadgen.entry", "record", "--out", str(folder), *ways, *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    running = RecorderProcess(process, folder)
    try:
        for _, _, place in given:
            if place:
                line = process.stdout.readline()
                assert line, process.stderr and process.stderr.read()
                running.ports.append(int(line.split(" ")[0].rpartition(":")[2]))
        yield running
    finally:
        process.kill()
        process.communicate()


def write_traffic(
    folder: Path, arrivals: Iterable[tuple[float, np.ndarray]], *, grpc: bool = False,
    answer: Callable[[int, np.ndarray], np.ndarray] | None = None,
) -> Path:  # fmt: skip
    """Traffic to the model `recorded`: an input x of FP32 for each moment in seconds, with the output y that `answer`
    gives for its number and the input."""
    writer = TrafficWriter(folder, TrafficRecording(started_at="2026-11-29T00:00:00Z", answers=answer is not None))
    for number, (at_s, array) in enumerate(arrivals):
        data = array.astype("<f4").tobytes()
        tensor = {"name": "x", "datatype": "FP32", "shape": list(array.shape)}
        head = json.dumps({"inputs": [{**tensor, "parameters": {"binary_data_size": len(data)}}],
                           "parameters": {"binary_data_output": True}}).encode()  # fmt: skip
        message = ModelInferRequest(model_name="recorded", model_version="7", raw_input_contents=[data])
        message.inputs.add(**tensor)
        content = message.SerializeToString() if grpc else head + data
        request = RecordedRequest(
            at_ns=int(at_s * 1e9), transport="grpc" if grpc else "http",
            route="/inference.GRPCInferenceService/ModelInfer" if grpc else "/v2/models/recorded/versions/7/infer",
            model="recorded", version="7", tensors=(RecordedTensor(name="x", datatype="FP32", shape=array.shape),),
            content_bytes=len(content), status=0 if grpc else 200,
            headers={} if grpc else {"inference-header-content-length": str(len(head))},
            first_byte_ns=int(at_s * 1e9) + 1, end_ns=int(at_s * 1e9) + 2,
        )  # fmt: skip
        if answer is None:
            writer.add(request, content)
            continue
        output = answer(number, array).astype("<f4")
        shown = {"name": "y", "datatype": "FP32", "shape": list(output.shape)}
        response = ModelInferResponse(raw_output_contents=[output.tobytes()])
        response.outputs.add(**shown)
        text = json.dumps({"outputs": [{**shown, "parameters": {"binary_data_size": output.nbytes}}]}).encode()
        headers = {} if grpc else {"inference-header-content-length": str(len(text))}
        stored = response.SerializeToString() if grpc else text + output.tobytes()
        writer.add(msgspec.structs.replace(request, answer_headers=headers), content, stored)
    writer.flush(ended="written by a test")
    return folder
