"""Has the reference judge the answers of a language model's engines, in a process of its own after all of them.

The engines' processes have ended then, so the device holds the model once.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from loadgen.measure.errors import RunError
from loadgen.measure.token_answers import ReferenceDocument, ask_reference
from loadgen.records.matrix import GeneratedAnswer, JudgedCell, JudgedMatrix, MatrixPlan, Shape, Visit
from loadgen.records.probes import ReferenceAnswer

_Given = tuple[int, Shape, int, GeneratedAnswer]
"""The place of a configuration, the shape of a cell, the round, and an answer there."""


def judge_visits(plan: MatrixPlan, visits: Sequence[Visit], folder: Path, abserve: Sequence[str]) -> JudgedMatrix:
    """The answers of all visits beside the reference of their model in their precision."""
    asked: dict[tuple[str, str, str], list[_Given]] = {}
    for visit in visits:
        configuration = plan.configurations[visit.configuration]
        answers = asked.setdefault((configuration.model, configuration.precision, configuration.device), [])
        answers += [
            (visit.configuration, cell.shape, visit.round, answer)
            for cell in visit.cells
            if cell.generated
            for answer in cell.generated.answers
        ]
    cells: list[JudgedCell] = []
    for of, given in asked.items():
        if given:
            cells += _judged(plan, *of, given, folder, abserve)
    return JudgedMatrix(cells=tuple(cells))


def _judged(
    plan: MatrixPlan, model: str, precision: str, device: str, given: Sequence[_Given], folder: Path,
    abserve: Sequence[str],
) -> list[JudgedCell]:  # fmt: skip
    weights = plan.settings.get("weights")
    document, error = ReferenceDocument.empty(len(given)), None
    try:
        with TemporaryDirectory(dir=folder, prefix="reference-") as files:
            document = ask_reference(
                [(answer.prompt, answer.output) for *_, answer in given],
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
    groups: dict[tuple[int, Shape], list[ReferenceAnswer]] = {}
    for (configuration, shape, number, answer), judged in zip(given, document.answers, strict=True):
        answers = groups.setdefault((configuration, shape), [])
        block, request = f"round {number + 1}", len(answers)
        answers.append(judged.beside(answer.output, document.eos, block=block, request=request, user=0))
    return [
        JudgedCell(configuration=configuration, batch=batch, length=length, answers=tuple(answers), **shared)
        for (configuration, (batch, length)), answers in groups.items()
    ]
