"""The report of a result: its chapters and sections in their order, for all formats.

A new table is one function that returns a section, listed here or in the `sections` of its probe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import loadgen.report.document as doc
from loadgen.comparison.claims import join
from loadgen.probes.registry import probes
from loadgen.report.charts import several, titles
from loadgen.report.sections import checks, comparisons, conditions, verdict
from loadgen.verdict.result_file import Result

MakeSection = Callable[[Result], doc.Section | None]
PROBES = None
"""The place of the probes' sections in a chapter."""
CONTENTS: Sequence[tuple[str, Sequence[MakeSection | None]]] = (
    ("", (verdict.verdict, verdict.overview, verdict.brief_why, verdict.brief_proof)),
    ("Comparisons", (comparisons.comparisons, comparisons.ranking, comparisons.thresholds)),
    ("Why", (PROBES,)),
    ("Detail", (PROBES,)),
    ("Proof", (PROBES, checks.same_answers, checks.checks)),
    ("Conditions", (conditions.arms, conditions.experiment, conditions.environment, conditions.reproduce)),
)


def result_document(result: Result) -> doc.Document:
    """The document of a result."""
    base, *others = titles(result).values()
    of_probes = [probe.sections(result) for probe in probes()]

    def sections(title: str, makers: Sequence[MakeSection | None]) -> Iterator[doc.Section]:
        for make in makers:
            if make is PROBES:
                made = [section for chapters in of_probes for section in chapters.get(title, ())]
            else:
                made = [make(result)]
            yield from (section for section in made if section is not None)

    what = f"{len(others) + 1} arms serving" if several(result) else "A/B of"
    return doc.Document(
        f"{'VALID' if result.verdict.valid else 'INVALID'} · {base} against {join(others)}",
        tuple(doc.Chapter(title, tuple(sections(title, makers))) for title, makers in CONTENTS),
        about=f"{what} {result.experiment.model}",
        started_at=result.environment.started_at if result.environment is not None else None,
    )
