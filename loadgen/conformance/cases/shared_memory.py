"""Case 33: system shared memory that is not allowed, is unknown, or is smaller than the request claims."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from loadgen.conformance.case import Case, Theme, changes, grpc, http
from loadgen.conformance.model import InferenceRequest, tensor_bytes
from loadgen.conformance.records import MIB, NotApplicableError, Protocol, Response, Seen
from loadgen.conformance.servers import WITH_SHARED_MEMORY, Subject

ROOT = Path("/dev/shm")
KEY = f"abserve_conformance_{os.getpid()}"
RESERVED_KEY = "triton_python_backend_shm_region_abserve_conformance"
REGION = "abserve_conformance"
HUGE = 2**64 - 32
HUGE_ELEMENT_BYTES = 512 * MIB


@contextmanager
def _segment(key: str, size: int) -> Iterator[Path]:
    """A shared memory object of that size, all zero, which uses no memory until it is written."""
    if not ROOT.is_dir():
        raise NotApplicableError("this machine has no /dev/shm")
    path = ROOT / key
    path.touch()
    os.truncate(path, size)
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


@contextmanager
def _registered(subject: Subject, protocol: Protocol, key: str, offset: int, size: int) -> Iterator[Response]:
    """The answer to the registration of a region, which is unregistered at the end if that succeeded."""
    fields: dict[str, Any] = {"key": f"/{key}", "offset": offset, "byte_size": size}
    if protocol == "grpc":
        register = grpc("SystemSharedMemoryRegister", {"name": REGION, **fields})
    else:
        register = http(f"POST /v2/systemsharedmemory/region/{REGION}/register", fields)
    response = register(subject, protocol)
    assert isinstance(response, Response)
    try:
        yield response
    finally:
        if response.succeeded:
            subject.http("POST", f"/v2/systemsharedmemory/region/{REGION}/unregister", body=b"")


@changes
def from_region(request: InferenceRequest, /, region: str, offset: int = 0, more: int = 0, **members: Any) -> None:
    """Inference whose one input is in a region and `more` bytes longer than the tensor; with other members, `more`
    bytes long."""
    if len(request.entries) != 1:
        raise NotApplicableError("needs a model with one input")
    size = more if members else len(request.blobs[0]) + more
    parameters = {"shared_memory_region": region, "shared_memory_byte_size": size}
    request.entries[0].update(members, parameters=parameters | ({"shared_memory_offset": offset} if offset else {}))
    request.blobs, request.document = [], {}


def _by_default(subject: Subject, protocol: Protocol) -> Seen:
    with _segment(KEY, 4096), _registered(subject, protocol, KEY, 0, 4096) as response:
        yield response
        if protocol == "http":
            yield from_region(REGION)(subject, protocol)


def registering(subject: Subject, protocol: Protocol, places: tuple[tuple[str, int, int], ...]) -> Seen:
    """Registrations of (key, offset, size) over a segment of 4096 bytes."""
    _check_allowed(subject)
    with _segment(KEY, 4096), _segment(RESERVED_KEY, 4096):
        for place in places:
            with _registered(subject, protocol, *place) as response:
                yield response


def reading(subject: Subject, protocol: Protocol, requests: tuple[Any, ...], first: bytes = b"", size: int = 0) -> Seen:
    """Inference from a region of `size` bytes that begins with `first`; by default it has exactly the tensor's size."""
    _check_allowed(subject)
    count = size or len(tensor_bytes(subject.model.arrays(1)[0]))
    with _segment(KEY, count) as path:
        with path.open("r+b") as file:
            file.write(first)
        with _registered(subject, protocol, KEY, 0, count) as response:
            if not response.succeeded:
                raise NotApplicableError(f"a valid region cannot be registered ({response.status})")
            for send in requests:
                yield send(subject, protocol)


def _unknown(subject: Subject, protocol: Protocol) -> Response:
    _check_allowed(subject)
    return from_region("no_such_region")(subject, protocol)


def _check_allowed(subject: Subject) -> None:
    status = subject.http("GET", "/v2/systemsharedmemory/status").status
    if status != "200":
        raise NotApplicableError(f"shared memory is not allowed on this server (its status route answers {status})")


OUTSIDE = partial(registering, places=((KEY, 0, 4097), (KEY, 1, 4096), ("no_such_segment_" + KEY, 0, 64)))
OVERFLOWING = partial(registering, places=((KEY, 32, HUGE), (KEY, 32, 2**63 - 1), (KEY, 2**63 - 1, 64)))
RESERVED = partial(registering, places=((RESERVED_KEY, 0, 64),))
MIXED = partial(registering, places=((KEY, 0, 4097), (KEY, 32, HUGE), (RESERVED_KEY, 0, 64)))
PAST_REGION, FAR_PAST_REGION = from_region(REGION, 1), from_region(REGION, 2**63 - 1)
TOO_LONG = (PAST_REGION, from_region(REGION, 0, 1), FAR_PAST_REGION, from_region(REGION, 32, HUGE))
TOO_LONG_OR_UNKNOWN = (PAST_REGION, FAR_PAST_REGION, from_region("no_such_region"))
HUGE_ELEMENT = partial(
    reading,
    requests=(from_region(REGION, more=HUGE_ELEMENT_BYTES, datatype="BYTES", shape=[1, 1]),),
    first=(HUGE_ELEMENT_BYTES - 4).to_bytes(4, "little"),
    size=HUGE_ELEMENT_BYTES,
)
REFUSED_GRPC = "INVALID_ARGUMENT or UNIMPLEMENTED or PERMISSION_DENIED or UNAVAILABLE"
REFUSED: dict[str, Any] = {"secrets": (KEY, RESERVED_KEY), "note": "key not echoed"}
DEFAULT = REFUSED | {"destructive": True}
HARM = DEFAULT | {"setting": WITH_SHARED_MEMORY}

# fmt: off
CASES = (
    Case("33a", "shared memory, default settings", _by_default, "400 or 404 or 501 or 403", **DEFAULT),
    Case("33b", "shared memory, default settings", _by_default, REFUSED_GRPC, **DEFAULT),
    Case("33c", "unknown region", _unknown, "400 or 404", setting=WITH_SHARED_MEMORY, **REFUSED),
    Case("33d", "a region that ends 1 byte after its segment; one without a segment", OUTSIDE, "400 or 404", **HARM),
    Case("33e", "offset 32 and size 2^64−32; 2^63−1", OVERFLOWING, "400", **HARM),
    Case("33f", "the prefix reserved for Triton's Python backend", RESERVED, "400", **HARM),
    Case("33h", "an input that ends 1 byte after its region; offset 32 and size 2^64−32",
         partial(reading, requests=TOO_LONG), "400", **HARM),
    Case("33i", "a valid region", partial(reading, requests=(from_region(REGION),)), "200",
         setting=WITH_SHARED_MEMORY),
    Case("33j", "after the segment, overflow, reserved prefix", MIXED, "INVALID_ARGUMENT", **HARM),
    Case("33k", "an input after its region; unknown region", partial(reading, requests=TOO_LONG_OR_UNKNOWN),
         "INVALID_ARGUMENT or NOT_FOUND", **HARM),
    Case("33l", f"one BYTES element of {HUGE_ELEMENT_BYTES // MIB} MiB", HUGE_ELEMENT, "400 or 413", peak_mib=64,
         **HARM),
)
# fmt: on

THEMES = (
    Theme("Shared memory", "A client names memory on the server's machine and must not read past its end.", CASES),
)
