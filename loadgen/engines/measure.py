"""Measures a matrix of engines: prepares the models, makes every visit in its turn, and stores each at once.

A configuration that fails is recorded with its reason and the run goes on. After Ctrl-C nothing more is stored.
"""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from typing import Any

import msgspec

from loadgen.base.child_process import usable_cores
from loadgen.engines.plan import PlannedVisit, request_of, schedule
from loadgen.engines.store import MatrixStore
from loadgen.engines.worker_process import LIMITS, CellError, Limits, WorkerError, WorkerProcess
from loadgen.measure.interruption import interruptible, uninterrupted
from loadgen.measure.machine import utc_now
from loadgen.measure.machine_watch import machine_load, read_processors
from loadgen.records.matrix import Configuration, Conversion, MatrixPlan, Measured, Visit, described, shape_text
from loadgen.records.run import RunState
from loadgen.records.store import StorageError

CORES = usable_cores()
MADE_SIDE_BY_SIDE = max(1, CORES // 2)
"""Files that are made at once. Each has two cores, because its seconds are a cost in the report."""
LOADED_SIDE_BY_SIDE = CORES
"""Kept processes that load at once; most of a load waits for the disk, the device or a single thread."""
MOST_FAILURES = 2
"""Visits without a single cell after which a configuration is given up, so that a hanging one does not take hours."""


VisitDone = Callable[[Configuration, Visit, int, int, float], object]
"""Hears of a stored visit: how many of how many are done, and the seconds left, estimated from those of this run."""


_Files = tuple[str, str, str]
"""Model, engine and precision: configurations that share these share their files."""


class MatrixRun:
    """The state of one run: what is done, what has failed, and the processes that are kept."""

    def __init__(
        self, plan: MatrixPlan, store: MatrixStore, worker: Sequence[str], *, limits: Limits = LIMITS,
        now: Callable[[str], object] = lambda _: None, visit_done: VisitDone = lambda *_: None,
    ) -> None:  # fmt: skip
        """The folder of the store is open. `now` gets each step in a few words. Raises `StoredRunError`."""
        self._plan, self._store, self._worker, self._limits = plan, store, worker, limits
        self._now, self._visit_done = now, visit_done
        stored = {(visit.round, visit.configuration) for visit in store.visits() if visit.error is None}
        self._visits = schedule(plan)
        self._left = [planned for planned in self._visits if (planned.round, planned.configuration) not in stored]
        self._processes: dict[int, WorkerProcess] = {}
        self._current: WorkerProcess | None = None
        self._preparing: deque[tuple[_Files, WorkerProcess]] = deque()
        self._started: set[int] = set()
        self._failures: dict[int, int] = {}
        self._prepared: dict[_Files, tuple[Conversion, ...] | str] = {}
        self._fileless: set[str] = set()
        self._broken: dict[int, str] = {}
        self._began = monotonic()
        self._loading: list[float] = []
        """Seconds until the kept processes of each model so far were ready."""

    def run(self) -> RunState:
        """Make every visit that is not stored yet. Raises `StorageError`."""
        state = RunState(state="running", phase="measuring")
        try:
            with interruptible():
                self._store.write(state)
                self._all()
            state = RunState(state="finished", phase="finished", finished_at=utc_now())
        except KeyboardInterrupt:
            state = RunState(state="interrupted", phase="measuring", finished_at=utc_now())
        except StorageError as exc:
            state = RunState(state="failed", phase="measuring", error=str(exc), finished_at=utc_now())
            raise
        finally:
            with uninterrupted():
                self._stop()
                self._store.write(state)
        return state

    def _all(self) -> None:
        self._prepare()
        self._began = monotonic()
        if self._plan.processes == "fresh":
            for place, planned in enumerate(self._left):
                self._visit(planned, place)
            return
        models = [configuration.model for configuration in self._plan.configurations]
        for model in dict.fromkeys(models):
            of_model = [
                (place, planned) for place, planned in enumerate(self._left) if models[planned.configuration] == model
            ]
            started = monotonic()
            self._start_all({planned.configuration: None for _, planned in of_model})
            self._loading.append(monotonic() - started)
            for place, planned in of_model:
                self._visit(planned, place)
            self._stop()

    def _start_all(self, places: Iterable[int]) -> None:
        """Start the processes that are kept, before any of them is measured; `LOADED_SIDE_BY_SIDE` load at once."""
        loading: dict[WorkerProcess, int] = {}
        for place in places:
            configuration = self._plan.configurations[place]
            if isinstance(self._prepared[_files_of(configuration)], str):
                continue
            if len(loading) >= LOADED_SIDE_BY_SIDE:
                self._wait_for_one(loading)
            self._now(f"starting {described(configuration)}")
            try:
                self._processes[place] = process = self._start(place, configuration)
                loading[process] = place
            except WorkerError as exc:
                self._broken[place] = str(exc)
        while loading:
            self._wait_for_one(loading)

    def _wait_for_one(self, loading: dict[WorkerProcess, int]) -> None:
        """Wait until one of the loading processes is ready or has failed, and remove it; the oldest if none answers in
        time."""
        answered, _, _ = select.select(list(loading), [], [], self._limits.load)
        process = answered[0] if answered else next(iter(loading))
        place = loading.pop(process)
        try:
            process.wait_until_ready(self._plan.configurations[place], None if answered else 0.0)
        except WorkerError as exc:
            self._broken[place] = str(exc)
            self._processes.pop(place).stop()

    def _stop(self) -> None:
        """Stop every process."""
        processes = (*self._processes.values(), *([self._current] if self._current else ()))
        for process in processes:
            process.end()
        for process in processes:
            process.stop()
        for _, preparation in self._preparing:
            preparation.stop()
        self._processes.clear()
        self._preparing.clear()
        self._current = None

    def _prepare(self) -> None:
        """Make each model's own answers, and the files of the configurations that are left, once and in processes of
        their own, so that they do not count towards an engine's memory and time.

        The first preparation of each engine tells whether it executes files. Of one that does not, another is needed
        only for a model that has no other preparation.
        """
        needed = list(
            dict.fromkeys(_files_of(self._plan.configurations[planned.configuration]) for planned in self._left)
        )
        self._make({engine: key for key in reversed(needed) for engine in [key[1]]}.values())
        self._make(key for key in needed if key[1] not in self._fileless)
        answered = {key[0] for key in self._prepared}
        self._make({key[0]: key for key in needed if key[0] not in answered}.values())
        for key in needed:
            self._prepared.setdefault(key, ())

    def _make(self, keys: Iterable[_Files]) -> None:
        """Prepare those that are not prepared yet, up to `MADE_SIDE_BY_SIDE` at once."""
        for key in keys:
            if key in self._prepared:
                continue
            place, configuration = next(
                pair for pair in enumerate(self._plan.configurations) if _files_of(pair[1]) == key
            )
            if len(self._preparing) >= MADE_SIDE_BY_SIDE:
                self._finish_preparation()
            self._now(f"preparing {key[0]} for {key[1]} in {key[2]}")
            try:
                log_path = self._store.log_path(f"{place:03d}-{key[1]}-prepare")
                arguments = ["--prepare", self._request(configuration)]
                self._preparing.append((key, WorkerProcess(self._worker, arguments, log_path, self._limits)))
            except WorkerError as exc:
                self._prepared[key] = str(exc)
        while self._preparing:
            self._finish_preparation()

    def _finish_preparation(self) -> None:
        """Wait for the oldest preparation."""
        key, preparation = self._preparing[0]
        try:
            has_file, self._prepared[key] = preparation.wait_until_prepared()
            if not has_file:
                self._fileless.add(key[1])
        except WorkerError as exc:
            self._prepared[key] = str(exc)
        preparation.stop()
        self._preparing.popleft()

    def _visit(self, planned: PlannedVisit, done: int) -> None:
        configuration = self._plan.configurations[planned.configuration]
        if self._failures.get(planned.configuration, 0) >= MOST_FAILURES:
            return
        self._now(f"round {planned.round + 1} of {self._plan.rounds}: {described(configuration)}")
        visit = self._measured(planned, configuration)
        self._store.write_numbered(visit, planned.number)
        self._failures[planned.configuration] = 0 if visit.cells else self._failures.get(planned.configuration, 0) + 1
        per_visit = (monotonic() - self._began - sum(self._loading)) / (done + 1)
        later = {self._plan.configurations[planned.configuration].model for planned in self._left[done + 1 :]}
        loads = max(self._loading, default=0.0) * len(later - {configuration.model})
        left = per_visit * (len(self._left) - done - 1) + loads
        stored = len(self._visits) - len(self._left)
        self._visit_done(configuration, visit, stored + done + 1, len(self._visits), left)

    def _measured(self, planned: PlannedVisit, configuration: Configuration) -> Visit:
        """The visit, with its error if there is one and the cells that were measured before or beside it."""
        base = Visit(round=planned.round, configuration=planned.configuration, started_at=utc_now())
        prepared = self._prepared[_files_of(configuration)]
        broken = self._broken.get(planned.configuration)
        if isinstance(prepared, str) or broken is not None:
            self._failures[planned.configuration] = MOST_FAILURES  # no round would change it
            return msgspec.structs.replace(base, error=broken or str(prepared))
        cells: list[Measured] = []
        energy = self._plan.processes == "fresh" or planned.round == self._plan.rounds - 1
        seconds, error = float(self._plan.settings.get("seconds", 1.0)), None
        keeps, process = self._plan.processes == "kept", self._processes.get(planned.configuration)
        try:
            if process is None:
                process = self._current = self._start(planned.configuration, configuration)
                if keeps:
                    self._processes[planned.configuration], self._current = process, None
                process.wait_until_ready(configuration)
            base = self._with_costs(base, planned.configuration, process, prepared)
            before = read_processors()
            for cell in planned.cells:
                try:
                    cells.append(process.measure(cell, seconds, energy=energy))
                except CellError as exc:
                    error = error or f"{shape_text(cell)}: {exc}"
            base = msgspec.structs.replace(base, machine=machine_load(before, read_processors(), ()))
            if self._plan.settings.get("profile") and planned.round == self._plan.rounds - 1 and cells:
                profiles = process.profile([cell.shape for cell in cells])
                cells = [
                    msgspec.structs.replace(cell, kernels=kernels)
                    for cell, kernels in zip(cells, profiles, strict=True)
                ]
        except WorkerError as exc:
            error = str(exc)
            self._end(planned.configuration)
        except CellError as exc:
            error = error or f"profile: {exc}"
        if not keeps:
            self._end(planned.configuration)
        return msgspec.structs.replace(base, error=error, cells=tuple(cells))

    def _with_costs(self, base: Visit, place: int, process: WorkerProcess, prepared: tuple[Conversion, ...]) -> Visit:
        """Add what the process cost until its engine was ready, for a kept process only in its first visit. The first
        visit has the steps of the preparation, because the process may not know how its file was made."""
        first, ready = place not in self._started, process.ready
        self._started.add(place)
        base = msgspec.structs.replace(base, description=ready.description, item=ready.item)
        if self._plan.processes == "kept" and not first:
            return base
        conversions = prepared if first and prepared else ready.conversions
        return msgspec.structs.replace(
            base, import_seconds=ready.import_seconds, load_seconds=ready.load_seconds, conversions=conversions
        )

    def _start(self, place: int, configuration: Configuration) -> WorkerProcess:
        log_path = self._store.log_path(f"{place:03d}-{configuration.engine}-{configuration.mode}")
        return WorkerProcess(self._worker, [self._request(configuration)], log_path, self._limits)

    def _end(self, place: int) -> None:
        process = self._processes.get(place) or self._current
        if process is not None:
            process.stop()
        self._processes.pop(place, None)
        self._current = None

    def _request(self, configuration: Configuration) -> dict[str, Any]:
        plan = self._plan
        models = list(dict.fromkeys(each.model for each in plan.configurations))
        return request_of(
            configuration,
            plan.settings,
            plan.batches,
            plan.lengths[configuration.model],
            first_calls=plan.processes == "kept",
            references=str(self._store.references_path(models.index(configuration.model))),
        )


def _files_of(configuration: Configuration) -> _Files:
    return configuration.model, configuration.engine, configuration.precision
