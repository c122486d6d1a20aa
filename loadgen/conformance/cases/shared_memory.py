"""Case 33: system shared memory that is not allowed, not known, or does not reach as far as the request says."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from loadgen.conformance.case import Case, Probe
from loadgen.conformance.grpc_calls import GrpcDoor, infer_message, messages
from loadgen.conformance.model import Body, Model, json_body, tensor_bytes
from loadgen.conformance.records import Answer, Door, Expectation, NotApplicableError, Observation
from loadgen.conformance.settings import WITH_SHARED_MEMORY
from loadgen.conformance.subject import Subject

ROOT = Path("/dev/shm")
KEY = f"abserve_conformance_{os.getpid()}"
RESERVED_KEY = "triton_python_backend_shm_region_abserve_conformance"
REGION = "abserve_conformance"
SECRETS = (KEY, RESERVED_KEY)
REFUSED = ("400", "404", "501", "403")
_HUGE = 2**64 - 32


@contextmanager
def _segment(key: str, size: int) -> Iterator[None]:
    """A shared memory object of ours with that many bytes."""
    if not ROOT.is_dir():
        raise NotApplicableError("this machine has no /dev/shm")
    path = ROOT / key
    path.write_bytes(b"\x00" * size)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _register(subject: Subject, key: str, offset: int, size: int, region: str = REGION) -> Answer:
    body = json_body({"key": f"/{key}", "offset": offset, "byte_size": size})
    path = f"/v2/systemsharedmemory/region/{region}/register"
    return subject.http("POST", path, headers=body.headers, body=body.content)


def _unregister(subject: Subject) -> None:
    subject.http("POST", f"/v2/systemsharedmemory/region/{REGION}/unregister", body=b"")


def _first_bytes(model: Model) -> int:
    return len(tensor_bytes(model.arrays(1)[model.inputs[0].name]))


def _from_region(model: Model, region: str, size: int, offset: int = 0) -> Body:
    if len(model.inputs) != 1:
        raise NotApplicableError("needs a model with one input")
    parameters: dict[str, Any] = {"shared_memory_region": region, "shared_memory_byte_size": size}
    if offset:
        parameters["shared_memory_offset"] = offset
    return json_body({"inputs": [{**model.entries()[0], "parameters": parameters}]})


def _disabled(subject: Subject) -> Observation:
    """As it was started, without any option that would allow shared memory."""
    with _segment(KEY, 4096):
        answer = _register(subject, KEY, 0, 4096)
        used = subject.infer(_from_region(subject.model, REGION, _first_bytes(subject.model)))
        if answer.status == "200":
            _unregister(subject)
    return Observation((answer, used))


def _grpc_disabled(subject: Subject) -> Observation:
    door = subject.call()
    with _segment(KEY, 4096):
        answer = _grpc_register(door, KEY, 0, 4096)
        if answer.status == "OK":
            _unregister(subject)
    return Observation((answer,))


def _grpc_register(door: GrpcDoor, key: str, offset: int, size: int) -> Answer:
    request = messages.SystemSharedMemoryRegisterRequest(name=REGION, key=f"/{key}", offset=offset, byte_size=size)
    return door.call("SystemSharedMemoryRegister", request)


def _allowed(subject: Subject) -> None:
    status = subject.http("GET", "/v2/systemsharedmemory/status").status
    if status != "200":
        raise NotApplicableError(f"shared memory is not allowed on this server (status is answered {status})")


def _unknown(subject: Subject) -> Observation:
    _allowed(subject)
    return Observation((subject.infer(_from_region(subject.model, "no_such_region", _first_bytes(subject.model))),))


def _registering(*places: tuple[str, int, int]) -> Probe:
    """Registrations of (key, offset, size) over a segment of 4096 bytes; a size below 0 counts from 2^64."""

    def probe(subject: Subject) -> Observation:
        _allowed(subject)
        answers = []
        with _segment(KEY, 4096), _segment(RESERVED_KEY, 4096):
            for key, offset, size in places:
                answers.append(_register(subject, key, offset, size))
                if answers[-1].status == "200":
                    _unregister(subject)
        return Observation(tuple(answers))

    return probe


def _grpc_registering(*places: tuple[str, int, int]) -> Probe:
    def probe(subject: Subject) -> Observation:
        _allowed(subject)
        door = subject.call()
        answers = []
        with _segment(KEY, 4096), _segment(RESERVED_KEY, 4096):
            for key, offset, size in places:
                answers.append(_grpc_register(door, key, offset, size))
                if answers[-1].status == "OK":
                    _unregister(subject)
        return Observation(tuple(answers))

    return probe


def _reading(*places: tuple[int, int]) -> Probe:
    """Inference from (offset, size beyond the tensor's) of a region that holds exactly the tensor."""

    def probe(subject: Subject) -> Observation:
        _allowed(subject)
        size = _first_bytes(subject.model)
        with _segment(KEY, size):
            registered = _register(subject, KEY, 0, size)
            if registered.status != "200":
                raise NotApplicableError(f"a valid region cannot be registered ({registered.status})")
            try:
                answers = tuple(
                    subject.infer(_from_region(subject.model, REGION, size + extra, offset)) for offset, extra in places
                )
            finally:
                _unregister(subject)
        return Observation(answers)

    return probe


def _grpc_reading(subject: Subject) -> Observation:
    _allowed(subject)
    door, size = subject.call(), _first_bytes(subject.model)
    with _segment(KEY, size):
        if _grpc_register(door, KEY, 0, size).status != "OK":
            raise NotApplicableError("a valid region cannot be registered")
        try:
            answers = []
            for region, offset in ((REGION, 1), (REGION, 2**63 - 1), ("no_such_region", 0)):
                message = infer_message(subject.model)
                del message.raw_input_contents[:]
                parameters = message.inputs[0].parameters
                parameters["shared_memory_region"].string_param = region
                parameters["shared_memory_byte_size"].int64_param = size
                parameters["shared_memory_offset"].int64_param = offset
                answers.append(door.infer(message))
        finally:
            _unregister(subject)
    return Observation(tuple(answers))


def _valid(subject: Subject) -> Observation:
    """The way it is meant, so that a server cannot pass by refusing everything."""
    return _reading((0, 0))(subject)


def _bad(*statuses: str) -> Expectation:
    return Expectation(statuses=statuses, secrets=SECRETS, note="key not echoed")


CASES = (
    Case(
        number="33a",
        title="shared memory as the server is started by default",
        probe=_disabled,
        expected=_bad(*REFUSED),
        destructive=True,
    ),
    Case(
        number="33b",
        title="shared memory as the server is started by default",
        door=Door.GRPC,
        probe=_grpc_disabled,
        expected=_bad("INVALID_ARGUMENT", "UNIMPLEMENTED", "PERMISSION_DENIED", "UNAVAILABLE"),
        destructive=True,
    ),
    Case(
        number="33c",
        title="unknown region",
        probe=_unknown,
        expected=_bad("400", "404"),
        setting=WITH_SHARED_MEMORY,
    ),
    Case(
        number="33d",
        title="a region that ends 1 byte after its segment; one of no segment",
        probe=_registering((KEY, 0, 4097), (KEY, 1, 4096), ("no_such_segment_" + KEY, 0, 64)),
        expected=_bad("400", "404"),
        setting=WITH_SHARED_MEMORY,
        destructive=True,
    ),
    Case(
        number="33e",
        title="offset 32 and size 2^64−32; 2^63−1",
        probe=_registering((KEY, 32, _HUGE), (KEY, 32, 2**63 - 1), (KEY, 2**63 - 1, 64)),
        expected=_bad("400"),
        setting=WITH_SHARED_MEMORY,
        destructive=True,
    ),
    Case(
        number="33f",
        title="the prefix that is reserved for the python backend",
        probe=_registering((RESERVED_KEY, 0, 64)),
        expected=_bad("400"),
        setting=WITH_SHARED_MEMORY,
        destructive=True,
    ),
    Case(
        number="33h",
        title="an input that reaches 1 byte past its region; offset 32 and size 2^64−32",
        probe=_reading((1, 0), (0, 1), (2**63 - 1, 0), (32, _HUGE)),
        expected=_bad("400"),
        setting=WITH_SHARED_MEMORY,
        destructive=True,
    ),
    Case(
        number="33i",
        title="a valid region, used as it is meant",
        probe=_valid,
        expected=Expectation(statuses=("200",)),
        setting=WITH_SHARED_MEMORY,
    ),
    Case(
        number="33j",
        title="past the segment, overflow, reserved prefix",
        door=Door.GRPC,
        probe=_grpc_registering((KEY, 0, 4097), (KEY, 32, _HUGE), (RESERVED_KEY, 0, 64)),
        expected=_bad("INVALID_ARGUMENT"),
        setting=WITH_SHARED_MEMORY,
        destructive=True,
    ),
    Case(
        number="33k",
        title="an input past its region; unknown region",
        door=Door.GRPC,
        probe=_grpc_reading,
        expected=_bad("INVALID_ARGUMENT", "NOT_FOUND"),
        setting=WITH_SHARED_MEMORY,
        destructive=True,
    ),
)
