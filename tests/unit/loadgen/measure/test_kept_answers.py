"""How many answers of the load each arm keeps for the comparison."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from loadgen.client.messages import BlockOutcome, KeptAnswer, Open
from loadgen.client.traffic import packed
from loadgen.measure.answers import AnswersUnderLoad
from loadgen.measure.token_answers import TokenAnswers
from loadgen.records.run import Workload
from loadgen.records.store import RunStore
from loadgen.stats.agreement import tolerance_of

WORKLOAD = Workload(scenario="single", batch_size=1, concurrency=1, requests=1, seconds=1.0, max_seconds=2.0, rounds=8)
OPEN = Open(url="", batch_size=1, concurrency=1, requests=1, seconds=1.0, max_seconds=2.0, timeout_s=1.0)
IDS = tuple(packed(name, np.ones((1, 3), dtype=np.int64)) for name in ("prompt", "tokens"))
KEPT = KeptAnswer(request=0, user=0, body=0, first=0, rows=(0,), outputs=IDS)


def outcome(answers: int) -> BlockOutcome:
    return BlockOutcome(
        window_start_ns=0, window_end_ns=1, requests=100, errors=0, error_messages=(), cpu_ns=0, reconnects=0,
        cut_reason=None, storage_error=None, answers=(KEPT,) * answers,
    )  # fmt: skip


@pytest.mark.parametrize("kind", [AnswersUnderLoad, TokenAnswers])
@pytest.mark.parametrize("arms", [2, 8])
def test_of_many_arms_each_keeps_as_many_answers_as_of_two(
    tmp_path: Path, kind: type[AnswersUnderLoad], arms: int
) -> None:
    """All arms together were counted against what two of them keep: of eight, each kept 22 of the 64 that are promised.
    Rounds beyond the plan add one each."""
    answers = kind(RunStore(tmp_path), 0, tolerance_of(["fp32"]), least=64)
    kept: Counter[str] = Counter()
    for number in range(WORKLOAD.rounds + 3):
        for label in "abcdefgh"[:arms]:
            command = answers.keeping(OPEN, WORKLOAD, label, number)
            kept[label] += command.keep_answers
            answers.take(WORKLOAD, label, f"block {number}", command, outcome(command.keep_answers))
    assert set(kept.values()) == {64 + 3}
