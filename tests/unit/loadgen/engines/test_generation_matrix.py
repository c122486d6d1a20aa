"""A matrix of a language model: tokens of known times, answers with known deficits; and what rank makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from loadgen.cli.engines import _run
from loadgen.engines import judging, measure
from loadgen.engines.analyse import analyse
from loadgen.engines.files import cells_csv
from loadgen.engines.sections import matrix_document
from loadgen.engines.store import MatrixStore
from loadgen.measure.token_answers import JudgedTokens
from loadgen.ranking.analyse import from_matrix, rank
from loadgen.ranking.report import ranking_document
from loadgen.records.matrix import Configuration, GeneratedTokens, JudgedCell, JudgedMatrix, Matrix
from loadgen.records.ranks import TOKEN
from loadgen.records.run import RunState
from loadgen.records.store import read_one
from loadgen.report.renderers.markdown import render_markdown
from tests.unit.loadgen.engines.simulated_matrix import ENVIRONMENT, FINISHED, configuration, plan, visits

MODEL = "language:tiny"
SLOTS, CONTINUOUS = (
    configuration(engine, "eager", model=MODEL, precision="bf16", device="cuda:0", threads=None)
    for engine in ("slots", "continuous")
)
STEP_MS = {"slots": 1.0, "continuous": 5.0}


def matrix(deficits: dict[str, float] | None) -> Matrix:
    """Batches of 4 with prompts of 32; by engine the deficit of the second of each answer's two tokens."""
    asked = replace(plan(SLOTS, CONTINUOUS, batches=(4,), lengths=(32,), rounds=3), baseline="continuous/eager")

    def generated(_: Configuration, __: int, fields: dict[str, Any]) -> dict[str, Any]:
        more = {"cosine_min": None, "top1": None, "relative_error": None, "process_device_bytes": 3_000_000_000}
        step = GeneratedTokens(prompts_ns=(16_000_000,), context=64.0, step_bytes=1e6, copy_bytes_per_s=2e9)
        return fields | more | {"generated": step}

    made = [
        replace(visit, item=TOKEN)
        for visit in visits(asked, lambda each, _, __: STEP_MS[each.engine], change=generated)
    ]
    judged = None if deficits is None else JudgedMatrix(cells=tuple(
        JudgedCell(
            configuration=place, batch=4, length=32, precision="bf16", noise=0.0, mean_noise=0.01, most_noise=0.03,
            answers=tuple(
                JudgedTokens(
                    deficits=(0.0, deficits[each.engine]), best=(5, 7), largest=6.0, noise=(0.0, 0.02), random=4.7
                ).beside([5, 6], (), block="round 1", request=number, user=0)
                for number in range(4)
            ),
        )
        for place, each in enumerate(asked.configurations)
    ))  # fmt: skip
    return analyse(asked, ENVIRONMENT, made, FINISHED, judged)


def test_tokens_steps_and_prompts() -> None:
    slots, continuous = matrix({"slots": 0.02, "continuous": 0.02}).cells
    assert slots.items_per_second.value == pytest.approx(4000, rel=0.2)
    assert slots.speedup is not None
    assert slots.speedup.value == pytest.approx(5, rel=0.1)
    assert continuous.speedup is None
    assert slots.generation is not None
    assert slots.generation.prompt_tokens_per_second.value == pytest.approx(4 * 32 / 0.016)
    assert slots.generation.bandwidth_share.value == pytest.approx(0.5, rel=0.2)
    assert (slots.generation.answers, slots.generation.best_share) == (4, 0.5)
    assert slots.generation.mean_deficit == pytest.approx(0.01)
    assert slots.excluded is None


def test_a_deficit_that_rounding_does_not_explain_is_not_ranked() -> None:
    analysed = matrix({"slots": 1.0, "continuous": 0.02})
    slots, continuous = analysed.cells
    assert str(slots.excluded).startswith("wrong answers: 4 of 4; of one its tokens are 0.500 below")
    assert continuous.excluded is None
    ranking = rank([from_matrix("r", analysed)], [])
    assert [option.name for option in ranking.groups[0].options] == ["continuous/eager"]
    assert any("wrong answers" in left.reason for left in ranking.left_out)


def test_without_a_judgement_nothing_is_ranked() -> None:
    assert all("were not judged" in str(cell.excluded) for cell in matrix(None).cells)


def test_reports_and_ranking_speak_of_tokens() -> None:
    analysed = matrix({"slots": 0.02, "continuous": 0.02})
    text = render_markdown(matrix_document(analysed))
    assert "## Generation" in text
    assert "cosine" not in text.split("## Cells")[0]
    assert "with copies" not in text
    assert "mean_deficit" in cells_csv(analysed).splitlines()[0]
    ranking = rank([from_matrix("r", analysed)], [])
    (group,) = ranking.groups
    assert group.work.item == TOKEN
    best = group.options[0].point
    assert (round(best.first_token_ms or 0), group.work.length) == (16, "32")
    assert best.latency_ms is not None
    assert best.latency_ms.value == pytest.approx(1.0, rel=0.2)
    assert "without copies" not in render_markdown(ranking_document(ranking))


def test_a_judgement_that_is_interrupted_is_made_by_going_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = MatrixStore(tmp_path)

    class Measured:
        def __init__(self, *_: object, **__: object) -> None:
            """Everything is measured."""

        def run(self) -> RunState:
            store.write(FINISHED)
            return FINISHED

    def interrupted(*_: object) -> JudgedMatrix:
        raise KeyboardInterrupt

    monkeypatch.setattr(measure, "MatrixRun", Measured)
    monkeypatch.setattr(judging, "judge_visits", interrupted)
    assert _run(store, plan(SLOTS), ENVIRONMENT, None, None, fresh=True) == 130
    state = read_one(tmp_path, RunState)
    assert state is not None
    assert state.state == "interrupted"
    assert "abserve engines --resume" in capsys.readouterr().err
    assert (tmp_path / "report.html").exists()
