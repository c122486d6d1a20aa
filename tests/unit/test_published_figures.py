"""Every interval that a document gives beside a published run is one that the run's files hold."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from loadgen.stats.ratios import interval_of_mean

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = ROOT / "docs/results"
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), PUBLISHED / "README.md"]
INTERVAL = re.compile(r"\((?:95 % interval |[A-H] )?(\d[\d.,]*)–(\d[\d.,]*)(?: %|×)?\)")
LINK = re.compile(r"\]\(([^)#\s]+)|The figures of (docs/results/\S+);")
SAMPLE = re.compile(r"(?ms)^```.*?^```$|\"[^\"\n]*\"")
"""What a page shows as an example: blocks of code, and words in quotation marks."""
Interval = tuple[float, float]


def intervals_in(document: object, name: str = "") -> Iterator[Interval]:
    """The two ends of every interval in a stored document, whatever record it stands in."""
    if isinstance(document, dict):
        ends = document.get("low"), document.get("high")
        if all(isinstance(end, int | float) for end in ends):
            yield float(str(ends[0])), float(str(ends[1]))
        for key, value in document.items():
            yield from intervals_in(value, name if name == "intervals" else key)
    elif isinstance(document, list):
        is_pair = len(document) == 2 and all(isinstance(end, int | float) for end in document)
        if is_pair and ("ci95" in name or "interval" in name):
            yield float(document[0]), float(document[1])
        for value in document if not is_pair else ():
            yield from intervals_in(value, name)


def over_starts(document: dict[str, Any]) -> Iterator[Interval]:
    """Those of the arms' own throughput over the starts of the servers, which results of before 2026-11-28 lack."""
    speeds: dict[tuple[str, str], dict[int, list[float]]] = {}
    for block in document.get("blocks", ()) if "summaries" in document else ():
        if block["complete"] and block["figures"].get("throughput"):
            starts = speeds.setdefault((block["workload"], block["label"]), {})
            starts.setdefault(block.get("restart", 0), []).append(block["figures"]["throughput"])
    intervals = (interval_of_mean(list(starts.values())) for starts in speeds.values() if len(starts) > 1)
    yield from (interval for interval in intervals if interval is not None)


@cache
def stored_intervals(folder: Path) -> frozenset[Interval]:
    """All intervals below a published folder; of a ratio also the inverse, and as a saving in percent."""
    found: set[Interval] = set()
    for path in folder.rglob("*.json*"):
        if not path.name.startswith("manifest"):
            content = path.read_bytes()
            document = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)
            found.update(intervals_in(document), over_starts(document))
    inverse = {(1.0 / high, 1.0 / low) for low, high in found if low > 0.0}
    savings = {(100.0 * (1.0 - 1.0 / low), 100.0 * (1.0 - 1.0 / high)) for low, high in found | inverse if low > 1.0}
    return frozenset(found | inverse | savings)


def reads(text: str, value: float) -> bool:
    """Whether `text` is `value`, or its thousandth or thousandfold, with the digits that the text has."""
    digits = text.replace(",", "")
    decimals = len(digits.partition(".")[2]) or len(digits.rstrip("0")) - len(digits)
    exact = float(digits)
    return any(abs(exact - unit * value) <= 0.50001 * 10.0**-decimals for unit in (1.0, 1000.0, 0.001))


def sections(path: Path) -> Iterator[tuple[str, set[Path]]]:
    """Each section of a document with the published folders that it links to."""
    measured = SAMPLE.sub("", path.read_text())
    for section in re.split(r"(?m)^(?=#{1,3} )", measured):
        linked = [(path.parent / a if a else ROOT / b).resolve() for a, b in LINK.findall(section)]
        inside = [place.relative_to(PUBLISHED).parts[0] for place in linked if PUBLISHED in place.parents]
        yield section, {PUBLISHED / name for name in inside if re.match(r"\d{4}-", name)}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_interval_is_that_of_a_published_run(path: Path) -> None:
    unknown = []
    for section, folders in sections(path):
        stored = {interval for folder in folders for interval in stored_intervals(folder)}
        for match in INTERVAL.finditer(section):
            if not any(reads(match[1], low) and reads(match[2], high) for low, high in stored):
                unknown.append(match[0])
    assert unknown == []


def test_an_interval_that_no_run_has_is_found() -> None:
    folder = PUBLISHED / "2026-11-26-h100"
    low, _ = next(iter(stored_intervals(folder)))
    assert reads(f"{low:.3f}", low)
    assert not reads(f"{low + 0.011:.2f}", low)
    assert not any(reads("77.771", low) for low, _ in stored_intervals(folder))
    assert any("29-h200" in str(name) for _, names in sections(ROOT / "README.md") for name in names)
