"""The protocol's OpenAPI description has every route, and the checks of schemathesis see a server that breaks it."""

from __future__ import annotations

import pytest

from loadgen.conformance.servers import DEFAULTS
from tests.conformance.openapi import description, schema, validate


def test_the_description_has_every_route_of_the_protocol() -> None:
    assert len(schema()) == len(description()["paths"]) == 9


@pytest.mark.parametrize(("faults", "sound"), [((), True), (("plain-errors",), False)])
def test_the_checks_see_an_error_that_is_no_json(sessions, faults: tuple[str, ...], sound: bool) -> None:
    case = schema()["/v2/models/{model_name}"]["GET"].Case(path_parameters={"model_name": "no_such_model"})
    url = sessions(*faults).subject(DEFAULTS).url
    if sound:
        validate(case, url)
        return
    with pytest.raises(BaseExceptionGroup, match=r"Content-Type|JSON"):
        validate(case, url)
