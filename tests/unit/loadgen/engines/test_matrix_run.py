"""The run of a matrix against a worker that dies, hangs, lies or is interrupted: what is kept, and what is said."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from loadgen.engines.measure import MOST_FAILURES, MatrixRun
from loadgen.engines.plan import schedule
from loadgen.engines.store import MatrixStore, read_plan
from loadgen.engines.worker_process import Limits
from loadgen.records.matrix import Configuration, MatrixPlan, Visit
from loadgen.records.run import RunState
from loadgen.records.store import StorageError, StoredRunError, read_one

FAKE = (sys.executable, str(Path(__file__).with_name("fake_worker.py")))
LIMITS = Limits(prepare=30, load=30, cell=30, stop=5)


def make_plan(folder: Path, model: str, rounds: int = 2, processes: str = "fresh", **settings: object) -> MatrixPlan:
    engines = ("good", "bad")
    return MatrixPlan(
        settings={"artefacts": str(folder / "artefacts"), "seconds": 0.01, **settings},
        sha256="0",
        seed=0,
        rounds=rounds,
        processes="kept" if processes == "kept" else "fresh",
        configurations=tuple(
            Configuration(model=model, engine=engine, precision="fp32", mode="eager", device="cpu", threads=1)
            for engine in engines
        ),
        refused=(),
        batches=(1, 4),
        lengths={model: (8, 16)},
        baseline="good/eager",
        min_cosine=0.99,
        min_top1=0.99,
    )


def run(plan: MatrixPlan, folder: Path, limits: Limits = LIMITS, **progress: Any) -> MatrixStore:
    store = MatrixStore(folder / "run")
    with store.open():
        store.write(plan)
        MatrixRun(plan, store, FAKE, limits=limits, **progress).run()
    return store


def stored_state(folder: Path) -> RunState:
    state = read_one(folder, RunState)
    assert state is not None
    return state


def of(store: MatrixStore, configuration: int) -> list[Visit]:
    return [visit for visit in store.visits() if visit.configuration == configuration]


@pytest.mark.parametrize("processes", ["fresh", "kept"])
def test_every_visit_is_stored_with_all_its_cells(tmp_path: Path, processes: str) -> None:
    plan = make_plan(tmp_path, "fine", processes=processes, profile=True)
    store = run(plan, tmp_path)
    assert stored_state(store.directory).state == "finished"
    assert read_one(store.directory, MatrixPlan) == plan
    visits = store.visits()
    assert {(each_visit.round, each_visit.configuration) for each_visit in visits} == {
        (r, c) for r in range(2) for c in range(2)
    }
    for visit in visits:
        assert visit.error is None
        assert {(cell.batch, cell.length) for cell in visit.cells} == {(b, n) for b in (1, 4) for n in (8, 16)}
        assert visit.item == "image"
        assert visit.machine is not None
        assert visit.machine.known_ns is not None
        assert all(bool(cell.kernels) == (visit.round == 1) for cell in visit.cells)
        costs = visit.round == 0 or processes == "fresh"
        assert (visit.load_seconds is not None) == costs == bool(visit.conversions)
        assert all(conversion.made_now == (visit.round == 0) for conversion in visit.conversions)
    starts = (tmp_path / "artefacts" / "starts-fine-good-eager").read_text()
    assert len(starts) == (1 if processes == "kept" else 2)


BAD = {
    "dies": "was killed by SIGKILL",
    "refuses": "the model cannot be loaded",
    "lies": "answered something else than the cell of batch",
    "timeless": "measured no time",
    "pollutes": "its answer cannot be read",
    "converts": "the engine in effect is another one: precision bf16 instead of fp32",
}


# A kept process by default where it has died and where its words cannot be trusted any more.
@pytest.mark.parametrize(
    ("model", "processes"),
    [
        pytest.param(model, kind, marks=() if kind == "fresh" or model in ("dies", "pollutes") else pytest.mark.slow)
        for kind in ("fresh", "kept")
        for model in BAD
    ],
)
def test_a_bad_configuration_is_told_and_the_others_are_measured(tmp_path: Path, model: str, processes: str) -> None:
    store = run(make_plan(tmp_path, model, rounds=3, processes=processes), tmp_path)
    good, bad = of(store, 0), of(store, 1)
    assert [len(visit.cells) for visit in good] == [4, 4, 4]
    assert 1 <= len(bad) <= MOST_FAILURES  # it is given up
    for visit in bad:
        assert BAD[model] in str(visit.error)
        assert visit.cells == ()
    assert stored_state(store.directory).state == "finished"


@pytest.mark.parametrize("processes", ["fresh", "kept"])
def test_a_hanging_process_is_stopped_in_time(tmp_path: Path, processes: str) -> None:
    limits = Limits(prepare=30, load=1, cell=1, stop=0.2)
    store = run(make_plan(tmp_path, "hangs", rounds=1, processes=processes), tmp_path, limits)
    assert [len(visit.cells) for visit in of(store, 0)] == [4]
    assert "no answer after 1 s" in str(of(store, 1)[0].error)
    assert not [child for child in psutil.Process().children() if "fake_worker" in " ".join(child.cmdline())]


def test_a_cell_that_does_not_fit_costs_only_itself(tmp_path: Path) -> None:
    store = run(make_plan(tmp_path, "small"), tmp_path)
    for visit in of(store, 1):
        assert {cell.batch for cell in visit.cells} == {1}
        assert len(visit.cells) == 2
        assert "batch 4, length" in str(visit.error)
        assert "out of memory" in str(visit.error)


def test_cells_before_a_death_are_kept(tmp_path: Path) -> None:
    store = run(make_plan(tmp_path, "halfway", rounds=8), tmp_path)
    bad = of(store, 1)
    assert any(visit.cells for visit in bad)
    for visit in bad:
        assert "SIGKILL" in str(visit.error)
        assert all(cell.batch == 1 for cell in visit.cells)


def test_a_model_that_cannot_be_prepared_fails_once(tmp_path: Path) -> None:
    store = run(make_plan(tmp_path, "unprepared", rounds=3), tmp_path)
    assert [visit.error for visit in store.visits()] == ["no such weights"] * 2


def test_a_preparation_that_crashes_cites_its_own_log(tmp_path: Path) -> None:
    for _ in range(2):  # the second run writes to the same logs
        store = run(make_plan(tmp_path, "unpreparable", rounds=1), tmp_path)
    for configuration, engine in enumerate(("good", "bad")):
        (visit,) = of(store, configuration)
        assert "killed by SIGSEGV" in str(visit.error)
        assert str(visit.error).endswith(f"ends with: {engine} has no such operator")


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    (tmp_path / "artefacts").mkdir()
    plan = make_plan(tmp_path, "interrupts", rounds=3)

    def interrupt(configuration: Configuration, visit: Visit, done: int, of: int, seconds_left: float) -> None:
        if done == 2:
            (tmp_path / "artefacts" / "interrupt").touch()  # the next worker sends SIGTERM here

    store = run(plan, tmp_path, visit_done=interrupt)
    assert stored_state(store.directory).state == "interrupted"
    before = store.visits()
    assert len(before) == 2
    assert not [child for child in psutil.Process().children() if "fake_worker" in " ".join(child.cmdline())]
    seen: list[int] = []

    def count(configuration: Configuration, visit: Visit, done: int, of: int, seconds_left: float) -> None:
        assert of == 6
        seen.append(done)

    store = run(plan, tmp_path, visit_done=count)
    assert stored_state(store.directory).state == "finished"
    assert seen == [3, 4, 5, 6]
    assert len(store.visits()) == 6
    assert all(each_visit in store.visits() for each_visit in before)


def test_a_failed_visit_is_made_again_when_the_run_goes_on(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, "dies", rounds=1)
    run(plan, tmp_path)
    fixed = msgspec.structs.replace(
        plan,
        configurations=tuple(
            msgspec.structs.replace(configuration, engine="good") for configuration in plan.configurations
        ),
    )
    store = run(fixed, tmp_path)
    assert [visit.error for visit in store.visits()] == [None, None]


def test_a_full_disk_ends_the_run_and_keeps_what_was_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, written = MatrixStore.write_numbered, list[int]()

    def full(store: MatrixStore, visit: Visit, number: int) -> None:
        if written:
            raise StorageError("cannot store: No space left on device")
        written.append(number)
        write(store, visit, number)

    monkeypatch.setattr(MatrixStore, "write_numbered", full)
    plan = make_plan(tmp_path, "fine")
    with pytest.raises(StorageError, match="No space left"):
        run(plan, tmp_path)
    store = MatrixStore(tmp_path / "run")
    assert len(store.visits()) == 1
    assert stored_state(store.directory).state == "failed"


def test_two_runs_never_share_a_folder(tmp_path: Path) -> None:
    store = MatrixStore(tmp_path)
    program = (
        "import sys; from pathlib import Path; from loadgen.records.store import StorageError\n"
        "from loadgen.engines.store import MatrixStore\n"
        "try:\n    with MatrixStore(Path(sys.argv[1])).open(): print('alone')\n"
        "except StorageError as exc: print(exc)\n"
    )
    argv = [sys.executable, "-c", program, str(tmp_path)]
    with store.open():
        assert "another process runs in" in subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    assert subprocess.run(argv, capture_output=True, text=True, check=True).stdout == "alone\n"


def test_a_folder_that_cannot_be_written_and_a_broken_record_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot store"), MatrixStore(tmp_path / "file" / "run").open():
        pass
    with pytest.raises(StoredRunError, match="holds no engine matrix: plan"):
        read_plan(tmp_path / "none")
    plan = make_plan(tmp_path, "fine", rounds=1)
    stored = run(plan, tmp_path)
    (stored.directory / "visits" / "0000.json").write_text("{")
    with pytest.raises(StoredRunError, match=r"0000\.json cannot be read"):
        stored.visits()


def test_a_worker_ends_with_its_parent(tmp_path: Path) -> None:
    """The parent is killed, so it cannot stop anything."""
    (tmp_path / "artefacts").mkdir()
    plan = tmp_path / "plan.json"
    plan.write_bytes(msgspec.json.encode(make_plan(tmp_path, "hangs", rounds=1)))
    program = (
        "import sys, msgspec; from pathlib import Path\n"
        "from loadgen.records.matrix import MatrixPlan\n"
        "from loadgen.engines.worker_process import WorkerProcess\n"
        "plan = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=MatrixPlan)\n"
        "one = plan.configurations[0]\n"
        "request = {**{name: getattr(one, name) for name in ('model', 'engine', 'precision', 'mode', 'threads')},"
        " 'artefacts': plan.settings['artefacts']}\n"
        "process = WorkerProcess(sys.argv[2:], [request], Path(sys.argv[1]).with_name('log'))\n"
        "print(process._process.pid, flush=True); sys.stdin.read()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program, str(plan), *FAKE], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert parent.stdout is not None
    worker = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.communicate()
    psutil.wait_procs([worker], timeout=60)
    assert not worker.is_running()


def test_the_number_of_a_visit_follows_from_its_place(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, "fine", rounds=2)
    assert sorted(turn.number for turn in schedule(plan)) == [0, 1, 2, 3]
    store = run(plan, tmp_path)
    for path in (store.directory / "visits").glob("*.json"):
        content = json.loads(path.read_text())
        assert int(path.stem) == content["round"] * 2 + content["configuration"]


def test_the_state_is_stored_from_the_beginning(tmp_path: Path) -> None:
    states: list[RunState] = []

    def watch(_: str) -> None:
        states.append(stored_state(tmp_path / "run"))

    run(make_plan(tmp_path, "fine", rounds=1), tmp_path, now=watch)
    assert {state.state for state in states} == {"running"}
