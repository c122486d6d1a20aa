"""The proof that a generating engine executes on a GPU, which a native server makes at its start."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from servers.engines.interface import PROFILE_AT_START
from servers.language import torch_engine
from servers.language.engine import GenerationSettings, make_engine
from servers.language.specification import language_model
from servers.native.engine.generation_loop import describe
from tests.scripted_generation import ScriptedEngine


class PretendedEngine(ScriptedEngine):
    """Says that it executes on a GPU."""

    def settings(self) -> dict[str, object]:
        return {**super().settings(), "device": "cuda:0"}


def test_the_kernels_of_a_short_answer_are_in_the_description(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = PretendedEngine()

    def probe(infer: Callable[[], object], device: torch.device) -> dict[str, object]:
        infer()
        return {"kernel_count": engine.steps, "device": str(device)}

    monkeypatch.setattr(torch_engine, "probe_kernels", probe)
    assert describe(engine).details["kernel_probe"] == {"kernel_count": 2, "device": "cuda:0"}
    assert (engine.active, engine.waiting) == (0, 0)
    monkeypatch.setenv(PROFILE_AT_START, "0")
    assert "kernel_probe" not in describe(engine).details


def test_a_driver_that_refuses_stops_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(infer: Callable[[], object], device: torch.device) -> dict[str, object]:
        raise RuntimeError("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES")

    monkeypatch.setattr(torch_engine, "probe_kernels", refuse)
    assert "kernel_probe" not in describe(PretendedEngine()).details
    assert "kernel_probe" not in describe(ScriptedEngine()).details


@pytest.mark.parametrize("engine", ["slots", "continuous"])
def test_engines_say_where_their_parameters_are(engine: str) -> None:
    made = make_engine(
        language_model("language:tiny"), GenerationSettings(engine=engine, device="cpu", slots=2, max_length=64)
    )
    made.load()
    try:
        devices = made.settings()["parameters_by_device"]
    finally:
        made.close()
    assert isinstance(devices, dict)
    assert list(devices) == ["cpu"]
    assert devices["cpu"] > 10
