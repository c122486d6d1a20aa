"""The report of a result: its chapters and sections, in their order, for all formats.

A new table is one function that returns a section, and its place here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import loadgen.report.document as doc
from loadgen.analysis.result import Result
from loadgen.comparison.claims import join
from loadgen.report.sections import (
    checks,
    cold_starts,
    comparisons,
    conditions,
    gpu_verification,
    measurements,
    rates,
    verdict,
    why,
)
from loadgen.report.sections.charts import several, titles

MakeSection = Callable[[Result], doc.Section | None]
CONTENTS: Sequence[tuple[str, Sequence[MakeSection]]] = (
    ("", (verdict.caveats, verdict.verdict, verdict.overview, verdict.brief_why, verdict.brief_proof)),
    ("Comparisons", (comparisons.comparisons, comparisons.ranking, comparisons.thresholds)),
    ("Why", (why.why,)),
    (
        "Detail",
        (
            measurements.latency,
            measurements.batch_sizes,
            rates.open_loops,
            rates.rate_search,
            rates.ramp,
            cold_starts.cold_starts,
            cold_starts.container_starts,
            measurements.ceilings,
            measurements.executed_batches,
            measurements.measurements,
            measurements.blocks,
        ),
    ),
    ("Proof", (gpu_verification.gpu_verification, checks.same_answers, checks.checks)),
    ("Conditions", (conditions.arms, conditions.experiment, conditions.environment, conditions.reproduce)),
)


def result_document(result: Result, contents: Sequence[tuple[str, Sequence[MakeSection]]] = CONTENTS) -> doc.Document:
    """The document of a result."""
    base, *others = titles(result).values()
    what = f"{len(others) + 1} arms serving" if several(result) else "A/B of"
    return doc.Document(
        f"{'VALID' if result.verdict.valid else 'INVALID'} · {base} against {join(others)}",
        tuple(
            doc.Chapter(title, tuple(section for make in makers if (section := make(result)) is not None))
            for title, makers in contents
        ),
        about=f"{what} {result.experiment.model}",
        started_at=result.environment.started_at if result.environment is not None else None,
    )
