"""The scenarios: what each is called, and in which words a figure was measured in it.

A new one is its name and its entry here, and the function that makes its workloads (`LOADS` of
`loadgen.experiment.plan`, or `token_workloads` of `loadgen.experiment.language`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import PurePath
from typing import Any, Literal, NamedTuple

from loadgen.base.quantities import counted
from loadgen.records.targets import Kind

LanguageScenario = Literal["long-prompt", "long-answer", "shared-prefix", "goodput"]
"""Scenarios of language models alone."""
PlannedScenario = Literal[
    "cold-start", "single", "batched", "concurrent", "open", "traffic", "slo", "surface", LanguageScenario
]  # fmt: skip
"""Scenarios of `abserve compare`."""
Scenario = Literal[PlannedScenario, "shadow"]


class ScenarioEntry(NamedTuple):
    """One scenario. `Any` stands for a `Workload`, which is above this module."""

    place: Callable[[Any], str]
    """A workload of it inside a sentence: "with 16 users"."""
    details: Callable[[Any], tuple[object, ...]] = lambda _: ()
    """What tells its workloads apart, in the parentheses of their names; None: left out."""
    word: Callable[[Any], str] | None = None
    """What stands before the parentheses, if that is not its name."""
    has_blocks: bool = True
    """Whether it consists of blocks at a planned load; cold starts and searches do not."""
    is_search: bool = False
    """Whether it searches for the highest rate that holds a bound, or the limits of good answers."""
    kinds: Collection[Kind] = tuple(Kind)
    """What arms serve that can have it."""
    settings: Mapping[str, str] = {}
    """The settings of which it needs values, for models that take tensors, with an example."""


_ACROSS: Mapping[Kind, tuple[str, str]] = {
    Kind.TENSORS: ("batch {0.batch_size}", "batch {0.batch_size}"),
    Kind.TOKENS: ("prompt {0.prompt_tokens}", "{0.prompt_tokens}-token prompts"),
}
"""The second axis of a surface in the name of a workload, and inside a sentence."""


def _surface_place(workload: Any) -> str:
    return f"at {counted(workload.concurrency, 'user')}, {_ACROSS[workload.kind][1].format(workload)}"


def _concurrent_place(workload: Any) -> str:
    size = f", batch {workload.batch_size}" if workload.batch_size > 1 else ""
    return f"with {counted(workload.concurrency, 'user')}{size}"


def _open_word(workload: Any) -> str:
    return workload.arrivals if workload.arrivals in ("trace", "poisson") else "open"


def _open_details(workload: Any) -> tuple[object, ...]:
    if workload.trace is not None:
        return PurePath(workload.trace).stem, None if workload.speed == 1.0 else f"{workload.speed:g}×"
    if workload.rate_share is not None:
        return (f"{workload.rate_share:.0%}",)
    batch = f"batch {workload.batch_size}" if workload.batch_size > 1 else None
    return f"{workload.rate_per_s or 0.0:g}/s", batch


def _open_place(workload: Any) -> str:
    if workload.trace is not None:
        return f"in the replay of {workload.name}"
    return f"at {workload.rate_per_s or 0.0:g} requests/s"


def _traffic_place(workload: Any) -> str:
    return "with recorded traffic" + ("" if workload.speed == 1.0 else f" at {workload.speed:g}× its speed")


def _of_traffic(workload: Any) -> str:
    return " of recorded traffic" if workload.traffic else ""


SCENARIOS: Mapping[Scenario, ScenarioEntry] = {
    "cold-start": ScenarioEntry(lambda _: "from a cold start", has_blocks=False),
    "single": ScenarioEntry(lambda _: "one request at a time"),
    "batched": ScenarioEntry(
        lambda workload: f"at batch {workload.batch_size}", lambda workload: (workload.batch_size,),
        kinds=(Kind.TENSORS,), settings={"batch_sizes": "8,32"},
    ),
    "concurrent": ScenarioEntry(
        _concurrent_place, lambda workload: (workload.concurrency,), settings={"concurrency": "16"}
    ),
    "long-prompt": ScenarioEntry(lambda _: "with long prompts", kinds=(Kind.TOKENS,)),
    "long-answer": ScenarioEntry(lambda _: "with long answers", kinds=(Kind.TOKENS,)),
    "open": ScenarioEntry(_open_place, _open_details, _open_word, settings={"rates": "20,50"}),
    "traffic": ScenarioEntry(
        _traffic_place, lambda workload: () if workload.speed == 1.0 else (f"{workload.speed:g}×",),
        settings={"traffic": "FOLDER"},
    ),
    "slo": ScenarioEntry(
        lambda workload: f"within p99 ≤ {workload.latency_bound_ms:g} ms{_of_traffic(workload)}",
        lambda workload: (f"p99≤{workload.latency_bound_ms:g}ms", "traffic" if workload.traffic else None),
        has_blocks=False, is_search=True, kinds=(Kind.TENSORS,),
        settings={"slo_p99_ms": "50"},
    ),
    "goodput": ScenarioEntry(
        lambda workload: f"within {workload.limits}{_of_traffic(workload)}",
        lambda workload: (workload.limits or "whole", "traffic" if workload.traffic else None),
        has_blocks=False, is_search=True, kinds=(Kind.TOKENS,),
    ),
    "shared-prefix": ScenarioEntry(lambda _: "with a shared prefix", kinds=(Kind.TOKENS,)),
    "surface": ScenarioEntry(
        _surface_place, lambda workload: (workload.concurrency, _ACROSS[workload.kind][0].format(workload)),
        settings={"batch_sizes": "1,8", "concurrency": "16"},
    ),
    "shadow": ScenarioEntry(lambda _: "on the clients' traffic", kinds=()),
}  # fmt: skip
"""All scenarios, in the order in which the help lists them."""


def scenarios_of(kind: Kind) -> dict[Scenario, ScenarioEntry]:
    """Those of arms that serve this."""
    return {name: entry for name, entry in SCENARIOS.items() if kind in entry.kinds}
