"""The memory-growth run: quiet on a server that keeps nothing, and it catches a planted leak."""

from __future__ import annotations

from typing import Any

import pytest

from loadgen.conformance.cases.long_runs import growth_case
from loadgen.conformance.records import CaseVerdict, Fact
from loadgen.conformance.runner import CaseRun
from loadgen.conformance.servers import DEFAULTS

SHORT: dict[str, Any] = {"seconds": 0.5, "rounds": 4, "concurrency": 4, "batch": 1, "bound_bytes": 20_000_000}


def verdict(session, **load: Any) -> CaseVerdict:
    (result,) = CaseRun(session, destructive=True).run([growth_case(**load)], announce=lambda _: None)
    return result.verdict


@pytest.mark.slow
def test_a_sound_server_passes(sessions) -> None:
    assert verdict(sessions(), **SHORT) is CaseVerdict.CONFORMS


@pytest.mark.slow
def test_a_planted_leak_is_caught(sessions) -> None:
    assert verdict(sessions("leak"), **SHORT) is CaseVerdict.DEVIATES


def test_growth_before_the_midpoint_is_not_a_leak(sessions, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory before and after each round, in bytes."""
    subject = sessions().subject(DEFAULTS)
    for memory, ok in (([0, 9e9, 9e9, 9e9, 9e9], True), ([0, 0, 0, 0, 9e9], False)):
        readings = iter(memory)
        monkeypatch.setattr(type(subject), "resident_bytes", lambda _, readings=readings: int(next(readings)))
        answered, grown = growth_case(**SHORT | {"seconds": 0.1}).observe(subject)
        assert isinstance(answered, Fact)
        assert isinstance(grown, Fact)
        assert answered.ok
        assert grown.ok is ok


@pytest.mark.slow
def test_the_native_server_does_not_grow(native_session) -> None:
    assert verdict(native_session, seconds=1, rounds=6, concurrency=8, batch=1) is CaseVerdict.CONFORMS


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_the_native_server_does_not_grow_over_minutes(native_session) -> None:
    assert verdict(native_session) is CaseVerdict.CONFORMS
