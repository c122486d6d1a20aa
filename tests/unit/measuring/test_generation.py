"""What is measured of an engine that generates tokens, with one whose time per step and per prompt is known."""

from __future__ import annotations

import time
from typing import Any

import pytest

from servers.engines.settings import EngineError
from servers.language.engine import GenerationSettings
from servers.language.specification import language_model
from servers.measuring import generation
from servers.measuring.generation import copy_bytes_per_s, measure_generation, step_bytes, table_of
from tests.again import again

TINY = language_model("language:tiny")


def test_the_bytes_of_a_step_are_those_of_the_definitions() -> None:
    """BF16, from the shapes: keys and values of 22,528 and 36,864 bytes per token; the table of 32,000 tokens is read
    only if it is also the output."""
    llama, gpt2 = language_model("language:tinyllama-1.1b"), language_model("language:gpt2")
    weights = step_bytes(llama, 1, 0, "bf16")
    assert weights == (1_100_048_384 - 32_000 * 2048) * 2
    assert step_bytes(llama, 4, 512, "bf16") - weights == 4 * 512 * 22_528
    assert step_bytes(gpt2, 1, 0, "bf16") == (124_439_808 - 1024 * 768) * 2
    assert step_bytes(gpt2, 1, 100, "bf16") - step_bytes(gpt2, 1, 0, "bf16") == 100 * 36_864


def test_a_mixture_reads_the_experts_that_a_batch_chooses() -> None:
    """3.6 of 20.9 billion parameters for one request; 28.2 of 32 experts for 16. Half of the layers see 128 tokens."""
    model = language_model("language:gpt-oss-20b")
    assert step_bytes(model, 1, 0, "bf16") / 2 == pytest.approx(3.6e9, rel=0.01)
    experts = (step_bytes(model, 16, 0, "bf16") - step_bytes(model, 1, 0, "bf16")) / (28.2 - 4)
    assert experts == pytest.approx(24 * 3 * 2880 * 2880 * 2, rel=0.01)
    cache = step_bytes(model, 1, 1128, "bf16") - step_bytes(model, 1, 128, "bf16")
    assert cache == pytest.approx(1000 * 12 * 2 * 8 * 64 * 2)


def test_the_bandwidth_of_a_copy_is_plausible() -> None:
    assert 1e9 < copy_bytes_per_s("cpu") < 1e12


@again  # one repetition of 8 tokens, which one wait for a core makes several times longer
def test_a_real_engine_is_measured() -> None:
    settings = GenerationSettings("continuous", "cpu", slots=3, threads=1)
    document = measure_generation(TINY, settings, [1, 3], [8], tokens=8, repetitions=1)
    assert "prompt tokens/s" in table_of(document)[1]
    assert document["engine"]["engine"] == "continuous"
    rows = document["measurements"]
    assert [row["batch"] for row in rows] == [1, 3]
    for row in rows:
        assert row["largest_deficit"] < 1e-3
        assert row["best_share"] == 1
        assert row["distinct_share"] > 0.5
        assert 8 < row["context"] < 40
        assert row["tokens_per_s"] == pytest.approx(row["batch"] * 1000 / row["step_ms"], rel=0.8)


def test_an_answer_that_is_too_short_to_measure_is_an_error() -> None:
    with pytest.raises(EngineError, match="exceed the maximum length of 32"):
        measure_generation(
            TINY, GenerationSettings("continuous", "cpu", slots=1, max_length=32, threads=1), [1], [16], tokens=16
        )


class TimedEngine:
    """Takes a known time per step and for all prompts; its tokens are counted numbers."""

    slots, max_length, vocabulary, eos = 4, 512, 1024, ()
    prompt_s, step_s = 0.05, 0.01

    def __init__(self, *_: object) -> None:
        self.requests: dict[int, int] = {}
        self.waiting = 0

    @property
    def active(self) -> int:
        return len(self.requests)

    def settings(self) -> dict[str, object]:
        return {"engine": "timed", "device": "cpu", "precision": "fp32"}

    def load(self) -> None: ...

    def warm_up(self) -> None: ...

    def close(self) -> None: ...

    def add(self, request: Any) -> None:
        self.requests[request.number] = 0

    def cancel(self, number: int) -> None:
        self.requests.pop(number, None)

    def step(self) -> list[Any]:
        from servers.language.engine import Emission

        time.sleep(self.prompt_s if not any(self.requests.values()) else self.step_s)
        for number in self.requests:
            self.requests[number] += 1
        return [Emission(number, (count,)) for number, count in self.requests.items()]


@again
def test_times_are_those_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "make_engine", TimedEngine)
    (row,) = measure_generation(TINY, GenerationSettings(), [4], [10], tokens=10, repetitions=2)["measurements"]
    assert row["first_token_ms"] == pytest.approx(50, rel=0.3)
    assert row["step_ms"] == pytest.approx(10, rel=0.3)
    assert row["tokens_per_s"] == pytest.approx(400, rel=0.3)
    assert row["prompt_tokens_per_s"] == pytest.approx(800, rel=0.3)
    assert row["largest_deficit"] > 1  # its tokens are nobody's choice
