"""Case 33: system shared memory that is not allowed, not known, or does not reach as far as the request says."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from loadgen.conformance.case import Ask, Call, Case, Infer, Section, probes, spoils
from loadgen.conformance.model import InferenceRequest, tensor_bytes
from loadgen.conformance.records import (
    MIB,
    Answer,
    Door,
    Expectation,
    MemoryBound,
    NotApplicableError,
    Observation,
    expect,
)
from loadgen.conformance.settings import WITH_SHARED_MEMORY
from loadgen.conformance.subject import Subject

ROOT = Path("/dev/shm")
KEY = f"abserve_conformance_{os.getpid()}"
RESERVED_KEY = "triton_python_backend_shm_region_abserve_conformance"
REGION = "abserve_conformance"
HUGE = 2**64 - 32
HUGE_ELEMENT_BYTES = 512 * MIB


@contextmanager
def _segment(key: str, size: int) -> Iterator[Path]:
    """A shared memory object with that many bytes, all zero, which take no memory until they are touched."""
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
def _registered(subject: Subject, door: Door, key: str, offset: int, size: int) -> Iterator[Answer]:
    """The answer to the registration of a region, which is taken back where it has succeeded."""
    fields: dict[str, Any] = {"key": f"/{key}", "offset": offset, "byte_size": size}
    if door is Door.GRPC:
        answer = Call("SystemSharedMemoryRegister", {"name": REGION, **fields}).send(subject, door)
    else:
        answer = Ask(f"POST /v2/systemsharedmemory/region/{REGION}/register", fields).send(subject, door)
    try:
        yield answer
    finally:
        if answer.good:
            subject.http("POST", f"/v2/systemsharedmemory/region/{REGION}/unregister", body=b"")


@spoils
def from_region(request: InferenceRequest, /, region: str, offset: int = 0, more: int = 0, **members: Any) -> None:
    """Inference whose one input is in a region: so many bytes more than the tensor has, or a BYTES element."""
    if len(request.entries) != 1:
        raise NotApplicableError("needs a model with one input")
    size = more if members else len(request.blobs[0]) + more
    parameters = {"shared_memory_region": region, "shared_memory_byte_size": size}
    request.entries[0].update(members, parameters=parameters | ({"shared_memory_offset": offset} if offset else {}))
    request.blobs, request.document = [], {}


def _by_default(subject: Subject, door: Door) -> Observation:
    """As the server was started, without any option that would allow shared memory."""
    with _segment(KEY, 4096), _registered(subject, door, KEY, 0, 4096) as answer:
        used = () if door is Door.GRPC else (from_region(REGION).send(subject, door),)
        return Observation((answer, *used))


@probes
def registering(subject: Subject, door: Door, *places: tuple[str, int, int]) -> Observation:
    """Registrations of (key, offset, size) over a segment of 4096 bytes."""
    _check_allowed(subject)
    answers = []
    with _segment(KEY, 4096), _segment(RESERVED_KEY, 4096):
        for place in places:
            with _registered(subject, door, *place) as answer:
                answers.append(answer)
    return Observation(tuple(answers))


@probes
def reading(subject: Subject, door: Door, *requests: Infer, first: bytes = b"", size: int = 0) -> Observation:
    """Inference from a region of `size` bytes that begins with `first`; of exactly the tensor's size unless given."""
    _check_allowed(subject)
    count = size or len(tensor_bytes(subject.model.arrays(1)[0]))
    with _segment(KEY, count) as path:
        with path.open("r+b") as file:
            file.write(first)
        with _registered(subject, door, KEY, 0, count) as answer:
            if not answer.good:
                raise NotApplicableError(f"a valid region cannot be registered ({answer.status})")
            return Observation(tuple(request.send(subject, door) for request in requests))


def _unknown(subject: Subject, door: Door) -> Observation:
    _check_allowed(subject)
    return Observation((from_region("no_such_region").send(subject, door),))


def _check_allowed(subject: Subject) -> None:
    status = subject.http("GET", "/v2/systemsharedmemory/status").status
    if status != "200":
        raise NotApplicableError(f"shared memory is not allowed on this server (status is answered {status})")


def bad(*statuses: str) -> Expectation:
    """A refusal that does not hold a key."""
    return expect(*statuses, secrets=(KEY, RESERVED_KEY), note="key not echoed")


BAD, BAD_OR_NOT_FOUND, BAD_OR_LARGE = bad("400"), bad("400", "404"), bad("400", "413")
BAD_GRPC, BAD_OR_NOT_FOUND_GRPC = bad("INVALID_ARGUMENT"), bad("INVALID_ARGUMENT", "NOT_FOUND")
REFUSED = bad("400", "404", "501", "403")
REFUSED_GRPC = bad("INVALID_ARGUMENT", "UNIMPLEMENTED", "PERMISSION_DENIED", "UNAVAILABLE")
OUTSIDE = registering((KEY, 0, 4097), (KEY, 1, 4096), ("no_such_segment_" + KEY, 0, 64))
OVERFLOWING = registering((KEY, 32, HUGE), (KEY, 32, 2**63 - 1), (KEY, 2**63 - 1, 64))
MIXED = registering((KEY, 0, 4097), (KEY, 32, HUGE), (RESERVED_KEY, 0, 64))
PAST_REGION, FAR_PAST_REGION = from_region(REGION, 1), from_region(REGION, 2**63 - 1)
PAST_ITS_END = reading(PAST_REGION, from_region(REGION, 0, 1), FAR_PAST_REGION, from_region(REGION, 32, HUGE))
PAST_OR_UNKNOWN = reading(PAST_REGION, FAR_PAST_REGION, from_region("no_such_region"))
HUGE_ELEMENT = reading(
    from_region(REGION, more=HUGE_ELEMENT_BYTES, datatype="BYTES", shape=[1, 1]),
    first=(HUGE_ELEMENT_BYTES - 4).to_bytes(4, "little"),
    size=HUGE_ELEMENT_BYTES,
)
ALLOWED: dict[str, Any] = {"setting": WITH_SHARED_MEMORY}
HARM = ALLOWED | {"destructive": True}
LITTLE_MEMORY = HARM | {"memory": MemoryBound(peak_bytes=64 * MIB)}

# fmt: off
CASES = (
    Case("33a", "shared memory as the server is started by default", _by_default, REFUSED, destructive=True),
    Case("33b", "shared memory as the server is started by default", _by_default, REFUSED_GRPC, Door.GRPC,
         destructive=True),
    Case("33c", "unknown region", _unknown, BAD_OR_NOT_FOUND, **ALLOWED),
    Case("33d", "a region that ends 1 byte after its segment; one of no segment", OUTSIDE, BAD_OR_NOT_FOUND, **HARM),
    Case("33e", "offset 32 and size 2^64−32; 2^63−1", OVERFLOWING, BAD, **HARM),
    Case("33f", "the prefix that is reserved for the python backend", registering((RESERVED_KEY, 0, 64)), BAD, **HARM),
    Case("33h", "an input that reaches 1 byte past its region; offset 32 and size 2^64−32", PAST_ITS_END, BAD, **HARM),
    Case("33i", "a valid region, used as it is meant", reading(from_region(REGION)), expect("200"), **ALLOWED),
    Case("33j", "past the segment, overflow, reserved prefix", MIXED, BAD_GRPC, Door.GRPC, **HARM),
    Case("33k", "an input past its region; unknown region", PAST_OR_UNKNOWN, BAD_OR_NOT_FOUND_GRPC, Door.GRPC, **HARM),
    Case("33l", f"one BYTES element of {HUGE_ELEMENT_BYTES // MIB} MiB", HUGE_ELEMENT, BAD_OR_LARGE, **LITTLE_MEMORY),
)
# fmt: on

SECTIONS = (
    Section("Shared memory", "A client names memory on the server's machine; it must not read past it.", CASES),
)
