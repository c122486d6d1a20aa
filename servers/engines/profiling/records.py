"""What a profile of one batch size says. All times are µs an execution, means over the profiled executions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from servers.engines.profiling.names import CATEGORIES

IDLE_ON_DEVICE = "idle between kernels"
IDLE_ON_HOST = "outside operators"


class ProfileError(Exception):
    """The engine cannot be profiled here; the message names the remedy where there is one."""


@dataclass(frozen=True, slots=True)
class CategoryTime:
    """`share` is of the span."""

    name: str
    us: float
    share: float


@dataclass(frozen=True, slots=True)
class KernelTime:
    """All launches of one kernel, or all calls of one operator on a CPU; `name` is the full one, `label` to be read."""

    name: str
    label: str
    category: str
    count: float
    us: float
    share: float


@dataclass(frozen=True, slots=True)
class BatchProfile:
    """One batch size.

    The span is from the start of an execution's first kernel to the end of its last, on a CPU the execution by the
    host's clock. `idle_us` is what no kernel or operator accounts for; it is the last of the categories too, whose
    shares add up to 1. Time in which several kernels run is divided equally among them, so that everything adds up.
    `measured_us` was measured before, without a profiler: the execution, or the call where the engine does not tell it.
    `with_copies`: the executions include the copies from and to the host.
    """

    batch: int
    executions: int
    with_copies: bool
    measured_us: float
    span_us: float
    idle_us: float
    launches: float
    categories: list[CategoryTime]
    kernels: list[KernelTime]


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """One record a batch size; or none, and in `missing` the sentence that says why."""

    batches: list[BatchProfile]
    missing: str | None = None

    def as_document(self) -> dict[str, object]:
        """The keys that a profile adds to the file of `abserve engine --json`."""
        document: dict[str, object] = {"profile": [asdict(batch) for batch in self.batches]}
        return document if self.missing is None else {**document, "profile_missing": self.missing}


@dataclass(slots=True)
class Total:
    """Of one name, over all executions."""

    count: int = 0
    ns: float = 0.0


def summarised(
    totals: Mapping[str, Total],
    span_ns: float,
    *,
    batch: int,
    executions: int,
    with_copies: bool,
    measured_us: float,
    idle_name: str,
    category_of: Callable[[str], str],
    label_of: Callable[[str], str] = str,
) -> BatchProfile:
    """The record of one batch from sums over all `executions`; raises `ProfileError` for executions of no length."""
    busy_ns = sum(total.ns for total in totals.values())
    span_ns = max(span_ns, busy_ns)  # a clock of whole µs may make the parts longer than the whole
    if not span_ns:
        raise ProfileError(f"the profile of batch {batch} holds no time at all")
    by_category: dict[str, float] = defaultdict(float)
    kernels = []
    for name, total in totals.items():
        category = category_of(name)
        by_category[category] += total.ns
        us = total.ns / executions / 1e3
        kernels.append(KernelTime(name, label_of(name), category, total.count / executions, us, total.ns / span_ns))
    by_category[idle_name] = span_ns - busy_ns
    return BatchProfile(
        batch=batch,
        executions=executions,
        with_copies=with_copies,
        measured_us=measured_us,
        span_us=span_ns / executions / 1e3,
        idle_us=(span_ns - busy_ns) / executions / 1e3,
        launches=sum(kernel.count for kernel in kernels),
        categories=[
            CategoryTime(name, by_category[name] / executions / 1e3, by_category[name] / span_ns)
            for name in (*CATEGORIES, idle_name)
        ],
        kernels=sorted(kernels, key=lambda kernel: -kernel.us),
    )
