"""Cases 15, 17, 24 and 34: names of routes, models and requests that do not exist, are too long or forge something."""

from __future__ import annotations

import base64
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from loadgen.conformance.case import Ask, Call, Case, Section, spoils
from loadgen.conformance.cases.bodies import answer_json
from loadgen.conformance.grpc_calls import messages
from loadgen.conformance.model import InferenceRequest
from loadgen.conformance.records import MIB, Answer, Door, Fact, expect
from loadgen.conformance.settings import WITH_MODEL_CONTROL
from loadgen.conformance.subject import Subject

LONG_ID = "i" * MIB
MARK = "FORGED-BY-ABSERVE-CONFORMANCE"
FORGING_ID = f"a\r\n{MARK}-LINE\r\nX-{MARK}: 1"
NAMES = ("../etc", "..", "../../../../tmp/abserve", "n" * 256, "a\nb")
CANARY = f"abserve-conformance-canary-{os.getpid()}"


def asks(*lines: str) -> tuple[Ask, ...]:
    """HTTP requests without a document."""
    return tuple(Ask(line) for line in lines)


@spoils
def infer_with(request: InferenceRequest, /, name: str | None = None, version: str = "", **document: Any) -> None:
    """A valid inference request under another name or version, or with further members of its JSON."""
    request.name, request.version = name or request.name, version
    request.document |= document


def control(action: str, *names: str) -> tuple[Ask, ...]:
    """Load or unload models of these names."""
    return asks(*(f"POST /v2/repository/models/{quote(name, safe='')}/{action}" for name in names))


def climbing_load(path: str) -> Ask:
    """A load that brings its own configuration and a file whose name climbs out of the repository."""
    config = '{"backend": "python", "input": [], "output": []}'
    content = base64.b64encode(b"canary").decode()
    document = {"parameters": {"config": config, f"file:{path}{CANARY}": content}}
    return Ask(f"POST /v2/repository/models/{CANARY}/load", document)


def echoed(identifier: str) -> Any:
    """A condition: only an answer of 200 must echo the identifier; a refusal needs none."""

    def observe(_: Subject, answers: tuple[Answer, ...]) -> Fact:
        name, answer = "the id comes back unchanged", answers[0]
        if not answer.good:
            return Fact(name, True, f"refused with {answer.status}")
        back: Any = None
        if answer.status == "OK":
            back = messages.ModelInferResponse.FromString(answer.body).id
        else:
            with suppress(ValueError, RecursionError, AttributeError):
                back = answer_json(answer).get("id")
        return Fact(name, back == identifier, "yes" if back == identifier else f"came back as {str(back)[:40]!r}")

    return observe


def no_forged_header(_: Subject, answers: tuple[Answer, ...]) -> Fact:
    """Whether the identifier has become a header of an answer."""
    return Fact("no header made by the id", f"x-{MARK.lower()}" not in answers[0].headers, "a header was injected")


def log_escaped(subject: Subject, _: tuple[Answer, ...]) -> Fact:
    """Whether the identifier has become a line of the log."""
    name = "log line escaped"
    if subject.log_path is None:
        return Fact(name, None, "the log cannot be read; use --launch")
    lines = subject.log_path.read_text(errors="replace").splitlines()
    forged = any(line.startswith((MARK, f"X-{MARK}")) for line in lines)
    return Fact(name, not forged, "a forged line stands in the log" if forged else "no forged line")


def nothing_written(*_: object) -> Fact:
    """Whether a file has climbed out of the repository, to where it would land."""
    folders = (Path(tempfile.gettempdir()), Path("/"), Path.cwd(), Path.home())
    found = [path for folder in folders if (path := folder / CANARY).exists()]
    for path in found:
        path.unlink(missing_ok=True)
    return Fact("nothing written", not found, "a file was written outside the repository" if found else "no new file")


NOT_FOUND, GRPC_NOT_FOUND = expect("404"), expect("NOT_FOUND")
ECHOED, GRPC_ECHOED = (
    expect(*statuses, note="echoed or refused, log line escaped")
    for statuses in (("200", "400"), ("OK", "INVALID_ARGUMENT"))
)
REFUSED = expect("400", "403", "404", "501", "503", note="nothing written")
REFUSED_GRPC = expect(
    "INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED", "UNAVAILABLE", "PERMISSION_DENIED", note="nothing written"
)
NO_SUCH, VERSION_999, VERSION_ABC = infer_with("no_such_model"), infer_with(version="999"), infer_with(version="abc")
UNKNOWN_ROUTES = asks("GET /", "GET /v1/models", "GET /v2/no", "GET /v2/models/{model}/no", "POST /v2/no")
WRONG_VERBS = asks(
    *("POST /v2/health/live", "DELETE /v2/health/ready", "POST /v2"),
    *("GET /v2/models/{model}/infer", "PUT /v2/models/{model}/infer", "DELETE /v2/models/{model}"),
)
NO_MESSAGES = tuple(
    Call(method, b"\xff" * 40) for method in ("ModelReady", "ModelMetadata", "ModelStatistics", "RepositoryIndex")
)
UNKNOWN_METADATA = asks(
    "GET /v2/models/no_such_model", "GET /v2/models/{model}/versions/999", "GET /v2/models/no_such_model/config"
)
UNKNOWN_READY = asks(
    *("GET /v2/models/no_such_model/ready", "GET /v2/models/{model}/versions/999/ready"),
    "GET /v2/models/no_such_model/stats",
)
UNKNOWN_CALLS = (
    Call("ModelMetadata", {"name": "no_such_model"}),
    Call("ModelMetadata", {"name": "{model}", "version": "999"}),
    Call("ModelConfig", {"name": "no_such_model"}),
    Call("ModelStatistics", {"name": "no_such_model"}),
)
FORGING = (infer_with(id=FORGING_ID), infer_with(id=FORGING_ID, outputs=[{"name": "no_such"}]))
OWN_MODEL = asks(*(f"POST /v2/repository/models/{{model}}/{action}" for action in ("unload", "load")))
CLIMBING = (climbing_load("../" * 12 + "tmp/"), climbing_load("/tmp/"))
LOAD_CALLS = tuple(Call("RepositoryModelLoad", {"model_name": name}) for name in NAMES)
HARM: dict[str, Any] = {"facts": (nothing_written,), "destructive": True}
ALLOWED = HARM | {"setting": WITH_MODEL_CONTROL}

# fmt: off
ROUTES = (
    Case("15a", "unknown routes", UNKNOWN_ROUTES, NOT_FOUND),
    Case("15b", "wrong verbs", WRONG_VERBS, expect("405")),
    Case("15c", "unknown method",
         Call("NoSuchMethod", b""), expect("UNIMPLEMENTED", words_judged=False), Door.GRPC),
    Case("15d", "bytes that are no message, to methods other than inference",
         NO_MESSAGES, expect("INVALID_ARGUMENT"), Door.GRPC),
    Case("17a", "inference with an unknown model or version", (NO_SUCH, VERSION_999, VERSION_ABC), NOT_FOUND),
    Case("17b", "metadata and config of an unknown model or version", UNKNOWN_METADATA, NOT_FOUND),
    Case("17c", "ready and statistics of an unknown model or version", UNKNOWN_READY, NOT_FOUND),
    Case("17d", "inference with an unknown model or version", (NO_SUCH, VERSION_999), GRPC_NOT_FOUND, Door.GRPC),
    Case("17e", "metadata, config and statistics of an unknown model or version",
         UNKNOWN_CALLS, GRPC_NOT_FOUND, Door.GRPC),
)

IDENTIFIERS = (
    Case("24a", "request id of 1 MiB", infer_with(id=LONG_ID), ECHOED,
         facts=(echoed(LONG_ID), no_forged_header, log_escaped)),
    Case("24b", "CR and LF in the request id", FORGING, ECHOED,
         facts=(echoed(FORGING_ID), no_forged_header, log_escaped)),
    Case("24c", "CR and LF in the request id", FORGING[:1], GRPC_ECHOED, Door.GRPC,
         facts=(echoed(FORGING_ID), log_escaped)),
)

MODEL_CONTROL = (
    Case("34a", "unload and load of the served model, model control as by default",
         OWN_MODEL, REFUSED, destructive=True),
    Case("34b", "names with ../, of 256 characters, with a line break; as by default",
         control("load", *NAMES), REFUSED, **HARM),
    Case("34c", "the same with model control allowed",
         control("load", *NAMES, "no_such_model"), REFUSED, **ALLOWED),
    Case("34d", "unload of such names with model control allowed",
         control("unload", *NAMES, "no_such_model"), REFUSED, **ALLOWED),
    Case("34e", "load with a file whose name climbs out of the repository", CLIMBING, REFUSED, **ALLOWED),
    Case("34f", "names with ../ and of 256 characters", LOAD_CALLS, REFUSED_GRPC, Door.GRPC, **HARM),
)
# fmt: on

SECTIONS = (
    Section("Routes and models", "A client must be able to tell what does not exist from what has failed.", ROUTES),
    Section("Identifiers", "A request id is the client's text: it must not forge headers or log lines.", IDENTIFIERS),
    Section("Model control", "A loaded model can run code; names must not reach out of the repository.", MODEL_CONTROL),
)
