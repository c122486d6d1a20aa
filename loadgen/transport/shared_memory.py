"""The shared-memory client of the measured path: tensors in memory that the server maps, a short HTTP request beside.

Each user has two POSIX shared-memory objects of its own, one for inputs and one for outputs, as large as its largest
request. They are registered before anything is measured. What the kernel copies when bytes are sent over a socket is
here the copy of the tensors into the input object: it is part of the request's time.

A name in /dev/shm lives only until the server has mapped it, some milliseconds; then it is unlinked, so that not even
a killed process leaves memory behind. What a process killed in those milliseconds leaves, `sweep` removes.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from time import perf_counter_ns

import msgspec
import numpy as np
import numpy.typing as npt
import tritonclient.http as triton_http

from loadgen.documents import DocumentError, one_line
from loadgen.transport.exchange import ConnectionRefused, Exchange
from loadgen.transport.http import HttpConnection
from loadgen.transport.outputs import byte_size, read_document, read_tensor
from loadgen.transport.requests import Address, Request, request_head

FOLDER = Path("/dev/shm")
_ALIGNMENT = 64
_UNREGISTER_SECONDS = 2.0
_numbers = count()


@dataclass(frozen=True, slots=True)
class RawTensor:
    """An input as bytes, in the protocol's binary form."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes
    places: tuple[int, ...] = ()
    """Where the bytes that vary begin."""


@dataclass(frozen=True, slots=True)
class OutputRoom:
    """How many bytes an output takes."""

    name: str
    byte_size: int


@dataclass(frozen=True, slots=True, eq=False)
class SharedMemoryRequest:
    """One request's tensors; the same object is sent by every user, each through its own memory."""

    inputs: tuple[RawTensor, ...]
    outputs: tuple[OutputRoom, ...]

    @property
    def payload_bytes(self) -> int:
        """Bytes of tensors, which do not go over the wire."""
        return sum(len(tensor.data) for tensor in self.inputs)

    @property
    def input_room(self) -> int:
        """Bytes that its inputs take in a region."""
        return sum(_aligned(len(tensor.data)) for tensor in self.inputs)

    @property
    def output_room(self) -> int:
        """Bytes that its outputs take in a region."""
        return sum(_aligned(room.byte_size) for room in self.outputs)


def prefix(process_id: int) -> str:
    """What the names of a process's objects begin with."""
    return f"abserve-load-{process_id}-"


def sweep(process_id: int) -> list[str]:
    """Unlink what a process that has ended left in /dev/shm; the names."""
    left = sorted(path.name for path in FOLDER.glob(f"{prefix(process_id)}*"))
    for name in left:
        (FOLDER / name).unlink(missing_ok=True)
    return left


class Region:
    """One object, mapped here. Its name and the server's name for it are the same."""

    def __init__(self, kind: str, byte_size: int) -> None:
        """Raises `ConnectionRefused` when there is no room for it."""
        self.name = f"{prefix(os.getpid())}{next(_numbers)}-{kind}"
        self.byte_size = max(byte_size, _ALIGNMENT)
        self._linked = False
        try:
            descriptor = os.open(FOLDER / self.name, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
            self._linked = True
            try:
                # Writing to memory that /dev/shm has no room for would be a SIGBUS later.
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
        """Take the name away; mappings stay. Idempotent."""
        if self._linked:
            self._linked = False
            with suppress(OSError):
                (FOLDER / self.name).unlink()

    def close(self) -> None:
        """Idempotent."""
        self.unlink()
        self.memory.close()


KeptOutputs = tuple[SharedMemoryRequest, bytes]
"""A request and the memory of its outputs."""
_Written = tuple[Request, tuple[tuple[int, int, bytes], ...], tuple[int, ...]]
"""A request in a user's own memory: what is sent, what is copied to where, and where it varies."""


class SharedMemoryConnection:
    """One user's HTTP connection and memory, for the requests that it is told of beforehand."""

    def __init__(
        self, address: Address, model: str, requests: tuple[SharedMemoryRequest, ...], *, timeout_s: float = 60.0
    ) -> None:
        self._address = address
        self._model = model
        self._known = tuple(dict.fromkeys(requests))
        self._http = HttpConnection(address, timeout_s=timeout_s)
        self._regions: tuple[Region, Region] | None = None
        self._sent: SharedMemoryRequest | None = None
        self._prepared: dict[SharedMemoryRequest, _Written] = {}

    @property
    def reconnects(self) -> int:
        """As of the HTTP connection."""
        return self._http.reconnects

    def connect(self) -> None:
        """Connect, make the memory and register it. Raises `ConnectionRefused`."""
        self._http.connect()
        if self._regions is not None:
            return
        inputs = Region("in", max((request.input_room for request in self._known), default=0))
        try:
            outputs = Region("out", max((request.output_room for request in self._known), default=0))
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
        self._prepared = {request: self._prepare(request, inputs, outputs) for request in self._known}

    def send(self, request: SharedMemoryRequest, patches: Sequence[bytes] = ()) -> Exchange:
        """Copy the tensors into the memory, and the patches where they vary, then send the request that refers to it;
        the time begins before the copy."""
        if self._regions is None:
            self.connect()
        assert self._regions is not None
        memory = self._regions[0].memory
        self._sent = request
        http_request, pieces, places = self._prepared[request]
        send_ns = perf_counter_ns()
        for start, end, data in pieces:
            memory[start:end] = data
        for place, patch in zip(places, patches, strict=False):
            memory[place : place + len(patch)] = patch
        exchange = self._http.send(http_request)
        exchange.send_ns = send_ns
        return exchange

    def keep_outputs(self) -> KeptOutputs:
        """The outputs' memory as the last answer has left it."""
        assert self._regions is not None
        assert self._sent is not None
        return self._sent, self._regions[1].memory[: self._sent.output_room]

    def read_outputs(self, exchange: Exchange, kept: KeptOutputs | None = None) -> dict[str, npt.NDArray[np.generic]]:
        """Copies of the outputs of the last, good answer, or of one that was kept. Its JSON says what they are; where
        they lie, the request said. Raises `ValueError`, `KeyError` or `TypeError` for an answer that is not like
        that."""
        request, memory = self.keep_outputs() if kept is None else kept
        starts, start = {}, 0
        for room in request.outputs:
            starts[room.name] = (start, room.byte_size)
            start += _aligned(room.byte_size)
        found = {}
        for output in read_document(exchange.body):
            start, size = starts.get(output.name, (0, -1))
            used = byte_size(output.datatype, output.shape)
            if used is None or used > size or output.data is not None:
                raise DocumentError(f"the output {one_line(output.name)} is not in the memory that it was given")
            found[output.name] = read_tensor(output, memoryview(memory[start : start + used]))
        return found

    def close(self) -> None:
        """Unregister, unmap, unlink, close. Idempotent."""
        regions, self._regions = self._regions, None
        self._prepared = {}
        if regions is not None:
            # On a connection of its own: the user's may be in the middle of an answer.
            farewell = HttpConnection(self._address, timeout_s=_UNREGISTER_SECONDS)
            with suppress(ConnectionRefused):
                for region in regions:
                    farewell.send(self._post(region, "unregister", b""))
            farewell.close()
            for region in regions:
                region.close()
        self._http.close()

    def _register(self, region: Region) -> None:
        document = {"key": f"/{region.name}", "offset": 0, "byte_size": region.byte_size}
        exchange = self._http.send(self._post(region, "register", msgspec.json.encode(document)))
        if exchange.status != 200:
            words = exchange.failure or one_line(bytes(exchange.body).decode("utf-8", "replace"))
            raise ConnectionRefused(
                f"{self._address.url} registers no shared memory ({exchange.status}: {words}); a native server needs "
                "--allow-shared-memory, and the load generator must run on the server's machine"
            )

    def _post(self, region: Region, verb: str, body: bytes) -> Request:
        path = f"/v2/systemsharedmemory/region/{region.name}/{verb}"
        headers = {"Content-Type": "application/json"}
        return Request(request_head("POST", path, self._address, content_length=len(body), headers=headers), body)

    def _prepare(self, request: SharedMemoryRequest, inputs: Region, outputs: Region) -> _Written:
        tensors, pieces, places, start = [], [], [], 0
        for raw in request.inputs:
            tensor = triton_http.InferInput(raw.name, list(raw.shape), raw.datatype)
            tensor.set_shared_memory(inputs.name, len(raw.data), offset=start)
            tensors.append(tensor)
            pieces.append((start, start + len(raw.data), raw.data))
            places += [start + place for place in raw.places]
            start += _aligned(len(raw.data))
        wanted, start = [], 0
        for room in request.outputs:
            output = triton_http.InferRequestedOutput(room.name)
            output.set_shared_memory(outputs.name, room.byte_size, offset=start)
            wanted.append(output)
            start += _aligned(room.byte_size)
        body, _ = triton_http.InferenceServerClient.generate_request_body(tensors, outputs=wanted)
        body = body.encode() if isinstance(body, str) else bytes(body)
        head = request_head(
            "POST", f"/v2/models/{self._model}/infer", self._address, content_length=len(body),
            headers={"Content-Type": "application/json"},
        )  # fmt: skip
        return Request(head, body, request.payload_bytes), tuple(pieces), tuple(places)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
