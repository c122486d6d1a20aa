"""Runs cases one after the other, checks the server after each, continues after a crash if it can, and reports."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from time import monotonic, perf_counter, sleep
from typing import Any

import loadgen.report.document as doc
from loadgen.conformance.case import Case, judge
from loadgen.conformance.records import (
    MIB,
    CaseResult,
    CaseVerdict,
    ConformanceReport,
    Fact,
    NotApplicableError,
    SkippedError,
)
from loadgen.conformance.servers import Session, Subject, SubjectError

LIVE_SECONDS = 2.0
RECOVERY_SECONDS = 30.0
SAMPLE_SECONDS = 0.02
SETTLE_SECONDS = 3.0
HEARTBEAT_SECONDS = 0.1
RESPONSE_SECONDS = 10.0


class CaseRun:
    """One run over one session. `stopped` says why it ended early."""

    def __init__(self, session: Session, *, destructive: bool) -> None:
        """Without `destructive` only cases that cannot harm a server are sent."""
        self._session = session
        self._destructive = destructive
        self.stopped: str | None = None

    def run(self, cases: Iterable[Case], announce: Callable[[Case], None]) -> tuple[CaseResult, ...]:
        """Run in an order that starts few servers; the results are ordered by case number."""
        results: dict[str, CaseResult] = {}
        chosen = sorted(cases, key=lambda case: case.order)
        settings = list(dict.fromkeys(case.setting for case in chosen))
        settings.sort(key=lambda setting: (setting.own_servers, setting.by_kind is not None))
        for case in sorted(chosen, key=lambda case: settings.index(case.setting)):
            if self.stopped is None:
                announce(case)
                results[case.number] = self._one(case)
            else:
                results[case.number] = _result(case, CaseVerdict.SKIPPED, reason="the run had ended")
        return tuple(results[case.number] for case in chosen)

    def _one(self, case: Case) -> CaseResult:
        if case.destructive and not self._destructive:
            return _result(
                case, CaseVerdict.SKIPPED, reason="not sent to another machine; allow it with --i-own-this-server"
            )
        started = perf_counter()
        try:
            subject = self._session.subject(case.setting)
            started = perf_counter()
            if case.warm_up is not None:
                case.warm_up(subject)
            with Watch(subject, heartbeat=not case.setting.own_servers) as watch:
                seen = case.observe(subject)
        except SubjectError as exc:
            self.stopped = str(exc)
            return _result(case, CaseVerdict.SKIPPED, reason=str(exc))
        except (SkippedError, NotApplicableError) as exc:
            verdict = CaseVerdict.SKIPPED if isinstance(exc, SkippedError) else CaseVerdict.NOT_APPLICABLE
            return _result(case, verdict, reason=str(exc), seconds=perf_counter() - started)
        extra: list[Fact] = []
        crash = None
        if not case.setting.own_servers:
            crash, extra = self._check_server(subject)
            if crash is None:
                extra.append(watch.live_fact())
        if crash is None:
            extra += watch.memory_facts(case)
        verdict, got, reason, not_observed = judge(case, seen, extra)
        if crash is not None:
            verdict, reason = CaseVerdict.CRASHED, crash
        seconds = perf_counter() - started
        return _result(case, verdict, got=got, reason=reason, not_observed=not_observed, seconds=seconds)

    def _check_server(self, subject: Subject) -> tuple[str | None, list[Fact]]:
        """Why the server is gone, or whether it is live and still answers correctly."""
        live = subject.live(LIVE_SECONDS)
        failure = (subject.failure() or "").partition(";")[0] or None  # without the end of its log
        if failure is None and not live and subject.http("GET", "/v2/health/live").status == "refused":
            failure = "no longer listens"
        if failure is not None:
            if not self._session.restart():
                self.stopped = f"the server {failure}"
            return failure, []
        facts = [Fact("live within 2 s", live, "yes" if live else "no")]
        if not live and not subject.live(RECOVERY_SECONDS):
            facts.append(Fact("live within 30 s", False, "no"))
            if not self._session.restart():
                self.stopped = "the server no longer answers"
            return None, facts
        difference = subject.golden_difference()
        facts.append(Fact("golden inference unchanged", difference is None, difference or "yes"))
        return None, facts


class Watch:
    """Samples a server's memory while it is entered and, with `heartbeat`, how fast it answers other clients."""

    def __init__(self, subject: Subject, *, heartbeat: bool) -> None:
        self._subject = subject
        self._before_bytes = self._peak_bytes = subject.resident_bytes()
        self._slowest_s = 0.0
        self._stop = threading.Event()
        self._threads = []
        if self._before_bytes is not None:
            self._threads.append(threading.Thread(target=self._sample, daemon=True))
        if heartbeat:
            self._threads.append(threading.Thread(target=self._beat, daemon=True))

    def __enter__(self) -> Watch:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def live_fact(self) -> Fact:
        """Whether the slowest answer of health/live was fast enough."""
        seen = f"{self._slowest_s:.1f} s"
        return Fact(f"live within {LIVE_SECONDS:g} s during the case", self._slowest_s <= LIVE_SECONDS, seen)

    def memory_facts(self, case: Case) -> list[Fact]:
        """Whether memory stayed within the case's bounds; waits up to 3 s for the server to free it."""
        facts = []
        if case.retained_mib is not None:
            deadline = monotonic() + SETTLE_SECONDS
            while True:
                fact = self._bounded("growth", self._subject.resident_bytes(), case.retained_mib)
                if fact.ok is not False or monotonic() > deadline:
                    break
                sleep(SAMPLE_SECONDS)
            facts.append(fact)
        if case.peak_mib is not None:
            facts.append(self._bounded("peak growth", self._peak_bytes, case.peak_mib))
        return facts

    def _bounded(self, name: str, now_bytes: int | None, bound_mib: int) -> Fact:
        if now_bytes is None or self._before_bytes is None:
            return Fact(f"memory {name}", None, "the server's memory cannot be read; use --launch or --pid")
        growth = (now_bytes - self._before_bytes) / MIB
        return Fact(f"memory {name} < {bound_mib} MiB", growth < bound_mib, f"{growth:+.1f} MiB")

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            self._peak_bytes = max(self._peak_bytes or 0, self._subject.resident_bytes() or 0)

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS):
            response = self._subject.http("GET", "/v2/health/live", deadline_s=RESPONSE_SECONDS)
            self._slowest_s = max(self._slowest_s, response.elapsed_s)


def _result(case: Case, verdict: CaseVerdict, *, seconds: float = 0.0, **columns: Any) -> CaseResult:
    return CaseResult(
        number=case.number,
        title=case.title,
        protocol=case.protocol,
        expected=case.describe(),
        verdict=verdict,
        seconds=round(seconds, 3),
        **columns,
    )


_STYLES: Mapping[CaseVerdict, doc.Style] = {
    CaseVerdict.CONFORMS: "ok",
    CaseVerdict.DEVIATES: "failed",
    CaseVerdict.CRASHED: "failed",
    CaseVerdict.NOT_APPLICABLE: "note",
    CaseVerdict.SKIPPED: "warning",
}


def report_document(report: ConformanceReport) -> doc.Document:
    """A row per case on a terminal; in Markdown a row per deviation and crash, the other cases as lists of numbers."""
    rows = [
        (
            doc.Cell(f"{result.number} {result.title}"), result.protocol, result.expected, result.got,
            doc.Cell(result.verdict.value + _because(result), _STYLES[result.verdict]),
        )
        for result in report.results
    ]  # fmt: skip
    failed = [row for row, result in zip(rows, report.results, strict=True) if result.failed]
    columns = (*doc.texts("case"), *doc.names("protocol"), *doc.texts("expected", "received", "verdict"))
    conforming = [result.number for result in report.results if result.verdict is CaseVerdict.CONFORMS]
    others = []
    for verdict in (CaseVerdict.NOT_APPLICABLE, CaseVerdict.SKIPPED):
        numbers: dict[str, list[str]] = {}
        for result in report.results:
            if result.verdict is verdict:
                numbers.setdefault(result.reason, []).append(result.number)
        others += [doc.Item(f"{', '.join(of)}: {why}", lead=verdict.value) for why, of in numbers.items()]
    others += [
        doc.Item(f"{result.number}: {'; '.join(result.not_observed)}", lead="not observed")
        for result in report.results
        if result.not_observed
    ]
    section = doc.section(
        "",
        doc.Text(f"Model {report.model}, {report.created_at[:10]}, abserve {report.abserve_version}.", on=doc.PAGES),
        doc.Table(columns, rows, title=f"Conformance of {report.server_title}", on=doc.TERMINAL),
        doc.Text(", ".join(f"{verdict.value}: {report.count(verdict)}" for verdict in CaseVerdict)),
        doc.Text("" if report.stopped is None else f"The run ended early: {report.stopped}", "warning"),
        doc.Table(columns, failed, on=doc.PAGES),
        doc.Text(f"Conforms: {', '.join(conforming)}." if conforming else "", on=doc.PAGES),
        doc.Items(others, on=doc.PAGES),
    )
    return doc.Document(f"Conformance of {report.server_title}", {"": [] if section is None else [section]})


def _because(result: CaseResult) -> str:
    parts = [result.reason] if result.reason else []
    parts += [f"not observed: {name}" for name in result.not_observed]
    return f": {'; '.join(parts)}" if parts else ""
