"""The cold starts of containers, taken apart: rows of text for the terminal, Markdown and HTML."""

from __future__ import annotations

from loadgen.analysis.result import Result
from loadgen.quantities import number
from loadgen.records.run import ContainerColdStart, Label

LABELS: tuple[Label, Label] = ("a", "b")
STEPS = (
    ("process", "first log line"),
    ("imported", "imported"),
    ("weights_loaded", "weights"),
    ("engine_ready", "graphs or engine"),
)
"""A milestone → its heading; the others lie between these."""

CAPTION = (
    "Seconds since the Docker engine was asked to start the container; a step that a server does not log is –. "
    "Graphs or engine: graphs captured and warmed up, or the engine loaded. The last columns are how long the first "
    "request of each batch size took, one size after the other. Cached: what torch and Triton have compiled was kept; "
    "uncached: it was emptied before. The page cache was warm."
)


def headings(result: Result, label: Label) -> tuple[str, ...]:
    """Of the table of one arm."""
    return (
        "start",
        "container",
        *(title for _, title in STEPS),
        "ready",
        "first answer",
        *(f"batch {size}" for size in _sizes(result, label)),
    )


def rows(result: Result, label: Label) -> list[tuple[str, ...]]:
    """One a start of this arm's container, in the order in which they ran; empty without any."""
    sizes = _sizes(result, label)
    return [_row(start, sizes) for start in _of(result, label)]


def failures(result: Result, label: Label) -> list[str]:
    """A line for each start that did not get to its answers."""
    return [f"{_name(start)}: {start.error}" for start in _of(result, label) if start.error is not None]


def service(result: Result, label: Label) -> str:
    """Which container it was, for a heading: "native-cpu (abserve/servers:0.1.0 sha256:…)"."""
    return next((f"{start.service} ({start.image})" for start in _of(result, label)), "")


def _of(result: Result, label: Label) -> list[ContainerColdStart]:
    return [start for start in result.container_cold_starts if start.label == label]


def _sizes(result: Result, label: Label) -> list[int]:
    return sorted({size for start in _of(result, label) for size in start.batch_answers_ns})


def _name(start: ContainerColdStart) -> str:
    return f"{start.repetition + 1} {start.caches}"


def _row(start: ContainerColdStart, sizes: list[int]) -> tuple[str, ...]:
    return (
        _name(start) + (" failed" if start.error is not None else ""),
        _seconds(start.started_ns),
        *(_seconds(start.milestones_ns.get(name)) for name, _ in STEPS),
        _seconds(start.ready_ns),
        _seconds(start.first_answer_ns),
        *(_milliseconds(start.batch_answers_ns.get(size)) for size in sizes),
    )


def _seconds(value_ns: int | None) -> str:
    return "–" if value_ns is None else f"{value_ns / 1e9:.2f} s"


def _milliseconds(value_ns: int | None) -> str:
    return "–" if value_ns is None else f"{number(value_ns / 1e6)} ms"
