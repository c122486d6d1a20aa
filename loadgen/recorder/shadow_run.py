"""Compares the pairs of a shadow as they come, in a thread of its own, and stores them as a run of two arms.

The primary is arm a, the candidate arm b. The unit is a block of time: its figure is the geometric mean of the pairs'
ratios, and blocks in a row resemble each other less than requests do. The interval allows for what is left of that, and
for a look after every block (`loadgen.stats.ratios.estimate_anytime`). The traffic never waits for this thread, which
works on what has found a place in memory.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from random import Random
from secrets import randbits
from time import perf_counter_ns, process_time_ns

import msgspec
import numpy as np

from loadgen.base.documents import one_line, uncompressed
from loadgen.base.quantities import counted, join
from loadgen.checks.run import FIRSTS_THAT_PROVE, LEAST_ALIKE, LEAST_BLOCKS
from loadgen.client.connection import GRPC_STATUS, AddressError
from loadgen.client.endpoint import EndpointError
from loadgen.client.grpc import STATUS_NAMES
from loadgen.client.grpc_messages import ModelInferResponse
from loadgen.client.outputs import HEADER_LENGTH, read_body, read_document, read_message
from loadgen.experiment.schedule import arm_orders
from loadgen.launch.deployment import RemoteDeployment
from loadgen.measure.answers import Answer, compare_answers
from loadgen.measure.arms import Arm
from loadgen.measure.machine import read_environment, utc_now
from loadgen.metrics.comparisons import LEADING_SHARE, Outcome, judge
from loadgen.metrics.registry import TYPICAL_LATENCY
from loadgen.recorder.recorder import MOST_HELD_BYTES, described
from loadgen.recorder.shadow import MOST_UNDER_WAY, PairedRequest
from loadgen.recorder.texts import are_alike, fields_of, is_certain, is_text, read_text
from loadgen.records.probes import ShadowRecord
from loadgen.records.run import (
    MODEL_WEIGHTS,
    ArmRecord,
    ArmRequest,
    BlockRecord,
    Experiment,
    Label,
    ParityCase,
    ParityRecord,
    RunState,
    Workload,
)
from loadgen.records.samples import NS_PER_MS, NS_PER_S, SAMPLE_DTYPE, error_index, store_samples
from loadgen.records.store import RunStore
from loadgen.records.traffic import plain
from loadgen.stats.agreement import Tolerance, tolerance_of, tolerances_for
from loadgen.stats.durations import DurationCounts
from loadgen.stats.ratios import RatioEstimate, estimate_anytime, lone_correlation

LABELS: tuple[Label, Label] = ("a", "b")
LEAST_PAIRS = 10
"""Good pairs of a block, which lasts longer where there are fewer."""
MOST_ROWS = 20_000
"""Requests of a block that ends without so many good pairs."""
_MOST_SHAPES = 200
"""Kinds of requests with a row of their own in the table of answers."""
_BEHIND = 200
"""Pairs that wait; beyond that only answers to kinds of requests are compared that were compared less often than ..."""
_OFTEN = 100
_MOST_LAGS = 1_000_000
_SETTLING = 0.1
"""The part of a block after a turn that is not counted: connections are new, and requests of before are under way."""
_OTHERS = "other requests"
_REFUSALS = frozenset(
    map(STATUS_NAMES.index, (
        "INVALID_ARGUMENT", "NOT_FOUND", "PERMISSION_DENIED", "FAILED_PRECONDITION", "OUT_OF_RANGE", "UNIMPLEMENTED",
        "UNAUTHENTICATED",
    ))
)  # fmt: skip
"""The statuses of gRPC that stand for HTTP's 4xx."""


def whose_turn(seed: int, turn: int) -> Label:
    """Whose answers clients get in a block of time: the arms in pairs of random order, balanced over two pairs."""
    pair, place = divmod(turn, len(LABELS))
    balanced, number = divmod(pair, len(LABELS))
    return arm_orders(LABELS, len(LABELS), Random(f"{seed} {balanced}"))[number][place]


@dataclass(slots=True)
class _Block:
    """The requests of one stretch of time, or of one turn of each arm."""

    number: int
    began_ns: int
    began_at: str
    cpu_ns: int
    rows: dict[Label, list[tuple[int, ...]]] = field(default_factory=lambda: {label: [] for label in LABELS})
    messages: list[str] = field(default_factory=list)
    logs: dict[Label, list[float]] = field(default_factory=lambda: {label: [] for label in LABELS})
    """The logarithms of the latencies of the good ones: without turns, of pairs of which both are good."""

    def add(self, arm: Label, request: PairedRequest, fault: str | None, *, is_good: bool) -> None:
        """Add a request that an arm has answered, or failed to."""
        began_ns, first_ns, end_ns = _times_ns(request)
        number = -1 if fault is None else error_index(self.messages, fault)
        self.rows[arm].append(
            (
                began_ns, began_ns, first_ns, end_ns, request.content_bytes, request.answer_bytes, 1, 0, 0,
                _http_status(request) or 0, number,
            )
        )  # fmt: skip
        if is_good:
            self.logs[arm].append(math.log(max(end_ns - began_ns, 1)))

    @property
    def good(self) -> int:
        return min(map(len, self.logs.values()))

    @property
    def is_full(self) -> bool:
        """Whether it ends with its time, so that memory holds it also where hardly any request is good."""
        return self.good >= LEAST_PAIRS or sum(map(len, self.rows.values())) >= MOST_ROWS

    @property
    def ratio(self) -> float:
        """The geometric mean latency of the candidate over that of the primary."""
        a, b = (math.fsum(logs) / len(logs) for logs in self.logs.values())
        return math.exp(b - a)


def judged(ratios: Sequence[float], margin: float) -> tuple[RatioEstimate, Outcome]:
    """What the ratios of the blocks so far show, by the rules of the report for its leading comparison."""
    estimate = estimate_anytime(ratios, margin, lone_correlation(ratios))
    if len(ratios) < LEAST_BLOCKS:
        return estimate, "inconclusive"
    p_adjusted = None if estimate.p_value is None else min(1.0, estimate.p_value / LEADING_SHARE)
    return estimate, judge(estimate.ci95, p_adjusted, margin, TYPICAL_LATENCY.higher_is_better)


class ShadowRun:
    """Takes pairs until `finish`; `say` gets the verdict after each block and the line for it, from the thread."""

    def __init__(
        self, store: RunStore, arms: tuple[ArmRequest, ArmRequest], *, share: float, block_s: float, margin: float,
        say: Callable[[Outcome, str], None], failed: Callable[[str], None], takes_turns: bool = False,
    ) -> None:  # fmt: skip
        """`failed` is called with the reason where the run cannot go on. Raises `StorageError`."""
        self.counts = Counter[str]()
        """Those of the shadows."""
        self.failure: str | None = None
        """Why the run could not go on; the traffic does."""
        self.started_ns = perf_counter_ns()
        self._store = store
        self._say, self._failed = say, failed
        self.block_ns = int(block_s * NS_PER_S)
        self.seed = randbits(32) if takes_turns else None
        """Draws whose turn it is to answer clients; None if the servers take no turns."""
        self._stored = self._timed = 0
        """Blocks of both arms, and the requests in them."""
        self.record = ShadowRecord(share=share, block_seconds=block_s, swap=takes_turns)
        self._experiment = Experiment(
            arms=arms,
            model="unknown", weights=MODEL_WEIGHTS, payload="sent",
            transport="grpc" if arms[0].target == arms[0].grpc else "http", workloads=(self._workload(0.0),),
            preset="shadow", seed=self.seed or 0, equivalence_margin=margin, threads=0, until_decided=True,
        )  # fmt: skip
        self._tolerance: Tolerance | None = None
        self._cases: dict[str, ParityCase] = {}
        self._wrong: dict[str, int] = {}
        self._texts: set[str] = set()
        """The cases of texts."""
        self._block: _Block | None = None
        self._ratios: list[float] = []
        self.estimate = RatioEstimate(0)
        """Of the ratios of all blocks so far."""
        self.latencies, self.first_bytes = ({label: DurationCounts() for label in LABELS} for _ in range(2))
        """Of the good requests in blocks."""
        self._lags_ms: list[float] = []
        self._models: set[str] = set()
        self._queue: SimpleQueue[tuple[PairedRequest, PairedRequest | None] | None] = SimpleQueue()
        store.write(self._experiment)
        store.write(read_environment({"status": "unknown"}, {"kind": "traffic", "item": "request"}))
        store.write(RunState(state="running", phase="shadow"))
        self._thread = threading.Thread(target=self._work, name="shadow", daemon=True)
        self._thread.start()

    def take(self, primary: PairedRequest, copy: PairedRequest | None) -> None:
        """Compare a request and its copy, if it has one, and free their memory."""
        self._queue.put((primary, copy))

    def finish(self, wait_s: float) -> bool:
        """Compare what waits, and store the end. Returns whether everything was stored."""
        self._queue.put(None)
        self._thread.join(wait_s)
        return not self._thread.is_alive() and self.failure is None

    # What the thread does

    def _work(self) -> None:
        try:
            while (pair := self._queue.get()) is not None:
                try:
                    self._add(*pair)
                finally:
                    _free(*pair)
            self._end()
        except Exception as exc:  # noqa: BLE001 (the traffic goes on)
            self.failure = one_line(str(exc) or repr(exc))
            self._failed(self.failure)
        while self.failure is not None and (pair := self._queue.get()) is not None:
            _free(*pair)

    def _add(self, primary: PairedRequest, copy: PairedRequest | None) -> None:
        if is_text(primary):
            self._read_texts(primary, copy)
        if copy is not None:
            self._add_pair(primary, copy)
        if _is_refusal(primary):  # it was the client's fault
            return
        turn, within_ns = divmod(max(0, (primary.sent_ns or primary.at_ns) - self.started_ns), self.block_ns)
        number, timed = turn, dict[Label, PairedRequest]()
        if self.seed is not None:
            number = turn // len(LABELS)
            if whose_turn(self.seed, turn) == primary.arm and within_ns >= _SETTLING * self.block_ns:
                timed = {primary.arm: primary}
        elif copy is not None:
            timed = dict(zip(LABELS, (primary, copy), strict=True))
        faults = [_fault(request) for request in timed.values()]
        if not timed or (number == 0 and not any(faults)):  # connections are new, and a candidate may be cold
            return
        if self._block is not None and number > self._block.number and self._block.is_full:
            self._close(self._block)
        if self._block is None:
            self._block = _Block(number, perf_counter_ns(), utc_now(), process_time_ns())
        self._timed += 1
        for (arm, request), fault in zip(timed.items(), faults, strict=True):
            self._block.add(arm, request, fault, is_good=not any(faults))
            if fault is None:
                began_ns, first_ns, end_ns = _times_ns(request)
                self.latencies[arm].add((end_ns - began_ns) / NS_PER_S)
                self.first_bytes[arm].add((first_ns - began_ns) / NS_PER_S)

    def _add_pair(self, primary: PairedRequest, copy: PairedRequest) -> None:
        if copy.sent_ns is not None and len(self._lags_ms) < _MOST_LAGS:
            self._lags_ms.append((copy.sent_ns - (primary.sent_ns or 0)) / NS_PER_MS)
        self._count(pairs=1, refused=int(_is_refusal(primary) and _is_refusal(copy)))
        if not is_text(primary):
            self._compare(*((primary, copy) if primary.arm == LABELS[0] else (copy, primary)))

    def _read_texts(self, primary: PairedRequest, copy: PairedRequest | None) -> None:
        """Take the answers of a language model apart, and compare them where they are certain."""
        fields = fields_of(b"".join(primary.content), primary.headers)
        both = [
            read_text(request, fields)
            for request in (primary, copy)
            if request is not None and not request.lost and _fault(request) is None
        ]
        if copy is None or len(both) < len(LABELS) or _fault(primary) is not None or _fault(copy) is not None:
            return
        name = self._name(primary, f"{primary.route.rpartition('/')[2]}, temperature 0")
        if not is_certain(fields):
            self._count(drawn=1)
        elif (alike := are_alike(*both)) is not None:
            self._texts.add(name)
            case = self._right(name)
            if not alike:
                case = msgspec.structs.replace(
                    case, ok=False, cosine_min=0.0, fault="the texts begin with other tokens"
                )
            self._add_case(case)

    def _count(self, **more: int) -> None:
        now = {name: getattr(self.record, name) + number for name, number in more.items()}
        self.record = msgspec.structs.replace(self.record, **self.counts, **now)

    # Answers

    def _compare(self, expected: PairedRequest, answered: PairedRequest) -> None:
        """Compare the candidate's answer with the one that is `expected`, the primary's, whichever was the copy."""
        if expected.lost or answered.lost:
            return
        if any(_fault(each) is not None and not _is_refusal(each) for each in (expected, answered)):
            return  # it counts as failed, not as a wrong answer
        name = self._name(expected, None)
        before = self._cases.get(name)
        is_wanted = before is None or before.images < _OFTEN or self._queue.qsize() <= _BEHIND
        if is_wanted and (case := self._case(name, expected, answered)) is not None:
            self._add_case(case)

    def _name(self, request: PairedRequest, of_text: str | None) -> str:
        """Of the row of a request in the table of answers: its model, and its inputs or `of_text`."""
        content = b"".join(request.content)
        if request.transport == "grpc":
            content = plain(content, request.headers.get("grpc-encoding"))
        says = described(request.transport, request.route, request.headers, content)
        model = says.get("model") or "?"
        if _fault(request) is None:  # else clients may name what there is not
            self._models.add(model)
        inputs = ", ".join(f"{each.name} {each.datatype} {list(each.shape)}" for each in says.get("tensors", ()))
        name = f"{model}: {of_text or inputs or 'no inputs that can be read'}"
        if name not in self._cases and len(self._cases) >= _MOST_SHAPES:
            name = "other texts" if of_text else _OTHERS
        return name

    def _add_case(self, case: ParityCase) -> None:
        before = self._cases.get(case.name)
        self._wrong[case.name] = self._wrong.get(case.name, 0) + (not case.ok)
        self._cases[case.name] = case if before is None else _both(before, case)
        self._count(compared=1, wrong=int(not case.ok))

    def _right(self, name: str) -> ParityCase:
        return ParityCase(
            name=name, label=LABELS[1], kind="reference", images=1, cosine_min=1.0, max_abs=0.0, ok=True,
            relative_max=0.0, element_max=0.0,
        )  # fmt: skip

    def _case(self, name: str, expected: PairedRequest, answered: PairedRequest) -> ParityCase | None:
        """How one answer of the candidate agrees; None if the expected one cannot be read."""
        case = self._right(name)
        if expected.status != answered.status:
            fault = f"{_status_words(answered)} instead of {_status_words(expected)}"
            return msgspec.structs.replace(case, ok=False, cosine_min=0.0, relative_max=None, fault=fault)
        bodies = [b"".join(request.answer) for request in (expected, answered)]
        if bodies[0] == bodies[1] or _is_refusal(expected):
            return case
        try:
            datatypes, reference = _outputs(expected, bodies[0])
        except Exception:  # noqa: BLE001 (an unreadable answer of the primary does not count against the candidate)
            return None
        rules = tolerances_for(datatypes, {}, self._tolerance or self._read_arms())
        try:
            _, actual = _outputs(answered, bodies[1])
            return compare_answers(name, [reference], [actual], label=LABELS[1], kind="reference", rules=rules)
        except Exception as exc:  # noqa: BLE001 (the candidate may answer anything)
            fault = one_line(str(exc).removeprefix(f"{name}: "))
            return msgspec.structs.replace(case, ok=False, cosine_min=0.0, relative_max=None, fault=fault)

    def _read_arms(self) -> Tolerance:
        """Ask both servers for the settings in effect, once: their precision decides what counts as rounding."""
        arms = [_arm_record(request, next(iter(self._models), "")) for request in self._experiment.arms]
        self._store.write_all(ArmRecord, arms)
        self._tolerance = tolerance_of(arm.in_effect.get("precision") for arm in arms)
        return self._tolerance

    def _parity(self) -> ParityRecord:
        tolerance = self._tolerance or self._read_arms()
        cases = [self._judged(case) for case in self._cases.values()]
        return ParityRecord(
            cases=tuple(sorted(cases, key=lambda case: case.ok)), ok=all(case.ok for case in cases),
            precision=tolerance.precision, tolerance_relative=tolerance.relative, tolerance_element=tolerance.element,
        )  # fmt: skip

    def _judged(self, case: ParityCase) -> ParityCase:
        """A kind of requests by all of its answers. Of texts some begin differently between right servers."""
        wrong = self._wrong[case.name]
        if case.ok:
            return case
        is_proven = case.images >= FIRSTS_THAT_PROVE and case.images - wrong < LEAST_ALIKE * case.images
        if case.name in self._texts and not is_proven:
            return msgspec.structs.replace(case, ok=True, cosine_min=1.0, fault=None)
        return msgspec.structs.replace(case, fault=f"{case.fault} ({wrong:,} of {counted(case.images, 'answer')})")

    # Blocks

    def _close(self, block: _Block) -> None:
        """Store a block of both arms, in their order."""
        self._block = None
        now_ns, number = perf_counter_ns(), self._stored // 2
        first = LABELS[0] if self.seed is None else whose_turn(self.seed, len(LABELS) * block.number)
        for position, arm in enumerate(sorted(LABELS, key=lambda label: label != first)):
            rows, index = block.rows[arm], self._stored
            path = self._store.samples_path(index)
            store_samples(path, [np.array(rows, dtype=SAMPLE_DTYPE)])
            errors = sum(row[-1] >= 0 for row in rows)
            self._store.block(
                BlockRecord(
                    index=index, workload=self._experiment.workloads[0].name, round=number, label=arm,
                    position=position, started_at=block.began_at, window_start_ns=block.began_ns,
                    window_end_ns=now_ns, samples=f"samples/{index:04d}.npy", requests=len(rows),
                    items=len(rows) - errors, errors=errors, error_messages=tuple(block.messages),
                    generator_cpu_ns=process_time_ns() - block.cpu_ns, server_cpu_ns=None, stages=None, complete=True,
                )
            )  # fmt: skip
            self._stored += 1
        if block.good:
            self._ratios.append(block.ratio)
        self._store_state()
        self.estimate, verdict = judged(self._ratios, self._experiment.equivalence_margin)
        self._say(verdict, self._in_one_line(verdict))

    def _in_one_line(self, verdict: Outcome) -> str:
        ratio, ci95, record = self.estimate.ratio, self.estimate.ci95, self.record
        words = {"arm_better": "B is faster", "baseline_better": "A is faster", "no_difference": "no difference"}
        figure = "no ratio yet" if ratio is None else f"B takes {ratio:.3f}× the latency of A"
        figure += "" if ci95 is None else f" ({ci95[0]:.3f} to {ci95[1]:.3f})"
        return (
            f"{counted(self.estimate.pairs, 'round' if record.swap else 'block')}, {counted(record.pairs, 'pair')}: "
            f"{figure}, {words.get(verdict, verdict)}; {record.wrong:,} of {record.compared:,} answers differ, "
            f"{record.dropped:,} dropped, {record.failed:,} failed"
        )

    def _store_state(self) -> None:
        self._count()
        if self._lags_ms:
            p50, p99 = (float(value) for value in np.percentile(self._lags_ms, (50, 99)))
            self.record = msgspec.structs.replace(self.record, lag_p50_ms=p50, lag_p99_ms=p99)
        self._store.write(self.record)
        self._store.write(self._parity())
        seconds = (perf_counter_ns() - self.started_ns) / NS_PER_S
        self._experiment = msgspec.structs.replace(
            self._experiment,
            model=join(sorted(self._models)) or self._experiment.model,
            workloads=(self._workload(self._timed / seconds),),
        )
        self._store.write(self._experiment)

    def _workload(self, rate_per_s: float) -> Workload:
        seconds = self.record.block_seconds
        return Workload(
            scenario="shadow", batch_size=1, concurrency=MOST_UNDER_WAY, requests=LEAST_PAIRS, seconds=seconds,
            max_seconds=seconds, rounds=max(1, self._stored // 2), arrivals="trace", rate_per_s=rate_per_s,
        )  # fmt: skip

    def _end(self) -> None:
        if (block := self._block) is not None and (block.good >= LEAST_PAIRS or block.messages):
            self._close(block)
        self._store_state()
        self._store.write_last(RunState(state="finished", phase="finished", finished_at=utc_now()))


def _free(primary: PairedRequest, copy: PairedRequest | None) -> None:
    primary.recorder.freed_bytes += primary.held_bytes + (0 if copy is None else copy.held_bytes)


def _times_ns(request: PairedRequest) -> tuple[int, int, int]:
    """When a request had been sent, and when the first and the last byte of its answer had come."""
    began_ns = request.sent_ns or request.at_ns
    first_ns = max(request.first_byte_ns or 0, began_ns)
    return began_ns, first_ns, max(request.end_ns or first_ns, began_ns)


def _http_status(request: PairedRequest) -> int | None:
    """HTTP's, or that of gRPC as samples have it."""
    return request.status if request.status is None or request.transport == "http" else GRPC_STATUS + request.status


def _status_words(request: PairedRequest) -> str:
    if request.transport == "http" or request.status is None or request.status >= len(STATUS_NAMES):
        return f"status {request.status}"
    return f"gRPC status {STATUS_NAMES[request.status]}"


def _is_refusal(request: PairedRequest) -> bool:
    """Whether the server says that the request is wrong."""
    if request.transport == "grpc":
        return request.status in _REFUSALS
    return request.status is not None and 400 <= request.status < 500


def _fault(request: PairedRequest) -> str | None:
    """Why a request counts as failed."""
    if request.end_ns is None:
        return request.failure or "the answer is not whole"
    if _http_status(request) not in (*range(400), GRPC_STATUS):
        return f"it answers {_status_words(request)}"
    return request.failure


def _outputs(request: PairedRequest, body: bytes) -> tuple[dict[str, str], Answer]:
    """The datatypes and the values of an answer's outputs. Raises `ValueError`."""
    headers = request.answer_headers
    if request.transport == "grpc":
        message = ModelInferResponse.FromString(plain(body, headers.get("grpc-encoding")))
        arrays = read_message(message)
        datatypes = {each.name: each.datatype for each in message.outputs}
    else:
        content = uncompressed(body, headers.get("content-encoding", "identity"), MOST_HELD_BYTES)
        if content is None:
            raise ValueError("its compression cannot be read")
        length = headers.get(HEADER_LENGTH)
        arrays = read_body(memoryview(content), length, binary=False)
        datatypes = {each.name: each.datatype for each in read_document(content[: int(length or len(content))])}
    return datatypes, {name: np.atleast_1d(array) for name, array in arrays.items()}


def _both(before: ParityCase, now: ParityCase) -> ParityCase:
    """The cases of several answers as one: the largest errors and the first fault."""
    worst = {
        name: max((value for case in (before, now) if (value := getattr(case, name)) is not None), default=None)
        for name in ("max_abs", "relative_max", "element_max")
    }
    return msgspec.structs.replace(
        before if not before.ok else now,
        images=before.images + now.images, cosine_min=min(before.cosine_min, now.cosine_min), **worst,
    )  # fmt: skip


def _arm_record(request: ArmRequest, model: str) -> ArmRecord:
    """As the server describes itself, or as its URL alone."""
    try:
        return Arm(request, RemoteDeployment(request.target, access=request.access), model).record()
    except (AddressError, EndpointError, OSError):  # the first: it has gRPC alone
        return ArmRecord(
            label=request.label, title=request.target, target=request.target, url=request.target, server_name=None,
            server_version=None, launched=False, argv=None, settings={}, in_effect={}, model_config=None,
            gpu_info=None, artefact=None,
        )  # fmt: skip
