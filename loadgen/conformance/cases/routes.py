"""Cases 15 and 17: routes, verbs, models and versions that do not exist."""

from __future__ import annotations

from typing import Any

from loadgen.conformance.case import Case
from loadgen.conformance.grpc_calls import infer_message, messages
from loadgen.conformance.model import Model
from loadgen.conformance.probes import grpc_infers, requests
from loadgen.conformance.records import Door, ErrorBody, Expectation, Observation
from loadgen.conformance.subject import Subject

_NOT_FOUND = Expectation(statuses=("404",))
_GRPC_NOT_FOUND = Expectation(statuses=("NOT_FOUND",))


def _unknown_method(subject: Subject) -> Observation:
    return Observation((subject.call().call("NoSuchMethod", b""),))


def _of_another(model: Model, name: str, version: str) -> Any:
    message = infer_message(model)
    message.model_name, message.model_version = name or model.name, version
    return message


def _unknown_infer(subject: Subject) -> Observation:
    body = subject.model.binary()
    paths = (
        "/v2/models/no_such_model/infer",
        f"/v2/models/{subject.model.name}/versions/999/infer",
        f"/v2/models/{subject.model.name}/versions/abc/infer",
    )
    return Observation(tuple(subject.http("POST", path, headers=body.headers, body=body.content) for path in paths))


def _unknown_questions(subject: Subject) -> Observation:
    door, name = subject.call(), subject.model.name
    asked = (
        ("ModelMetadata", messages.ModelMetadataRequest(name="no_such_model")),
        ("ModelMetadata", messages.ModelMetadataRequest(name=name, version="999")),
        ("ModelConfig", messages.ModelConfigRequest(name="no_such_model")),
        ("ModelStatistics", messages.ModelStatisticsRequest(name="no_such_model")),
    )
    return Observation(tuple(door.call(method, message) for method, message in asked))


CASES = (
    Case(
        number="15a",
        title="unknown routes",
        probe=requests(
            ("GET", "/"), ("GET", "/v1/models"), ("GET", "/v2/no"), ("GET", "/v2/models/{model}/no"), ("POST", "/v2/no")
        ),
        expected=_NOT_FOUND,
    ),
    Case(
        number="15b",
        title="wrong verbs",
        probe=requests(
            ("POST", "/v2/health/live"),
            ("DELETE", "/v2/health/ready"),
            ("POST", "/v2"),
            ("GET", "/v2/models/{model}/infer"),
            ("PUT", "/v2/models/{model}/infer"),
            ("DELETE", "/v2/models/{model}"),
        ),
        expected=Expectation(statuses=("405",)),
    ),
    Case(
        number="15c",
        title="unknown method",
        door=Door.GRPC,
        probe=_unknown_method,
        expected=Expectation(statuses=("UNIMPLEMENTED",), error_body=ErrorBody.FRAMEWORK),
    ),
    Case(
        number="17a",
        title="inference with an unknown model or version",
        probe=_unknown_infer,
        expected=_NOT_FOUND,
    ),
    Case(
        number="17b",
        title="metadata and config of an unknown model or version",
        probe=requests(
            ("GET", "/v2/models/no_such_model"),
            ("GET", "/v2/models/{model}/versions/999"),
            ("GET", "/v2/models/no_such_model/config"),
        ),
        expected=_NOT_FOUND,
    ),
    Case(
        number="17c",
        title="ready and statistics of an unknown model or version",
        probe=requests(
            ("GET", "/v2/models/no_such_model/ready"),
            ("GET", "/v2/models/{model}/versions/999/ready"),
            ("GET", "/v2/models/no_such_model/stats"),
        ),
        expected=_NOT_FOUND,
    ),
    Case(
        number="17d",
        title="inference with an unknown model or version",
        door=Door.GRPC,
        probe=grpc_infers(
            lambda m: _of_another(m, "no_such_model", ""),
            lambda m: _of_another(m, "", "999"),
        ),
        expected=_GRPC_NOT_FOUND,
    ),
    Case(
        number="17e",
        title="metadata, config and statistics of an unknown model or version",
        door=Door.GRPC,
        probe=_unknown_questions,
        expected=_GRPC_NOT_FOUND,
    ),
)
