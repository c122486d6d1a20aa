"""The protocol's OpenAPI description as schemathesis reads it, which takes a second to import: only on use."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

DOCUMENT = Path(__file__).parents[2] / "docs" / "openapi" / "open-inference-v2.yaml"


def description() -> dict[str, Any]:
    """With the served model among the names, so that not every request ends as an unknown model."""
    yaml = pytest.importorskip("yaml", reason="comes with schemathesis")
    document: dict[str, Any] = yaml.safe_load(DOCUMENT.read_text())
    parameters = document["components"]["parameters"]
    parameters["ModelName"]["schema"]["enum"] = ["openclip_vit_b32", "no_such_model"]
    parameters["ModelVersion"]["schema"]["enum"] = ["1", "999", "abc"]
    return document


@cache
def schema() -> Any:
    schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is a development package")
    return schemathesis.openapi.from_dict(description())


def validate(case: Any, url: str) -> None:
    """Send a request and check the answer."""
    import schemathesis

    names = (
        "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance",
        "negative_data_rejection", "unsupported_method",
    )  # fmt: skip
    case.call_and_validate(base_url=url, checks=[getattr(schemathesis.checks, name) for name in names])
