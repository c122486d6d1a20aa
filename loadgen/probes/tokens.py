"""Streamed answers of language models: how tokens arrive at each arm, and what they cost.

The figures are metrics (`loadgen.metrics.tokens`), the totals are in `tokens_analysis`; here are the sections.
"""

from __future__ import annotations

from loadgen.probes.registry import Probe
from loadgen.probes.tokens_analysis import TokensFound, analyse
from loadgen.records.probes import TokensCompared
from loadgen.records.run import Experiment


def wanted(_: Experiment) -> bool:
    """Nothing is measured here: the blocks hold the tokens, and `answers` keeps some of them."""
    return False


def measure(_: object) -> None:
    """Nothing."""


PROBE = Probe(
    wanted=wanted,
    measure=measure,
    records=(TokensCompared,),
    finding=TokensFound,
    analyse=analyse,
)
