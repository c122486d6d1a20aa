"""The native server against the protocol's OpenAPI description, by schemathesis: its own requests, its own checks."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

from loadgen.conformance.servers import DEFAULTS
from tests.conformance.openapi import schema, validate


@pytest.mark.slow
@schema().parametrize()
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_the_native_server_keeps_to_it(case, native_session) -> None:
    validate(case, native_session.subject(DEFAULTS).url)
