"""JUnit XML, as CI systems read it: a test case for each check, each threshold and each comparison.

- check: a failure where it takes the verdict away; skipped where it is unknown and only warns; else passed, with its
  sentence as output;
- threshold: a failure unless it is kept;
- comparison: passed with any verdict, whoever wins; skipped where it is undecided; a failure where it is invalid.

The shape is that of the Apache Ant task's junitreport, which Jenkins, GitLab and GitHub's reporters take.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from loadgen.analysis.checks.outcome import Check
from loadgen.analysis.claims import claim
from loadgen.analysis.comparisons import METRICS
from loadgen.analysis.result import Result

_FORBIDDEN = re.compile(r"[^\t\n\r\x20-\uD7FF\uE000-\uFFFD\U00010000-\U0010FFFF]")
"""Characters that XML 1.0 cannot hold, escaped or not (section 2.2)."""


@dataclass(frozen=True, slots=True)
class Case:
    """One test case. `outcome` says which element it holds."""

    classname: str
    name: str
    outcome: Literal["passed", "failure", "skipped"]
    text: str
    kind: str = ""


def render_junit(results: Mapping[str, Result | None]) -> str:
    """By the name of the run, empty where there is one: a suite each of checks, thresholds and comparisons. A run
    without a result stored nothing, which is a failure."""
    root = ET.Element("testsuites", name="abserve")
    for name, result in results.items():
        prefix = f"abserve.{name}" if name else "abserve"
        if result is None:
            nothing = Case(f"{prefix}.checks", "run_finished", "failure", "the run stored nothing", "failed")
            _suite(root, f"{prefix}.checks", None, [nothing])
            continue
        for title, cases in (
            ("checks", [_check(f"{prefix}.checks", check) for check in result.checks]),
            ("thresholds", _thresholds(f"{prefix}.thresholds", result)),
            ("comparisons", _comparisons(f"{prefix}.comparisons", result)),
        ):
            if cases:
                _suite(root, f"{prefix}.{title}", result, cases)
    for attribute in ("tests", "failures", "errors", "skipped"):
        root.set(attribute, str(sum(int(suite.get(attribute, "0")) for suite in root)))
    root.set("time", f"{sum(float(suite.get('time', '0')) for suite in root):.3f}")
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _suite(root: ET.Element, name: str, result: Result | None, cases: list[Case]) -> None:
    loaded = result.blocks if result is not None and name.endswith("comparisons") else ()
    seconds = sum(block.duration_s for block in loaded)
    suite = ET.SubElement(
        root,
        "testsuite",
        name=name,
        tests=str(len(cases)),
        failures=str(sum(case.outcome == "failure" for case in cases)),
        errors="0",
        skipped=str(sum(case.outcome == "skipped" for case in cases)),
        time=f"{seconds:.3f}",
    )
    if result is not None and result.environment is not None:
        suite.set("timestamp", result.environment.started_at.removesuffix("Z"))
    names: Counter[str] = Counter()
    for case in cases:
        names[case.name] += 1  # a check may be made of each arm; readers take equal names for one case
        number = f" ({names[case.name]})" if names[case.name] > 1 else ""
        element = ET.SubElement(
            suite, "testcase", classname=clean(case.classname), name=clean(case.name + number), time="0.000"
        )
        if case.outcome == "failure":
            ET.SubElement(element, "failure", message=clean(case.text), type=case.kind).text = clean(case.text)
        elif case.outcome == "skipped":
            ET.SubElement(element, "skipped", message=clean(case.text))
        else:
            ET.SubElement(element, "system-out").text = clean(case.text)


def _check(classname: str, check: Check) -> Case:
    name = check.name if check.scope == "run" else f"{check.name} [{check.scope}]"
    text = f"{check.title}: {check.detail}"
    if check.ok is True:
        return Case(classname, name, "passed", text)
    text += f" → {check.remedy}"
    if check.severity == "invalidates":
        return Case(classname, name, "failure", text, "unknown" if check.ok is None else "failed")
    return Case(classname, name, "skipped" if check.ok is None else "passed", f"{check.severity}: {text}")


def _thresholds(classname: str, result: Result) -> list[Case]:
    return [
        Case(
            classname,
            f"fail if {one.condition} [{one.scenario}]",
            "passed" if one.state == "kept" else "failure",
            one.detail,
            one.state,
        )
        for one in result.thresholds
    ]


def _comparisons(classname: str, result: Result) -> list[Case]:
    cases = []
    for one in result.comparisons:
        name = f"{METRICS[one.metric].title} [{one.scenario}]"
        if one.verdict == "invalid":
            cases.append(Case(classname, name, "failure", f"no verdict: {one.reason}", "invalid"))
        elif one.verdict == "undecided":
            cases.append(Case(classname, name, "skipped", f"undecided: {one.reason}"))
        else:
            cases.append(Case(classname, name, "passed", claim(one)))
    return cases


def clean(text: str) -> str:
    """Without what XML cannot hold: a server's message may hold anything."""
    return _FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", text)
