"""Case 24: request identifiers that are too long or would forge a line of the log."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from loadgen.conformance.case import Case
from loadgen.conformance.grpc_calls import infer_message, messages
from loadgen.conformance.model import Body
from loadgen.conformance.records import MIB, Answer, Door, Expectation, Fact, Observation
from loadgen.conformance.subject import Subject

LONG_ID = "i" * MIB
MARK = "FORGED-BY-ABSERVE-CONFORMANCE"
FORGING_ID = f"a\r\n{MARK}-LINE\r\nX-{MARK}: 1"


def _echo(answer: Answer, sent: str) -> Fact:
    """Only an answer of 200 must echo the identifier; a refusal needs none."""
    name = "the id comes back unchanged"
    if answer.status not in {"200", "OK"}:
        return Fact(name, True, f"refused with {answer.status}")
    back: Any = None
    if answer.status == "OK":
        back = messages.ModelInferResponse.FromString(answer.body).id
    else:
        with suppress(ValueError):
            length = answer.headers.get("inference-header-content-length")
            back = json.loads(answer.body[: int(length)] if length else answer.body).get("id")
    return Fact(name, back == sent, "yes" if back == sent else f"came back as {str(back)[:40]!r}")


def _log(subject: Subject) -> Fact:
    name = "log line escaped"
    if subject.log_path is None:
        return Fact(name, None, "the log cannot be read; use --launch")
    lines = subject.log_path.read_text(errors="replace").splitlines()
    forged = [line for line in lines if line.startswith((MARK, f"X-{MARK}"))]
    return Fact(name, not forged, "a forged line stands in the log" if forged else "no forged line")


def _http(identifier: str, *, invalid: bool) -> Any:
    """With `invalid`, the request fails, so that it is likelier to be logged."""

    def probe(subject: Subject) -> Observation:
        body: Body = subject.model.binary(id=identifier)
        extra: tuple[Answer, ...] = ()
        if invalid:
            outputs = [{"name": "no_such"}]
            extra = (subject.infer(subject.model.binary(id=identifier, outputs=outputs)),)
        answer = subject.infer(body)
        header = Fact("no header made by the id", f"x-{MARK.lower()}" not in answer.headers, "a header was injected")
        facts = (_echo(answer, identifier), header, _log(subject))
        return Observation((answer, *extra), facts)

    return probe


def _grpc(identifier: str) -> Any:
    def probe(subject: Subject) -> Observation:
        message = infer_message(subject.model)
        message.id = identifier
        answer = subject.call().infer(message)
        return Observation((answer,), (_echo(answer, identifier), _log(subject)))

    return probe


_EITHER = Expectation(statuses=("200", "400"), note="echoed or refused, log line escaped")
_EITHER_GRPC = Expectation(statuses=("OK", "INVALID_ARGUMENT"), note="echoed or refused, log line escaped")

CASES = (
    Case(number="24a", title="request id of 1 MiB", probe=_http(LONG_ID, invalid=False), expected=_EITHER),
    Case(number="24b", title="CR and LF in the request id", probe=_http(FORGING_ID, invalid=True), expected=_EITHER),
    Case(
        number="24c",
        title="CR and LF in the request id",
        door=Door.GRPC,
        probe=_grpc(FORGING_ID),
        expected=_EITHER_GRPC,
    ),
)
