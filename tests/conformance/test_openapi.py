"""The native server against the protocol's OpenAPI description, by schemathesis: its own requests, its own checks."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from loadgen.conformance.servers import DEFAULTS

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is a development package")
yaml = pytest.importorskip("yaml", reason="comes with schemathesis")

DOCUMENT = Path(__file__).parents[2] / "docs" / "openapi" / "open-inference-v2.yaml"


def description() -> dict:
    """With the served model among the names, so that not every request ends as an unknown model."""
    document = yaml.safe_load(DOCUMENT.read_text())
    parameters = document["components"]["parameters"]
    parameters["ModelName"]["schema"]["enum"] = ["openclip_vit_b32", "no_such_model"]
    parameters["ModelVersion"]["schema"]["enum"] = ["1", "999", "abc"]
    return document


SCHEMA = schemathesis.openapi.from_dict(description())


def test_the_description_has_every_route_of_the_protocol() -> None:
    assert len(SCHEMA) == len(description()["paths"]) == 9


CHECKS = [
    schemathesis.checks.not_a_server_error,
    schemathesis.checks.status_code_conformance,
    schemathesis.checks.content_type_conformance,
    schemathesis.checks.response_schema_conformance,
    schemathesis.checks.negative_data_rejection,
    schemathesis.checks.unsupported_method,
]


@pytest.mark.slow
@SCHEMA.parametrize()
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_the_native_server_keeps_to_it(case, native_session) -> None:
    case.call_and_validate(base_url=native_session.subject(DEFAULTS).url, checks=CHECKS)


@pytest.mark.parametrize(("faults", "sound"), [((), True), (("plain-errors",), False)])
def test_the_checks_see_an_error_that_is_no_json(sessions, faults: tuple[str, ...], sound: bool) -> None:
    case = SCHEMA["/v2/models/{model_name}"]["GET"].Case(path_parameters={"model_name": "no_such_model"})
    url = sessions(*faults).subject(DEFAULTS).url
    if sound:
        case.call_and_validate(base_url=url, checks=CHECKS)
        return
    with pytest.raises(BaseExceptionGroup, match=r"Content-Type|JSON"):
        case.call_and_validate(base_url=url, checks=CHECKS)
