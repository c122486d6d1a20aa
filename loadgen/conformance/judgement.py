"""From what was expected and what was seen to a verdict: pure, no I/O."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable

from loadgen.conformance.case import Case
from loadgen.conformance.records import Answer, Expectation, Fact, Observation, Verdict

_TRACES = (
    re.compile(r"Traceback \(most recent call"),
    re.compile(r'File "[^"]+", line \d+'),
    re.compile(r"\.(?:py|cc|cpp|cu)[:(]\d+"),
)
_PATH = re.compile(r"(?<![\w:/.])/(?:[\w.+-]+/)+[\w.+-]+")
_NUMBER = re.compile(r"\d+")
_LONGEST_SHOWN = 110


def judge(case: Case, observation: Observation, extra: Iterable[Fact] = ()) -> tuple[Verdict, str, str, list[str]]:
    """The verdict, what was got, the reasons against it, and what could not be observed."""
    facts = [*observation.facts, *extra]
    reasons: list[str] = []
    for answer in observation.answers:
        for problem in problems(case.expected, answer):
            if problem not in reasons:
                reasons.append(problem)
    reasons += [f"{fact.name}: {fact.seen}" for fact in facts if fact.ok is False]
    not_observed = [f"{fact.name}: {fact.seen}" for fact in facts if fact.ok is None]
    # The words shown for a status are those of an answer that is not as expected, where there is one.
    worst_first = sorted(observation.answers, key=lambda answer: not problems(case.expected, answer))
    got = describe(worst_first) or "; ".join(f"{fact.name}: {fact.seen}" for fact in observation.facts)
    if not reasons and not observation.answers and not any(fact.ok for fact in observation.facts):
        return Verdict.NOT_APPLICABLE, got, "nothing of it could be observed here", not_observed
    return (Verdict.DEVIATES if reasons else Verdict.CONFORMS), got, "; ".join(reasons), not_observed


def problems(expected: Expectation, answer: Answer) -> list[str]:
    """What is wrong with one answer; empty when it is as expected."""
    found = []
    if expected.statuses and answer.status not in expected.statuses:
        found.append(f"{answer.status} instead of {' or '.join(expected.statuses)}")
    if not answer.came:
        return found
    found += [f"no {name} header" for name in expected.headers if name.lower() not in answer.headers]
    if answer.good:
        return found
    text, problem = error_sentence(answer)
    if expected.words_judged and problem:
        found.append(problem)
    lowered = text.lower()
    if answer.status in expected.statuses:
        found += [
            f"the error does not name {group[0]}"
            for group in expected.mentions
            if not any(word.lower() in lowered for word in group)
        ]
        if len(set(_NUMBER.findall(text))) < expected.numbers:
            found.append(f"the error does not hold {expected.numbers} numbers")
    return found + leaks(text, expected.secrets)


def error_sentence(answer: Answer) -> tuple[str, str | None]:
    """The error's text, and why it is not as the protocol wants it (None: it is)."""
    if answer.message is not None:
        return answer.message, _sentence_problem(answer.message)
    text = answer.body.decode("utf-8", "replace")
    if not answer.body:
        return "", "the error has no body"
    try:
        document = json.loads(answer.body)
    except (ValueError, RecursionError):
        return text, "the error is not JSON"
    if not isinstance(document, dict) or not isinstance(document.get("error"), str):
        return text, 'the error is no {"error": text}'
    if not answer.headers.get("content-type", "").startswith("application/json"):
        return document["error"], "the error's Content-Type is not application/json"
    if set(document) != {"error"}:
        return text, "the error has members besides error"
    return document["error"], _sentence_problem(document["error"])


def leaks(text: str, secrets: Iterable[str]) -> list[str]:
    """What a client must not be told."""
    found = []
    if any(pattern.search(text) for pattern in _TRACES):
        found.append("the error shows a traceback or a source line")
    elif any(not path.startswith("/v2") for path in _PATH.findall(text)):
        found.append("the error shows a path")
    if any(secret in text for secret in secrets):
        found.append("the error echoes the shared-memory key")
    return found


def describe(answers: Iterable[Answer]) -> str:
    """The got column: each distinct status with its first sentence, most frequent first."""
    counts: Counter[str] = Counter()
    words: dict[str, str] = {}
    for answer in answers:
        counts[answer.status] += 1
        if answer.came and not answer.good:
            words.setdefault(answer.status, _shortened(error_sentence(answer)[0]))
    parts = []
    for status, count in counts.most_common():
        text = f"{count}×{status}" if sum(counts.values()) > 1 else status
        parts.append(f"{text} {words[status]}" if words.get(status) else text)
    return "; ".join(parts)


def _sentence_problem(text: str) -> str | None:
    if not text.strip():
        return "the error is empty"
    return "the error is more than one line" if "\n" in text.strip() else None


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST_SHOWN else line[: _LONGEST_SHOWN - 1] + "…"
