"""Raw requests from a seed: always the same ones, none of which a server may answer with a fault."""

from __future__ import annotations

import pytest

from loadgen.client.endpoint import TensorSignature
from loadgen.conformance.cases.long_runs import ROUTES, VERBS, fuzz, make_request
from loadgen.conformance.model import ServedModel
from loadgen.conformance.servers import DEFAULTS

MODEL = ServedModel("m", (TensorSignature("x", "FP32", (-1, 3)),), (TensorSignature("y", "FP32", (-1, 3)),), 4)
SHORT, LONG = 500, 10_000


def test_a_seed_makes_the_same_requests_again() -> None:
    first = [make_request(1, index, MODEL, "a:1") for index in range(50)]
    assert first == [make_request(1, index, MODEL, "a:1") for index in range(50)]
    assert first != [make_request(2, index, MODEL, "a:1") for index in range(50)]


def test_all_verbs_and_routes_are_used() -> None:
    assert (len(VERBS), len(ROUTES)) == (8, 20)
    requests = [make_request(0, index, MODEL, "a:1") for index in range(2000)]
    for word in (*VERBS, *ROUTES):
        assert any(word.replace("{model}", "m").encode("latin-1") in data for data in requests), word


def test_a_correct_server_passes(sessions) -> None:
    facts = list(fuzz(sessions().subject(DEFAULTS), SHORT, seed=0))
    assert [fact for fact in facts if not fact.ok] == []


def test_a_fault_is_found_with_the_request_that_shows_it(sessions) -> None:
    facts = list(fuzz(sessions("500-for-bad-json").subject(DEFAULTS), SHORT, seed=0))
    (fact,) = [fact for fact in facts if not fact.ok]
    assert fact.name == "no 5xx"
    assert "500 to request" in fact.seen


@pytest.fixture
def native(native_session):
    """The native server with the null engine."""
    return native_session.subject(DEFAULTS)


@pytest.mark.slow
def test_the_native_server_passes_a_short_run(native) -> None:
    facts = list(fuzz(native, SHORT, seed=0))
    assert [fact for fact in facts if not fact.ok] == []
    assert native.golden_difference() is None


@pytest.mark.slow
def test_the_native_server_passes_a_long_run(native) -> None:
    facts = list(fuzz(native, LONG, seed=1))
    assert [fact for fact in facts if not fact.ok] == []
    assert native.golden_difference() is None
