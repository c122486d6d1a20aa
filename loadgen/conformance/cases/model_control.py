"""Case 34: loading and unloading models over the network, with names and files that reach out of the repository."""

from __future__ import annotations

import base64
import os
import tempfile
from pathlib import Path
from urllib.parse import quote

from loadgen.conformance.case import Case, Probe
from loadgen.conformance.grpc_calls import messages
from loadgen.conformance.model import json_body
from loadgen.conformance.records import Door, Expectation, Fact, Observation
from loadgen.conformance.settings import WITH_MODEL_CONTROL
from loadgen.conformance.subject import Subject

LONG_NAME = "n" * 256
NAMES = ("../etc", "..", "../../../../tmp/abserve", LONG_NAME, "a\nb")
CANARY = f"abserve-conformance-canary-{os.getpid()}"


def _canaries() -> list[Path]:
    """Where a file that climbs out of the repository would land."""
    return [Path(tempfile.gettempdir()) / CANARY, Path("/") / CANARY, Path.cwd() / CANARY, Path.home() / CANARY]


def _written() -> Fact:
    found = [path for path in _canaries() if path.exists()]
    for path in found:
        path.unlink()
    return Fact("nothing written", not found, "a file was written outside the repository" if found else "no new file")


def _loads(action: str, *names: str) -> Probe:
    def probe(subject: Subject) -> Observation:
        answers = tuple(
            subject.http("POST", f"/v2/repository/models/{quote(name, safe='')}/{action}", body=b"") for name in names
        )
        return Observation(answers, (_written(),))

    return probe


def _override(subject: Subject) -> Observation:
    """A load that brings its own configuration and a file whose name climbs out of the repository."""
    content = base64.b64encode(b"canary").decode()
    config = '{"backend": "python", "input": [], "output": []}'
    answers = []
    for name in ("../" * 12 + "tmp/" + CANARY, "/tmp/" + CANARY):
        body = json_body({"parameters": {"config": config, f"file:{name}": content}})
        path = f"/v2/repository/models/{CANARY}/load"
        answers.append(subject.http("POST", path, headers=body.headers, body=body.content))
    return Observation(tuple(answers), (_written(),))


def _own_model(subject: Subject) -> Observation:
    """Without model control the model that is served can be neither unloaded nor loaded anew."""
    name = subject.model.name
    answers = tuple(
        subject.http("POST", f"/v2/repository/models/{name}/{action}", body=b"") for action in ("unload", "load")
    )
    return Observation(answers)


def _grpc_loads(*names: str) -> Probe:
    def probe(subject: Subject) -> Observation:
        door = subject.call()
        answers = tuple(
            door.call("RepositoryModelLoad", messages.RepositoryModelLoadRequest(model_name=name)) for name in names
        )
        return Observation(answers, (_written(),))

    return probe


REFUSED = Expectation(statuses=("400", "403", "404", "501", "503"), note="nothing written")
REFUSED_GRPC = Expectation(
    statuses=("INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED", "UNAVAILABLE", "PERMISSION_DENIED"),
    note="nothing written",
)

CASES = (
    Case(
        number="34a",
        title="unload and load of the served model, model control as by default",
        probe=_own_model,
        expected=REFUSED,
        destructive=True,
    ),
    Case(
        number="34b",
        title="names with ../, of 256 characters, with a line break; as by default",
        probe=_loads("load", *NAMES),
        expected=REFUSED,
        destructive=True,
    ),
    Case(
        number="34c",
        title="the same with model control allowed",
        probe=_loads("load", *NAMES, "no_such_model"),
        expected=REFUSED,
        setting=WITH_MODEL_CONTROL,
        destructive=True,
    ),
    Case(
        number="34d",
        title="unload of such names with model control allowed",
        probe=_loads("unload", *NAMES, "no_such_model"),
        expected=REFUSED,
        setting=WITH_MODEL_CONTROL,
        destructive=True,
    ),
    Case(
        number="34e",
        title="load with a file whose name climbs out of the repository",
        probe=_override,
        expected=REFUSED,
        setting=WITH_MODEL_CONTROL,
        destructive=True,
    ),
    Case(
        number="34f",
        title="names with ../ and of 256 characters",
        door=Door.GRPC,
        probe=_grpc_loads(*NAMES),
        expected=REFUSED_GRPC,
        destructive=True,
    ),
)
