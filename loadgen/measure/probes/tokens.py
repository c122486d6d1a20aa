"""Streamed answers of language models: how tokens arrive at each arm, and what they cost.

The figures are metrics (`loadgen.metrics.tokens`), the totals are in `loadgen.findings.tokens`. What is measured here
is whether the answers are right: a reference judges some of them once all servers are stopped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadgen.experiment.schedule import sends_load
from loadgen.findings.registry import Probe
from loadgen.findings.tokens import TokensFound, analyse
from loadgen.records.targets import Kind

if TYPE_CHECKING:
    from loadgen.measure.context import RunContext


def measure(context: RunContext) -> None:
    """Have the reference judge the answers that were kept, when the servers no longer use the machine."""
    from loadgen.measure.token_answers import TokenAnswers

    context.enter("comparing answers with the reference")
    if isinstance(context.answers, TokenAnswers):
        context.answers.judge(context.experiment, context.work, context.abserve)


PROBE = Probe(
    wanted=sends_load,
    measure=measure,
    finding=TokensFound,
    analyse=analyse,
    after_servers=True,
    of=Kind.TOKENS,
)
