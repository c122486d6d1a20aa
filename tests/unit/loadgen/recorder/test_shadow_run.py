"""The verdict of a shadow on pairs whose times are planted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from loadgen.client.connection import Address
from loadgen.client.grpc_messages import ModelInferResponse
from loadgen.metrics.comparisons import Outcome
from loadgen.recorder import shadow_run
from loadgen.recorder.metrics import ShadowMetrics
from loadgen.recorder.shadow import PairedRequest, Shadow
from loadgen.recorder.shadow_run import ShadowRun, whose_turn
from loadgen.records.run import ArmRequest
from loadgen.records.samples import MOST_MESSAGES, NS_PER_S
from loadgen.records.store import RunStore, read_run

BLOCKS, PAIRS = 24, 12
ARMS = ArmRequest(label="a", target="http://127.0.0.1:1"), ArmRequest(label="b", target="http://127.0.0.1:1")


def verdicts(folder: Path, times: float, seed: int, *, swap: bool = False) -> set[Outcome]:
    return planted(folder, times, seed, swap=swap)[1]


def begun(
    folder: Path, say: Callable[[Outcome, str], None] = lambda *_: None, *, swap: bool = False
) -> tuple[ShadowRun, Shadow, list[str]]:
    """A run, what pairs its requests, and why it failed, if it does."""
    failures: list[str] = []
    run = ShadowRun(
        RunStore(folder), ARMS, share=1.0, block_s=1.0, margin=0.05, say=say, failed=failures.append, takes_turns=swap
    )
    return run, Shadow(Address("127.0.0.1", 1), None, paired=run.take), failures


def planted(folder: Path, times: float, seed: int, *, swap: bool = False) -> tuple[ShadowRun, set[Outcome]]:
    """A run, and the verdicts after each block, of a candidate that takes so many times the latency. Both servers feel
    the same load, which lasts for blocks, and each its own noise. With `swap` they take turns."""
    rng = np.random.default_rng(seed)
    said: list[Outcome] = []
    run, shadow, failures = begun(folder, say=lambda verdict, _: said.append(verdict), swap=swap)
    load = 0.0
    turns = 2 if swap else 1
    for turn in range(turns * (BLOCKS + 1)):
        load = 0.7 * load + rng.normal(0, 0.2)
        for number in range(PAIRS):
            sent_ns = run.started_ns + int((turn + 0.2) * NS_PER_S) + number * 1_000_000
            primary, copy = (
                PairedRequest(shadow, "http", "/v2/models/m/infer", {}, sent_ns, sent_ns=sent_ns, status=200)
                for _ in range(2)
            )
            for request, factor in ((primary, 1.0), (copy, times)):
                latency_ns = int(20e6 * factor * np.exp(load + rng.normal(0, 0.1)))
                request.first_byte_ns = request.end_ns = sent_ns + latency_ns
            if run.seed is None:
                run.take(primary, copy)
            else:
                answered = {"a": primary, "b": copy}[whose_turn(run.seed, turn)]
                answered.arm = whose_turn(run.seed, turn)
                run.take(answered, None)
    assert run.finish(100)
    assert (failures, len(said)) == ([], BLOCKS)
    return run, set(said)


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize(("times", "winner"), [(1.3, "baseline_better"), (0.7, "arm_better")])
def test_a_planted_difference_is_found(times: float, winner: Outcome, swap: bool, tmp_path: Path) -> None:
    """Alternating servers feel different loads, so more may be needed."""
    found = verdicts(tmp_path / "run", times, 1, swap=swap)
    assert found <= {winner, "inconclusive"}
    assert swap or winner in found


def test_prometheus_is_shown_the_counts_the_latencies_and_the_ratio(tmp_path: Path) -> None:
    run, _ = planted(tmp_path / "run", 1.3, 1)
    run.counts["requests"] = 1000
    registry = CollectorRegistry(auto_describe=False)
    registry.register(ShadowMetrics(run))
    shown = registry.get_sample_value
    pairs = (BLOCKS + 1) * PAIRS
    assert [shown(f"abserve_shadow_{name}_total") for name in ("requests", "pairs", "different")] == [1000, pairs, 0]
    assert [shown("abserve_shadow_latency_seconds_count", {"arm": arm}) for arm in "ab"] == [BLOCKS * PAIRS] * 2
    a, b = (shown("abserve_shadow_latency_seconds_sum", {"arm": arm}) for arm in "ab")
    low, ratio, high = (shown(f"abserve_shadow_ratio{end}") for end in ("_low", "", "_high"))
    assert a
    assert b
    assert low
    assert ratio
    assert high
    assert 1.1 < b / a < 1.5
    assert 1.0 < low < ratio < high < 1.6
    assert shown("abserve_shadow_blocks") == BLOCKS


@pytest.mark.parametrize("seed", range(20))
def test_turns_come_in_pairs_of_random_order_that_balance(seed: int) -> None:
    turns = [whose_turn(seed, turn) for turn in range(400)]
    pairs = [turns[place : place + 2] for place in range(0, 400, 2)]
    assert {tuple(sorted(pair)) for pair in pairs} == {("a", "b")}
    assert all({first[0], second[0]} == {"a", "b"} for first, second in zip(pairs[::2], pairs[1::2], strict=True))
    assert 20 < sum(pair[0] == "a" for pair in pairs[::2]) < 80  # else in 1 of 10⁹


def pair_of(
    shadow: Shadow, transport: Literal["http", "grpc"], route: str, content: bytes, *answers: bytes
) -> list[PairedRequest]:
    """A request and its copy, which both servers have answered with success."""
    return [
        PairedRequest(
            shadow,
            transport,
            route,
            {},
            1,
            content=[content],
            answer=[answer],
            status=200 if transport == "http" else 0,
            sent_ns=1,
            first_byte_ns=2,
            end_ns=3,
        )
        for answer in answers
    ]


def message() -> bytes:
    answer = ModelInferResponse(model_name="m")
    answer.outputs.add(name="y", datatype="FP32", shape=[1])
    answer.raw_output_contents.append(bytes(4))
    serialised: bytes = answer.SerializeToString()
    return serialised


JSON = b'{"outputs": [{"name": "y", "datatype": "FP32", "shape": [1], "data": [1.0]}]}'
WORDS = b'{"choices": [{"text": "words", "finish_reason": "stop"}]}'
CALL = "/inference.GRPCInferenceService/ModelInfer"
TEXT, INFER = "/v1/completions", "/v2/models/m/infer"


@pytest.mark.parametrize(
    ("pair", "compared", "wrong"),
    [
        (("http", TEXT, b'{"prompt": "\xff"}', b"{}", b"{}"), 0, 0),
        (("http", TEXT, b'{"temperature": 1%b}' % (b"0" * 400), WORDS, WORDS), 0, 0),
        (("grpc", CALL, b"", message(), b"\xff\xff"), 1, 1),
        (("grpc", CALL, b"", b"\xff\xff", message()), 0, 0),
        (("http", INFER, b"{}", JSON, b"<html>"), 1, 1),
        (("http", INFER, b"{}", b"<html>", JSON), 0, 0),
    ],
    ids=[
        "no UTF-8",
        "huge temperature",
        "no message",
        "no message of the primary",
        "no JSON",
        "no JSON of the primary",
    ],
)
def test_what_cannot_be_read_costs_its_pair_and_only_the_candidate_is_wrong(
    pair: Any, compared: int, wrong: int, tmp_path: Path
) -> None:
    run, shadow, failures = begun(tmp_path / "run")
    run.take(*pair_of(shadow, *pair))
    assert run.finish(100)
    assert failures == []
    assert (run.record.pairs, run.record.compared, run.record.wrong) == (1, compared, wrong)


def test_a_candidate_that_always_fails_takes_a_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks had no end, and a message for each request."""
    monkeypatch.setattr(shadow_run, "MOST_ROWS", 600)
    run, shadow, failures = begun(tmp_path / "run")
    for number in range(2000):
        primary, copy = pair_of(shadow, "http", INFER, b"{}", JSON, b"")
        sent_ns = run.started_ns + number // 100 * 10**9
        primary.sent_ns, primary.end_ns, copy.sent_ns = sent_ns, sent_ns + 1, sent_ns
        copy.end_ns, copy.failure = None, f"request {number} failed"
        run.take(primary, copy)
    assert run.finish(100)
    assert failures == []
    blocks = read_run(tmp_path / "run").blocks
    assert sum(block.record.requests for block in blocks) == 4000
    assert max(block.record.requests for block in blocks) <= 400
    assert max(len(block.record.error_messages) for block in blocks) == MOST_MESSAGES


def test_a_model_that_the_primary_does_not_have_is_none_of_the_run(tmp_path: Path) -> None:
    run, shadow, _ = begun(tmp_path / "run")
    run.take(*pair_of(shadow, "http", INFER, b"{}", JSON, JSON))
    wrong = pair_of(shadow, "http", "/v2/models/other/infer", b"{}", b"no", b"no")
    for request in wrong:
        request.status = 404
    run.take(*wrong)
    assert run.finish(100)
    assert read_run(tmp_path / "run").experiment.model == "m"
