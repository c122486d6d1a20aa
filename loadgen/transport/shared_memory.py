"""The shared-memory client for measured requests: tensors in memory that the server maps, and a short HTTP request.

Each user has two POSIX shared-memory objects, one for inputs and one for outputs, as large as its largest request.
They are registered before any measurement. The copy of the tensors into the input object replaces the kernel's copy
into a socket, so it counts as a part of the request's time.

A name in /dev/shm exists only until the server has mapped it, some milliseconds; then it is unlinked, so that even a
killed process leaves no memory behind. `sweep` removes the names that a process killed in those milliseconds leaves.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, count
from pathlib import Path
from time import perf_counter_ns

import msgspec
import tritonclient.http as triton_http

from loadgen.documents import DocumentError, one_line
from loadgen.transport.bodies import RawTensor
from loadgen.transport.exchange import ConnectionRefused, Exchange
from loadgen.transport.http import HttpConnection
from loadgen.transport.inputs import Array
from loadgen.transport.outputs import byte_size, elements_end, read_document, read_tensor
from loadgen.transport.requests import Address, Request, request_head

FOLDER = Path("/dev/shm")
_ALIGNMENT = 64
_UNREGISTER_SECONDS = 2.0
_numbers = count()


@dataclass(frozen=True, slots=True, eq=False)
class SharedMemoryRequest:
    """The tensors of one request; every user sends the same object, each through its own memory."""

    inputs: tuple[RawTensor, ...]
    output_bytes: Mapping[str, int]
    """Output → the size of its place in the memory."""

    @property
    def payload_bytes(self) -> int:
        """Bytes of tensors, which are not sent over the wire."""
        return sum(len(tensor.data) for tensor in self.inputs)

    def input_starts(self) -> list[int]:
        """Where each input begins in the memory, and where the last one ends."""
        return _starts(len(tensor.data) for tensor in self.inputs)

    def output_starts(self) -> list[int]:
        """Where each output begins in the memory, and where the last one ends."""
        return _starts(self.output_bytes.values())


def prefix(process_id: int) -> str:
    """The beginning of the names of a process's objects."""
    return f"abserve-load-{process_id}-"


def sweep(process_id: int) -> list[str]:
    """Unlink the objects that an ended process left in /dev/shm; their names."""
    left = sorted(path.name for path in FOLDER.glob(f"{prefix(process_id)}*"))
    for name in left:
        (FOLDER / name).unlink(missing_ok=True)
    return left


class Region:
    """One object, mapped here. The server knows it under the same name."""

    def __init__(self, kind: str, byte_size: int) -> None:
        """Raises `ConnectionRefused` when there is no room for it."""
        self.name = f"{prefix(os.getpid())}{next(_numbers)}-{kind}"
        self.byte_size = max(byte_size, _ALIGNMENT)
        self._linked = False
        try:
            descriptor = os.open(FOLDER / self.name, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
            self._linked = True
            try:
                # Without this, a write to memory for which /dev/shm has no room would be a SIGBUS.
                os.posix_fallocate(descriptor, 0, self.byte_size)
                self.memory = mmap.mmap(descriptor, self.byte_size)
            finally:
                os.close(descriptor)
        except OSError as exc:
            self.unlink()
            raise ConnectionRefused(
                f"no {self.byte_size:,} bytes of shared memory in {FOLDER}: {exc.strerror or exc}; enlarge it "
                "(docker: --shm-size) or lower the concurrency"
            ) from None

    def unlink(self) -> None:
        """Remove the name; mappings stay. Idempotent."""
        if self._linked:
            self._linked = False
            with suppress(OSError):
                (FOLDER / self.name).unlink()

    def close(self) -> None:
        """Unlink and unmap it. Idempotent."""
        self.unlink()
        self.memory.close()


KeptOutputs = tuple[SharedMemoryRequest, bytes]
"""A request and a copy of its outputs' memory."""
_Prepared = tuple[Request, tuple[tuple[int, int, bytes], ...], tuple[int, ...]]
"""A request for one user's memory: the HTTP request, (start, end, bytes) to copy, and the places that vary."""


class SharedMemoryConnection:
    """One user's HTTP connection and memory, for requests that are given in advance."""

    def __init__(
        self, address: Address, model: str, requests: tuple[SharedMemoryRequest, ...], *, timeout_s: float = 60.0
    ) -> None:
        self._address = address
        self._model = model
        self._requests = tuple(dict.fromkeys(requests))
        self._http = HttpConnection(address, timeout_s=timeout_s)
        self._regions: tuple[Region, Region] | None = None
        self._sent: SharedMemoryRequest | None = None
        self._prepared: dict[SharedMemoryRequest, _Prepared] = {}

    @property
    def reconnects(self) -> int:
        """Reconnects of the HTTP connection."""
        return self._http.reconnects

    def connect(self) -> None:
        """Connect, allocate the memory and register it. Raises `ConnectionRefused`."""
        self._http.connect()
        if self._regions is not None:
            return
        inputs = Region("in", max((request.input_starts()[-1] for request in self._requests), default=0))
        try:
            outputs = Region("out", max((request.output_starts()[-1] for request in self._requests), default=0))
        except ConnectionRefused:
            inputs.close()
            raise
        self._regions = (inputs, outputs)
        try:
            for region in self._regions:
                self._register(region)
        except ConnectionRefused:
            self.close()
            raise
        finally:
            inputs.unlink()
            outputs.unlink()
        self._prepared = {request: self._prepare(request, inputs.name, outputs.name) for request in self._requests}

    def send(self, request: SharedMemoryRequest, patches: Sequence[bytes] = ()) -> Exchange:
        """Copy the tensors into the memory, and the patches to the places that vary, then send the HTTP request. The
        request's time begins before the copy."""
        if self._regions is None:
            self.connect()
        assert self._regions is not None
        memory = self._regions[0].memory
        self._sent = request
        http_request, copies, places = self._prepared[request]
        send_ns = perf_counter_ns()
        for start, end, data in copies:
            memory[start:end] = data
        for place, patch in zip(places, patches, strict=False):
            memory[place : place + len(patch)] = patch
        exchange = self._http.send(http_request)
        exchange.send_ns = send_ns
        return exchange

    def keep_outputs(self) -> KeptOutputs:
        """A copy of the outputs' memory after the last response."""
        assert self._regions is not None
        assert self._sent is not None
        return self._sent, self._regions[1].memory[: self._sent.output_starts()[-1]]

    def read_outputs(self, exchange: Exchange, kept: KeptOutputs | None = None) -> dict[str, Array]:
        """Copies of the outputs of the last, good response, or of one that was kept. The response describes them, the
        request determined their places. Raises `DocumentError`."""
        request, memory = self.keep_outputs() if kept is None else kept
        starts = dict(zip(request.output_bytes, request.output_starts(), strict=False))
        found = {}
        for output in read_document(exchange.body):
            place = request.output_bytes.get(output.name, -1)
            start = starts.get(output.name, 0)
            used = byte_size(output.datatype, output.shape)
            if output.datatype == "BYTES":
                used = elements_end(memoryview(memory[start : start + max(place, 0)]), math.prod(output.shape))
            if used is None or used > place or output.data is not None:
                raise DocumentError(f"output {one_line(output.name)} is not in the shared memory")
            found[output.name] = read_tensor(output, memoryview(memory[start : start + used]))
        return found

    def close(self) -> None:
        """Unregister, unmap, unlink, close. Idempotent."""
        regions, self._regions = self._regions, None
        self._prepared = {}
        if regions is not None:
            # On a new connection, because the user's may be in the middle of a response.
            connection = HttpConnection(self._address, timeout_s=_UNREGISTER_SECONDS)
            with suppress(ConnectionRefused):
                for region in regions:
                    connection.send(self._post(f"/v2/systemsharedmemory/region/{region.name}/unregister", b""))
            connection.close()
            for region in regions:
                region.close()
        self._http.close()

    def _register(self, region: Region) -> None:
        document = {"key": f"/{region.name}", "offset": 0, "byte_size": region.byte_size}
        path = f"/v2/systemsharedmemory/region/{region.name}/register"
        exchange = self._http.send(self._post(path, msgspec.json.encode(document)))
        if exchange.status != 200:
            words = exchange.failure or one_line(bytes(exchange.body).decode("utf-8", "replace"))
            raise ConnectionRefused(
                f"{self._address.url} cannot register shared memory ({exchange.status}: {words}); start the native "
                "server with --allow-shared-memory, and run the load generator on the server's machine"
            )

    def _post(self, path: str, body: bytes, payload_bytes: int = 0) -> Request:
        headers = {"Content-Type": "application/json"}
        head = request_head("POST", path, self._address, content_length=len(body), headers=headers)
        return Request(head, body, payload_bytes)

    def _prepare(self, request: SharedMemoryRequest, input_region: str, output_region: str) -> _Prepared:
        tensors, copies, places = [], [], []
        for raw, start in zip(request.inputs, request.input_starts(), strict=False):
            tensor = triton_http.InferInput(raw.name, list(raw.shape), raw.datatype)
            tensor.set_shared_memory(input_region, len(raw.data), offset=start)
            tensors.append(tensor)
            copies.append((start, start + len(raw.data), raw.data))
            places += [start + place for place in raw.places]
        outputs = []
        for (name, size), start in zip(request.output_bytes.items(), request.output_starts(), strict=False):
            output = triton_http.InferRequestedOutput(name)
            output.set_shared_memory(output_region, size, offset=start)
            outputs.append(output)
        body, _ = triton_http.InferenceServerClient.generate_request_body(tensors, outputs=outputs)
        body = body.encode() if isinstance(body, str) else bytes(body)
        path = f"{self._address.model_path(self._model)}/infer"
        return self._post(path, body, request.payload_bytes), tuple(copies), tuple(places)


def _starts(sizes: Iterable[int]) -> list[int]:
    return list(accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0))
