"""The studies, in the order in which they measure and are shown.

A study is one question with its measurement, analysis and report: a folder beside this module and its name below. Each
part is a module of the folder, and each may be missing:

- `records.py`: what it stores (`FILE` names the file) and what it finds (a `Found`);
- `measure.py`: `wanted(experiment)`, and `measure(bench)`, called with warm servers in every restart. The runner itself
  calls what needs stopped servers (ceilings, cold starts);
- `analyse.py`: `analyse(facts)`, a pure function from the records to the finding, which `result.json` holds below
  `studies` under its `STUDY`;
- `sections.py`: `SECTIONS`, by chapter of the report, functions that make one section of a result each.

Parts are imported when they are needed: a report loads no measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from loadgen.records.run import Experiment, Found

STUDIES = tuple(
    f"loadgen.probes.{name}"
    for name in (
        "fairness",
        "handicap",
        "load",
        "rate_search",
        "answers",
        "gpu_proof",
        "causes",
        "ceiling",
        "cold_start",
    )
)


def parts(module: str, name: str) -> Iterator[Any]:
    """The attribute `name` of this module in every study that has both."""
    for study in STUDIES:
        if find_spec(f"{study}.{module}") is not None:
            found = import_module(f"{study}.{module}")
            if hasattr(found, name):
                yield getattr(found, name)


def measurements(experiment: Experiment) -> list[Callable[[Any], None]]:
    """The measurements that this experiment wants, each called with a `Bench`."""
    both = zip(parts("measure", "wanted"), parts("measure", "measure"), strict=True)
    return [measure for wanted, measure in both if wanted(experiment)]


def finding_types() -> dict[str, type[Found]]:
    """The types of the findings, by the name below `studies`."""
    list(parts("analyse", "analyse"))
    known = {kind.__module__.rpartition(".")[0]: kind for kind in Found.__subclasses__()}
    return {known[study].STUDY: known[study] for study in STUDIES if study in known}
