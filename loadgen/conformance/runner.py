"""Runs cases one after the other, checks the server between them, and goes on after a crash where it can."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any

from loadgen.conformance.case import Case
from loadgen.conformance.judgement import judge
from loadgen.conformance.records import CaseResult, Fact, NotApplicableError, Observation, SkippedError, Verdict
from loadgen.conformance.sessions import Session
from loadgen.conformance.subject import Subject, SubjectError
from loadgen.conformance.watching import Watch

LIVE_SECONDS = 2.0
RECOVERY_SECONDS = 30.0


class CaseRun:
    """One run over one session. `stopped` says why it ended early."""

    def __init__(self, session: Session, *, destructive: bool) -> None:
        """Without `destructive` only cases that cannot hurt a server are sent."""
        self._session = session
        self._destructive = destructive
        self.stopped: str | None = None

    def run(self, cases: Iterable[Case], announce: Callable[[Case], None]) -> tuple[CaseResult, ...]:
        """In an order that starts few servers; the results in the corpus's order."""
        results: list[tuple[tuple[int, str], CaseResult]] = []
        chosen = sorted(cases, key=lambda case: case.order)
        settings = list(dict.fromkeys(case.setting for case in chosen))
        settings.sort(key=lambda setting: (setting.own_servers, setting.by_kind is not None))
        for case in sorted(chosen, key=lambda case: settings.index(case.setting)):
            if self.stopped is None:
                announce(case)
                result = self._one(case)
            else:
                result = _result(case, Verdict.SKIPPED, reason="the run had ended")
            results.append((case.order, result))
        return tuple(result for _, result in sorted(results, key=lambda pair: pair[0]))

    def _one(self, case: Case) -> CaseResult:
        if case.destructive and not self._destructive:
            reason = "not sent to a machine that is not this one; --i-own-this-server sends it"
            return _result(case, Verdict.SKIPPED, reason=reason)
        started = perf_counter()
        try:
            subject = self._session.subject(case.setting)
            started = perf_counter()
            if case.warm_up is not None:
                case.warm_up(subject)
            with Watch(subject, case.setting.own_servers) as watch:
                observation = _observe(case, subject)
        except SubjectError as exc:
            self.stopped = str(exc)
            return _result(case, Verdict.SKIPPED, reason=str(exc))
        except SkippedError as exc:
            return _result(case, Verdict.SKIPPED, reason=str(exc), seconds=perf_counter() - started)
        except NotApplicableError as exc:
            return _result(case, Verdict.NOT_APPLICABLE, reason=str(exc), seconds=perf_counter() - started)
        extra: list[Fact] = []
        crash = None
        if not case.setting.own_servers:
            crash, extra = self._check_server(subject)
            if crash is None:
                extra.append(watch.live_fact(LIVE_SECONDS))
        if case.memory is not None and crash is None:
            extra += watch.memory_facts(case.memory)
        verdict, got, reason, not_observed = judge(case, observation, extra)
        if crash is not None:
            verdict, reason = Verdict.CRASHED, crash
        seconds = perf_counter() - started
        return _result(case, verdict, got=got, reason=reason, not_observed=tuple(not_observed), seconds=seconds)

    def _check_server(self, subject: Subject) -> tuple[str | None, list[Fact]]:
        """Why the server is gone, or whether it is live and answers as before."""
        live = subject.live(LIVE_SECONDS)
        # Its last words are in its log; the table needs only how it ended.
        failure = (subject.failure() or "").partition(";")[0] or None
        if failure is None and not live and subject.http("GET", "/v2/health/live").status == "refused":
            failure = "nobody listens any more"
        if failure is not None:
            if not self._session.restart():
                self.stopped = f"the server {failure}"
            return failure, []
        facts = [Fact("live within 2 s", live, "yes" if live else "no")]
        if not live and not subject.live(RECOVERY_SECONDS):
            facts.append(Fact("live within 30 s", False, "no"))
            if not self._session.restart():
                self.stopped = "the server does not answer any more"
            return None, facts
        difference = subject.golden_difference()
        facts.append(Fact("golden inference unchanged", difference is None, difference or "yes"))
        return None, facts


def _observe(case: Case, subject: Subject) -> Observation:
    try:
        return case.observe(subject)
    except OSError as exc:
        # A connection that a case holds itself was cut; whether the server lives is found out next.
        return Observation(facts=(Fact("the case could be sent", False, str(exc)),))


def _result(case: Case, verdict: Verdict, *, seconds: float = 0.0, **columns: Any) -> CaseResult:
    return CaseResult(
        number=case.number,
        title=case.title,
        door=case.door.value,
        expected=case.describe(),
        verdict=verdict,
        seconds=round(seconds, 3),
        **({"got": ""} | columns),
    )
