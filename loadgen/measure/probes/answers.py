"""Answers under load: compares a sample of them with the answers to the same inputs sent alone.

The comparison runs once this start of the servers has no more load to run; `loadgen.measure.answers` has kept the
sample.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadgen.experiment.schedule import sends_load
from loadgen.findings.registry import Probe
from loadgen.records.targets import Kind

if TYPE_CHECKING:
    from loadgen.measure.context import RunContext


def measure(context: RunContext) -> None:
    """Compare and store the answers kept under load; the checks judge them. Raises `StorageError`."""
    context.enter("comparing answers under load")
    context.answers.compare(context.arms, context.signatures, context.inputs, context.restart)


PROBE = Probe(wanted=sends_load, measure=measure, of=Kind.TENSORS)
