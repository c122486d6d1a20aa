"""The memory-growth run: quiet on a server that keeps nothing, and it catches a planted leak."""

from __future__ import annotations

import pytest

from loadgen.conformance.growth import GrowthPlan, growth_case, measure_growth
from loadgen.conformance.records import Verdict
from loadgen.conformance.runner import CaseRun
from loadgen.conformance.settings import AS_STARTED

SHORT = GrowthPlan(seconds=0.5, rounds=4, concurrency=4, batch=1, bound_bytes=20_000_000)


def verdict(session, plan: GrowthPlan) -> Verdict:
    (result,) = CaseRun(session, destructive=True).run([growth_case(plan)], announce=lambda _: None)
    return result.verdict


@pytest.mark.slow
def test_a_sound_server_passes(sessions) -> None:
    assert verdict(sessions(), SHORT) is Verdict.CONFORMS


@pytest.mark.slow
def test_a_planted_leak_is_caught(sessions) -> None:
    assert verdict(sessions("leak"), SHORT) is Verdict.DEVIATES


@pytest.mark.slow
def test_what_grows_before_the_midpoint_is_no_leak(sessions) -> None:
    reading = measure_growth(sessions().subject(AS_STARTED), SHORT)
    assert len(reading.resident) == SHORT.rounds + 1
    assert reading.growth_bytes == reading.resident[-1] - reading.resident[2]
    assert reading.answered > 0
    assert reading.failed == 0


@pytest.mark.slow
def test_the_native_server_does_not_grow(native_session) -> None:
    plan = GrowthPlan(seconds=1, rounds=6, concurrency=8, batch=1)
    assert verdict(native_session, plan) is Verdict.CONFORMS


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_the_native_server_does_not_grow_over_minutes(native_session) -> None:
    assert verdict(native_session, GrowthPlan()) is Verdict.CONFORMS
