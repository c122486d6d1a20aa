"""Sends measured requests through shared memory: tensors in memory that the server maps, and a short HTTP request.

Every request is written into POSIX shared memory once, before the measurement, into a slot with room for its answer
(`SlotPool`). A measured request names the places of a slot; only the few bytes that make its inputs new are written
(`loadgen.client.bodies`).

A name in /dev/shm exists only until the server has mapped it, some milliseconds; then it is unlinked, so that even a
killed process leaves no memory behind. `sweep` removes the names that a process killed in those milliseconds leaves.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate, count
from pathlib import Path
from threading import Lock
from time import perf_counter_ns

import msgspec

from loadgen.base.documents import DocumentError, one_line
from loadgen.client.bodies import RawTensor, request_json
from loadgen.client.connection import Address, ConnectionRefused, Exchange, PreparedRequest
from loadgen.client.http import HttpConnection, request_head
from loadgen.client.inputs import Array, elements_end
from loadgen.client.outputs import byte_size, read_document, read_tensor

FOLDER = Path("/dev/shm")
_ALIGNMENT = 64
_UNREGISTER_SECONDS = 2.0
_REGIONS = "/v2/systemsharedmemory/region"
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


@contextmanager
def named_memory(byte_size: int) -> Iterator[tuple[str, mmap.mmap]]:
    """A new POSIX shared-memory object, mapped here, and its name, under which a server can map it too. At the end the
    name is removed; mappings stay. Raises `ConnectionRefused` when there is no room for it."""
    name = f"{prefix(os.getpid())}{next(_numbers)}"
    try:
        try:
            descriptor = os.open(FOLDER / name, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                # Without this, a write to memory for which /dev/shm has no room would be a SIGBUS.
                os.posix_fallocate(descriptor, 0, byte_size)
                memory = mmap.mmap(descriptor, byte_size)
            finally:
                os.close(descriptor)
        except OSError as exc:
            raise ConnectionRefused(
                f"no {byte_size:,} bytes of shared memory in {FOLDER}: {exc.strerror or exc}; enlarge it "
                "(docker: --shm-size) or lower the concurrency"
            ) from None
        yield name, memory
    finally:
        (FOLDER / name).unlink(missing_ok=True)


CopiedOutputs = tuple[SharedMemoryRequest, bytes]
"""A request and a copy of its outputs' memory."""


@dataclass(slots=True, eq=False)
class RequestSlot:
    """The memory of a request and its answer in a region that the server knows by its name."""

    region: str
    memory: mmap.mmap
    start: int
    holds: SharedMemoryRequest | None = None
    """The request whose inputs it contains."""
    sent: PreparedRequest | None = None
    """The HTTP request for it."""
    places: tuple[int, ...] = ()
    """Where its inputs vary, in the region's memory."""
    outputs_start: int = 0

    def outputs(self) -> bytes:
        """A copy of the outputs' memory."""
        assert self.holds is not None
        return self.memory[self.outputs_start : self.outputs_start + self.holds.output_starts()[-1]]


class SlotPool:
    """The memory of all users that send the same requests: every request is written once, before the measurement.

    There is a slot for each request and one more for each user. A user takes a free slot that holds its request; only
    when others use all of them at that moment, the request is written into another slot. The regions are registered
    when the users connect and given back when the last one leaves.
    """

    def __init__(self, address: Address, model: str, requests: Iterable[SharedMemoryRequest]) -> None:
        self.address = address
        self._model = model
        self._requests = tuple(dict.fromkeys(requests))
        sizes = [request.input_starts()[-1] + request.output_starts()[-1] for request in self._requests]
        self._slot_bytes = max(sizes, default=0)
        self._regions: dict[str, mmap.mmap] = {}
        self._slots = self._users = 0
        self._free: dict[SharedMemoryRequest | None, list[RequestSlot]] = {}
        """The slots that no user has, by the request that they hold."""
        self._lock = Lock()
        self.writes = 0
        """How often a request was written into a slot so far."""

    def join(self, connection: HttpConnection) -> None:
        """Make room for one more user, which has to `leave` also after a failure. Raises `ConnectionRefused`."""
        with self._lock:  # the others wait until the requests are written
            self._users += 1
            if not self._regions:
                for slot, request in zip(self._add_slots(connection, len(self._requests)), self._requests, strict=True):
                    self._write(slot, request)
                    self.give_back(slot)
            if self._slots < len(self._requests) + self._users:
                self._free.setdefault(None, []).extend(self._add_slots(connection, 1))

    def leave(self, timeout_s: float) -> None:
        """The last user unregisters and unmaps everything."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
            regions, self._regions = self._regions, {}
            self._free, self._slots = {}, 0
        if regions:
            # On a new connection, because the users' may be in the middle of a response.
            connection = HttpConnection(self.address, timeout_s=timeout_s)
            with suppress(ConnectionRefused):
                for name in regions:
                    connection.send(_post(self.address, f"{_REGIONS}/{name}/unregister", b""))
            connection.close()
            for memory in regions.values():
                memory.close()

    def take(self, request: SharedMemoryRequest) -> RequestSlot:
        """A slot that holds this request, until `give_back`."""
        free = self._free.get(request) or self._free.get(None) or max(self._free.values(), key=len)
        slot = free.pop()
        if slot.holds is not request:
            self._write(slot, request)
        return slot

    def give_back(self, slot: RequestSlot) -> None:
        self._free.setdefault(slot.holds, []).append(slot)

    def _add_slots(self, connection: HttpConnection, number: int) -> list[RequestSlot]:
        """Slots that hold nothing, in a new region that is registered."""
        byte_size = max(number * self._slot_bytes, _ALIGNMENT)
        with named_memory(byte_size) as (name, memory):
            self._regions[name] = memory
            _register(connection, self.address, name, byte_size)
        self._slots += number
        return [RequestSlot(name, memory, place * self._slot_bytes) for place in range(number)]

    def _write(self, slot: RequestSlot, request: SharedMemoryRequest) -> None:
        self.writes += 1
        memory, places = slot.memory, list[int]()
        for raw, start in zip(request.inputs, request.input_starts(), strict=False):
            place = slot.start + start
            memory[place : place + len(raw.data)] = raw.data
            places += [place + varying for varying in raw.places]
        slot.holds, slot.places = request, tuple(places)
        slot.outputs_start = slot.start + request.input_starts()[-1]
        slot.sent = self._http_request(slot, request)

    def _http_request(self, slot: RequestSlot, request: SharedMemoryRequest) -> PreparedRequest:
        inputs = [
            (raw, place_in(slot.region, len(raw.data), slot.start + start))
            for raw, start in zip(request.inputs, request.input_starts(), strict=False)
        ]
        outputs = {
            name: {"binary_data": False, **place_in(slot.region, size, slot.outputs_start + start)}
            for (name, size), start in zip(request.output_bytes.items(), request.output_starts(), strict=False)
        }
        body = request_json(inputs, outputs)
        path = f"{self.address.model_path(self._model)}/infer"
        return _post(self.address, path, body, request.payload_bytes)


def place_in(region: str, byte_size: int, start: int) -> dict[str, object]:
    """The parameters of a tensor in shared memory."""
    offset = {"shared_memory_offset": start} if start else {}
    return {"shared_memory_region": region, "shared_memory_byte_size": byte_size, **offset}


class SharedMemoryConnection:
    """One user's HTTP connection, for requests that are given in advance; it sends through the slots of a pool."""

    def __init__(self, pool: SlotPool, *, timeout_s: float = 60.0) -> None:
        self._pool = pool
        self._http = HttpConnection(pool.address, timeout_s=timeout_s)
        self._joined = False
        self._slot: RequestSlot | None = None
        """The slot of the last request, until the next one."""

    @property
    def reconnects(self) -> int:
        return self._http.reconnects

    def connect(self) -> None:
        """Connect, allocate the memory and register it. Raises `ConnectionRefused`."""
        self._http.connect()
        if not self._joined:
            self._joined = True
            try:
                self._pool.join(self._http)
            except ConnectionRefused:
                self.close()
                raise

    def send(self, request: SharedMemoryRequest, patches: Sequence[bytes] = ()) -> Exchange:
        """Send the HTTP request for a slot with this request, after writing the patches to the places that vary. The
        request's time begins before that."""
        if not self._joined:
            self.connect()
        send_ns = perf_counter_ns()
        slot = self._slot
        if slot is None or slot.holds is not request:
            if slot is not None:
                self._pool.give_back(slot)
            slot = self._slot = self._pool.take(request)
        if patches:
            memory = slot.memory
            for place, patch in zip(slot.places, patches, strict=False):
                memory[place : place + len(patch)] = patch
        assert slot.sent is not None
        exchange = self._http.send(slot.sent)
        exchange.send_ns = send_ns
        return exchange

    def copy_outputs(self) -> CopiedOutputs:
        """A copy of the outputs' memory after the last response."""
        assert self._slot is not None
        assert self._slot.holds is not None
        return self._slot.holds, self._slot.outputs()

    def read_outputs(self, exchange: Exchange, copied: CopiedOutputs | None = None) -> dict[str, Array]:
        """Copies of the outputs of the last, good response, or of a copied one. The response describes them, the
        request determined their places. Raises `DocumentError`."""
        request, memory = self.copy_outputs() if copied is None else copied
        starts = dict(zip(request.output_bytes, request.output_starts(), strict=False))
        arrays = {}
        for output in read_document(exchange.body):
            place = request.output_bytes.get(output.name, -1)
            start = starts.get(output.name, 0)
            used = byte_size(output.datatype, output.shape)
            if output.datatype == "BYTES":
                used = elements_end(memoryview(memory[start : start + max(place, 0)]), math.prod(output.shape))
            if used is None or used > place or output.data is not None:
                raise DocumentError(f"output {one_line(output.name)} is not in the shared memory")
            arrays[output.name] = read_tensor(output, memoryview(memory[start : start + used]))
        return arrays

    def close(self) -> None:
        """Close the connection, and with the last one of the pool its memory. Idempotent."""
        if self._joined:
            self._joined = False
            if self._slot is not None:
                self._pool.give_back(self._slot)
                self._slot = None
            self._pool.leave(_UNREGISTER_SECONDS)
        self._http.close()


def _register(connection: HttpConnection, address: Address, name: str, byte_size: int) -> None:
    document = {"key": f"/{name}", "offset": 0, "byte_size": byte_size}
    exchange = connection.send(_post(address, f"{_REGIONS}/{name}/register", msgspec.json.encode(document)))
    if exchange.status != 200:
        words = exchange.failure or one_line(bytes(exchange.body).decode("utf-8", "replace"))
        raise ConnectionRefused(
            f"{address.url} cannot register shared memory ({exchange.status}: {words}); start the native "
            "server with --allow-shared-memory, and run the load generator on the server's machine"
        )


def _post(address: Address, path: str, body: bytes, payload_bytes: int = 0) -> PreparedRequest:
    headers = {"Content-Type": "application/json"}
    head = request_head("POST", path, address, content_length=len(body), headers=headers)
    return PreparedRequest(head + body, payload_bytes=payload_bytes)  # one part costs less to send than two


def _starts(sizes: Iterable[int]) -> list[int]:
    return list(accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0))
