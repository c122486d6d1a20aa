"""Cases 15, 17, 24 and 34: routes, models and request ids that are unknown, too long or forge something."""

from __future__ import annotations

import base64
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from loadgen.conformance.case import Case, Condition, Section, Send, changes, grpc, http
from loadgen.conformance.cases.bodies import answer_json
from loadgen.conformance.model import InferenceRequest
from loadgen.conformance.records import MIB, Answer, Fact
from loadgen.conformance.servers import WITH_MODEL_CONTROL
from loadgen.conformance.subject import Subject
from loadgen.conformance.wire import messages

LONG_ID = "i" * MIB
MARK = "FORGED-BY-ABSERVE-CONFORMANCE"
FORGING_ID = f"a\r\n{MARK}-LINE\r\nX-{MARK}: 1"
NAMES = ("../etc", "..", "../../../../tmp/abserve", "n" * 256, "a\nb")
FORBIDDEN_FILE = f"abserve-conformance-file-{os.getpid()}"


def https(*lines: str) -> tuple[Send, ...]:
    """HTTP requests without a document."""
    return tuple(http(line) for line in lines)


@changes
def infer_with(request: InferenceRequest, /, name: str | None = None, version: str = "", **document: Any) -> None:
    """A valid inference request under another name or version, or with more members in its JSON."""
    request.name, request.version = name or request.name, version
    request.document |= document


def control(action: str, *names: str) -> tuple[Send, ...]:
    """Load or unload models of these names."""
    return https(*(f"POST /v2/repository/models/{quote(name, safe='')}/{action}" for name in names))


def load_outside(path: str) -> Send:
    """A load with its own configuration and a file whose name points out of the repository."""
    config = '{"backend": "python", "input": [], "output": []}'
    content = base64.b64encode(b"conformance").decode()
    document = {"parameters": {"config": config, f"file:{path}{FORBIDDEN_FILE}": content}}
    return http(f"POST /v2/repository/models/{FORBIDDEN_FILE}/load", document)


def echoed(identifier: str) -> Condition:
    """Whether an answer of 200 echoes the identifier unchanged; a refusal need not."""

    def observe(_: Subject, answers: Sequence[Answer]) -> Fact:
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


def no_forged_header(_: Subject, answers: Sequence[Answer]) -> Fact:
    """Whether the identifier has become a header of an answer."""
    return Fact("no header made by the id", f"x-{MARK.lower()}" not in answers[0].headers, "a header was injected")


def log_escaped(subject: Subject, _: Sequence[Answer]) -> Fact:
    """Whether the identifier has become a line of the log."""
    name = "log line escaped"
    if subject.log_path is None:
        return Fact(name, None, "the log cannot be read; use --launch")
    lines = subject.log_path.read_text(errors="replace").splitlines()
    forged = any(line.startswith((MARK, f"X-{MARK}")) for line in lines)
    return Fact(name, not forged, "the log holds a forged line" if forged else "no forged line")


def nothing_written(*_: object) -> Fact:
    """Whether the server has written the file of `load_outside`."""
    folders = (Path(tempfile.gettempdir()), Path("/"), Path.cwd(), Path.home())
    found = [path for folder in folders if (path := folder / FORBIDDEN_FILE).exists()]
    for path in found:
        path.unlink(missing_ok=True)
    return Fact("nothing written", not found, "a file was written outside the repository" if found else "no new file")


UNKNOWN_ROUTES = https("GET /", "GET /v1/models", "GET /v2/no", "GET /v2/models/{model}/no", "POST /v2/no")
WRONG_VERBS = https(
    *("POST /v2/health/live", "DELETE /v2/health/ready", "POST /v2"),
    *("GET /v2/models/{model}/infer", "PUT /v2/models/{model}/infer", "DELETE /v2/models/{model}"),
)
NOT_MESSAGES = tuple(
    grpc(method, b"\xff" * 40) for method in ("ModelReady", "ModelMetadata", "ModelStatistics", "RepositoryIndex")
)
UNKNOWN_METADATA = https(
    "GET /v2/models/no_such_model", "GET /v2/models/{model}/versions/999", "GET /v2/models/no_such_model/config"
)
UNKNOWN_READY = https(
    *("GET /v2/models/no_such_model/ready", "GET /v2/models/{model}/versions/999/ready"),
    "GET /v2/models/no_such_model/stats",
)
UNKNOWN_CALLS = (
    grpc("ModelMetadata", {"name": "no_such_model"}),
    grpc("ModelMetadata", {"name": "{model}", "version": "999"}),
    grpc("ModelConfig", {"name": "no_such_model"}),
    grpc("ModelStatistics", {"name": "no_such_model"}),
)
NO_SUCH, VERSION_999, VERSION_ABC = infer_with("no_such_model"), infer_with(version="999"), infer_with(version="abc")
FORGING = (infer_with(id=FORGING_ID), infer_with(id=FORGING_ID, outputs=[{"name": "no_such"}]))
SERVED_MODEL = https(*(f"POST /v2/repository/models/{{model}}/{action}" for action in ("unload", "load")))
LOADS_OUTSIDE = (load_outside("../" * 12 + "tmp/"), load_outside("/tmp/"))
LOAD_CALLS = tuple(grpc("RepositoryModelLoad", {"model_name": name}) for name in NAMES)
ECHOED: dict[str, Any] = {"note": "echoed or refused, log line escaped"}
REFUSED = "400 or 403 or 404 or 501 or 503"
REFUSED_GRPC = "INVALID_ARGUMENT or NOT_FOUND or UNIMPLEMENTED or UNAVAILABLE or PERMISSION_DENIED"
HARM: dict[str, Any] = {"destructive": True, "note": "nothing written"}
NOTHING_WRITTEN = HARM | {"facts": (nothing_written,)}
ALLOWED = NOTHING_WRITTEN | {"setting": WITH_MODEL_CONTROL}

# fmt: off
ROUTES = (
    Case("15a", "unknown routes", UNKNOWN_ROUTES, "404"),
    Case("15b", "wrong verbs", WRONG_VERBS, "405"),
    Case("15c", "unknown method", grpc("NoSuchMethod", b""), "UNIMPLEMENTED", check_words=False),
    Case("15d", "bytes that are not a message, to methods other than inference", NOT_MESSAGES, "INVALID_ARGUMENT"),
    Case("17a", "inference with an unknown model or version", (NO_SUCH, VERSION_999, VERSION_ABC), "404"),
    Case("17b", "metadata and config of an unknown model or version", UNKNOWN_METADATA, "404"),
    Case("17c", "ready and statistics of an unknown model or version", UNKNOWN_READY, "404"),
    Case("17d", "inference with an unknown model or version", (NO_SUCH, VERSION_999), "NOT_FOUND"),
    Case("17e", "metadata, config and statistics of an unknown model or version", UNKNOWN_CALLS, "NOT_FOUND"),
)

IDENTIFIERS = (
    Case("24a", "request id of 1 MiB", infer_with(id=LONG_ID), "200 or 400",
         facts=(echoed(LONG_ID), no_forged_header, log_escaped), **ECHOED),
    Case("24b", "CR and LF in the request id", FORGING, "200 or 400",
         facts=(echoed(FORGING_ID), no_forged_header, log_escaped), **ECHOED),
    Case("24c", "CR and LF in the request id", FORGING[:1], "OK or INVALID_ARGUMENT",
         facts=(echoed(FORGING_ID), log_escaped), **ECHOED),
)

MODEL_CONTROL = (
    Case("34a", "unload and load the served model, default settings", SERVED_MODEL, REFUSED, **HARM),
    Case("34b", "load names with ../, of 256 characters, with a line break, default settings",
         control("load", *NAMES), REFUSED, **NOTHING_WRITTEN),
    Case("34c", "load such names, model control allowed",
         control("load", *NAMES, "no_such_model"), REFUSED, **ALLOWED),
    Case("34d", "unload such names, model control allowed",
         control("unload", *NAMES, "no_such_model"), REFUSED, **ALLOWED),
    Case("34e", "load with a file whose name points out of the repository", LOADS_OUTSIDE, REFUSED, **ALLOWED),
    Case("34f", "load names with ../ and of 256 characters", LOAD_CALLS, REFUSED_GRPC, **NOTHING_WRITTEN),
)
# fmt: on

SECTIONS = (
    Section("Routes and models", "A client must be able to distinguish an unknown name from a failure.", ROUTES),
    Section("Identifiers", "A request id is the client's text: it must not forge headers or log lines.", IDENTIFIERS),
    Section("Model control", "A loaded model can run code; names must not point out of the repository.", MODEL_CONTROL),
)
