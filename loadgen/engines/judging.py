"""Has the reference judge the answers of a language model's engines, in a process of its own after all of them.

The engines' processes have ended then, so the device holds the model once.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from loadgen.measure.errors import RunError
from loadgen.measure.token_answers import ReferenceDocument, ask_reference
from loadgen.records.matrix import GeneratedAnswer, JudgedCell, JudgedMatrix, MatrixPlan, Shape, Visit


class _Given(NamedTuple):
    configuration: int
    shape: Shape
    round: int
    answer: GeneratedAnswer


def judge_visits(plan: MatrixPlan, visits: Sequence[Visit], folder: Path, abserve: Sequence[str]) -> JudgedMatrix:
    """The answers of all visits beside the reference of their model in their precision."""
    asked: dict[tuple[str, str, str], list[_Given]] = {}
    for visit in visits:
        configuration = plan.configurations[visit.configuration]
        answers = asked.setdefault((configuration.model, configuration.precision, configuration.device), [])
        answers += [
            _Given(visit.configuration, cell.shape, visit.round, answer)
            for cell in visit.cells
            if cell.generated
            for answer in cell.generated.answers
        ]
    cells: list[JudgedCell] = []
    for (model, precision, device), given in asked.items():
        if given:
            cells += _judged(plan, model, precision, device, given, folder, abserve)
    return JudgedMatrix(cells=tuple(cells))


def _judged(
    plan: MatrixPlan,
    model: str,
    precision: str,
    device: str,
    given: Sequence[_Given],
    folder: Path,
    abserve: Sequence[str],
) -> list[JudgedCell]:
    weights = plan.settings.get("weights")
    document, error = ReferenceDocument.empty(len(given)), None
    try:
        with TemporaryDirectory(dir=folder, prefix="reference-") as files:
            document = ask_reference(
                [(visited.answer.prompt, visited.answer.output) for visited in given],
                model,
                None if weights is None else str(weights),
                precision,
                Path(files),
                abserve,
                device,
            )
    except RunError as exc:
        error = str(exc)
    shared = document.fields(precision, error)
    groups: dict[tuple[int, Shape], list[int]] = {}
    for place, visited in enumerate(given):
        groups.setdefault((visited.configuration, visited.shape), []).append(place)
    return [
        JudgedCell(
            configuration=configuration,
            batch=shape[0],
            length=shape[1],
            answers=tuple(
                document.answers[place].beside(
                    given[place].answer.output,
                    document.eos,
                    block=f"round {given[place].round + 1}",
                    request=number,
                    user=0,
                )
                for number, place in enumerate(places)
            ),
            **shared,
        )
        for (configuration, shape), places in groups.items()
    ]
