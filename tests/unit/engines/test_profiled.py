"""The profiled inference at a server's start: once, after which the description holds it, and never in the way."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from servers.engines.interface import PROFILE_AT_START, EngineDescription, profiled
from servers.engines.null import NullEngine
from servers.engines.settings import EngineSettings
from servers.models.registry import get_specification


class ProfilingEngine(NullEngine):
    """A null engine that can list kernels."""

    def __init__(self, failure: Exception | None = None) -> None:
        super().__init__(get_specification("openclip_vit_b32"), EngineSettings(kind="null"))
        self.calls = 0
        self._failure = failure

    def probe_kernels(self) -> Mapping[str, object] | None:
        self.calls += 1
        if self._failure is not None:
            raise self._failure
        return {"kernel_count": 7}

    def describe(self) -> EngineDescription:
        return EngineDescription("null", "1", "fp32", "eager", "cpu", 1, 32, "none", {"calls": self.calls})


def test_the_description_afterwards_holds_the_profile() -> None:
    engine = ProfilingEngine()
    description = profiled(engine)
    assert description is not None
    assert (engine.calls, description.details) == (1, {"calls": 1, "kernel_probe": {"kernel_count": 7}})


def test_an_engine_without_a_profiler_and_a_timed_start_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert profiled(NullEngine(get_specification("openclip_vit_b32"), EngineSettings(kind="null"))) is None
    monkeypatch.setenv(PROFILE_AT_START, "0")
    engine = ProfilingEngine()
    assert (profiled(engine), engine.calls) == (None, 0)


def test_a_driver_that_lets_nobody_profile_does_not_keep_a_server_from_starting() -> None:
    assert profiled(ProfilingEngine(RuntimeError("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES"))) is None
