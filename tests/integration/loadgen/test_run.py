"""Whole runs on fake servers: what is stored when all goes well, and what when it does not."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from loadgen.checks.registry import invalidating
from loadgen.experiment.schedule import schedule
from loadgen.launch import deployment
from loadgen.launch.embedded import EmbeddedDeployment
from loadgen.measure import runner
from loadgen.measure.errors import RunError
from loadgen.measure.preparation import export_artefacts
from loadgen.measure.progress import LiveRatio, RunProgress
from loadgen.measure.runner import run_experiment
from loadgen.metrics.summaries import BlockSummary
from loadgen.records.probes import ServerStart
from loadgen.records.run import ArmRecord, ArmRequest, Environment, Experiment, ParityRecord, RunState, Workload
from loadgen.records.store import RunStore, StorageError, StoredBlock
from loadgen.report.document import Chart, Items, Table
from loadgen.report.sections.cold_start import cold_starts
from loadgen.verdict.result import analyse
from tests.integration.loadgen.conftest import (
    DEADLINE_S,
    FAKE_ABSERVE,
    FAULTY_GENERATOR,
    assert_stored,
    blocks,
    make_experiment,
    stored,
)

pytestmark = pytest.mark.usefixtures("no_process_left")


def run(experiment: Experiment, out: Path) -> RunState:
    return run_experiment(experiment, out, RunProgress(), abserve=FAKE_ABSERVE)


def seed_with_b_first(*workloads: Workload) -> int:
    return next(seed for seed in range(50) if schedule(make_experiment(workloads=workloads, seed=seed))[0].label == "b")


def test_a_first_start_that_chooses_otherwise_is_not_one_of_the_compared_server(tmp_path: Path) -> None:
    """As where two engines are equally fast: the seconds of another server would stand beside those of the arm's."""
    cold = Workload(scenario="cold-start", batch_size=1, concurrency=1, requests=1, seconds=0, max_seconds=60, rounds=2)
    run(make_experiment(workloads=(cold,), b_settings={"otherwise": "yes"}), tmp_path / "run")
    starts = stored(tmp_path / "run" / "cold_starts.json", list[ServerStart])
    assert [start.error for start in starts if start.compared or start.label == "a"] == [None] * 5
    (first,) = [start.error for start in starts if start.caches == "uncached" and start.label == "b"]
    assert first == "this time it was fake triton otherwise, and fake triton was compared"
    section = cold_starts(analyse(tmp_path / "run"))
    assert section is not None
    chart, table, warm = section.blocks
    assert isinstance(chart, Chart)
    assert isinstance(table, Table)
    assert isinstance(warm, Items)
    assert [column.title for column in table.columns] == ["stage", "A first start", "A later starts", "B later starts"]
    assert warm.items[1].text == f"B: its first start is not shown: {first}"
    assert "B first start" not in chart.data[0]["y"]


def test_a_run_stores_every_record_and_says_finished(tmp_path: Path) -> None:
    out = tmp_path / "run"
    cold = Workload(scenario="cold-start", batch_size=1, concurrency=1, requests=1, seconds=0, max_seconds=60, rounds=2)
    experiment = make_experiment(workloads=(cold, *make_experiment().workloads))
    state = run(experiment, out)
    assert (state.state, state.error) == ("finished", None)
    assert stored(out / "run.json", RunState) == state
    assert_stored(out, experiment)
    environment = stored(out / "environment.json", Environment)
    assert environment.inputs["kind"] == "photographs"
    cpu_count = environment.host["cpu_count"]
    assert isinstance(cpu_count, int)
    assert cpu_count >= 1
    arms = stored(out / "arms.json", list[ArmRecord])
    assert [(arm.label, arm.title, arm.launched) for arm in arms] == [
        ("a", "fake native", True),
        ("b", "fake triton", True),
    ]
    assert arms[0].in_effect["max_queue_delay_us"] == 2000
    assert arms[0].in_effect["device"] == "cpu"
    parity = stored(out / "parity.json", ParityRecord)
    assert parity.ok
    assert {case.kind for case in parity.cases} == {"reference", "alone"}
    starts = stored(out / "cold_starts.json", list[ServerStart])
    compared = sorted((start.label, start.repetition) for start in starts if start.compared)
    assert compared == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    assert [(start.label, start.filled) for start in starts[4:]] == [("a", ("choices",)), ("b", ("choices",))]
    assert {start.caches for start in starts[4:]} == {"uncached"}
    for start in starts:
        assert start.stages_s == {"import": 0.01, "load": 0.02}
        assert start.command_ns is not None
        assert start.live_ns is not None
        assert start.ready_ns is not None
        assert start.first_answer_ns is not None
        assert 0 < start.live_ns <= start.ready_ns <= start.first_answer_ns

    planned = schedule(experiment)
    records = blocks(out)
    begun: dict[tuple[str, int], set[int]] = {}
    assert [(r.index, r.workload, r.round, r.label, r.position) for r in records] == [
        (b.index, b.workload.name, b.round, b.label, b.position) for b in planned
    ]
    for record, block in zip(records, planned, strict=True):
        assert record.complete
        assert record.errors == 0
        samples = np.load(out / record.samples)
        assert len(samples) == record.requests == record.items >= block.workload.requests
        assert samples["end_ns"].max() <= record.window_end_ns
        assert samples["status"].min() == 200
        assert samples["send_ns"].min() >= record.window_start_ns
        assert (samples["send_ns"] < samples["first_byte_ns"]).all()
        assert (samples["first_byte_ns"] <= samples["end_ns"]).all()
        assert set(samples["user"]) == set(range(block.workload.concurrency))
        assert len(set(samples["body"])) >= min(len(samples), 5)
        begun.setdefault((block.workload.name, block.round), set()).add(
            int(samples[samples["send_ns"].argmin()]["body"])
        )
        assert record.stages is not None
        executed = record.requests + record.cool_down
        assert (record.stages.requests, record.stages.batches) == (executed, {1: executed})
        assert record.first_answer_ns
        assert record.generator_cpu_ns > 0
        assert record.server_cpu_ns is not None
    assert all(len(bodies) == 1 for bodies in begun.values()), "the arms of a round begin with the same body"
    assert begun["single", 0] != begun["single", 1]
    assert not list(out.rglob("*.part"))


def test_a_slower_arm_is_measured_as_slower_by_what_was_added(tmp_path: Path) -> None:
    run(make_experiment(b_settings={"delay-ms": "32"}), tmp_path / "run")
    medians: dict[str, list[float]] = {"a": [], "b": []}
    for record in blocks(tmp_path / "run"):
        if record.workload == "single":
            samples = np.load(tmp_path / "run" / record.samples)
            medians[record.label].append(float(np.median(samples["end_ns"] - samples["send_ns"])))
    added_ms = (min(medians["b"]) - min(medians["a"])) / 1e6
    assert 28 < added_ms < 60


@pytest.mark.parametrize("fault", ["wrong", "wrong-batches", "empty"])
def test_arms_that_answer_differently_are_not_compared(tmp_path: Path, fault: str) -> None:
    out = tmp_path / "run"
    state = run(make_experiment(b_settings={fault: "true"}), out)
    assert state.state == "failed"
    assert state.phase == "checking parity"
    assert state.error is not None
    assert "their speed is not compared" in state.error
    assert not stored(out / "parity.json", ParityRecord).ok
    assert blocks(out) == []


def test_a_server_that_dies_mid_block_cuts_the_block_and_fails_the_run(tmp_path: Path) -> None:
    out = tmp_path / "run"
    # parity, warm-up and the probe ask about 85 times; a block of one user asks thousands of times
    long = Workload(
        scenario="single", batch_size=1, concurrency=1, requests=10, seconds=20.0, max_seconds=20.0, rounds=1
    )
    conditions = {"fail_if": ["b.p50 > 1e9"]}
    state = run(
        make_experiment(
            workloads=(long,), b_settings={"die-after": "234"}, seed=seed_with_b_first(long), settings=conditions
        ),
        out,
    )
    assert state.state == "failed"
    assert state.error is not None
    assert "ended with exit status 9" in state.error
    assert "b-triton.log" in state.error
    (dead,) = [record for record in blocks(out) if record.label == "b"]
    assert not dead.complete
    # the request that it died of, the one that found nobody, and perhaps one that met it dying
    assert dead.errors in (2, 3)
    samples = np.load(out / dead.samples)
    assert len(samples) == dead.requests > 100
    assert (samples["error"] >= 0).sum() == dead.errors
    assert 2 <= len(dead.error_messages) <= dead.errors
    result = analyse(out)
    assert not result.valid
    assert {comparison.verdict for comparison in result.comparisons} == {"invalid"}
    (threshold,) = result.thresholds
    assert threshold.state == "not_measurable"


def test_requests_that_fail_are_counted_with_their_messages_and_not_sent_again(tmp_path: Path) -> None:
    """The server answers 114 requests well, so that parity, warm-up and the probe pass, then fails every second one."""
    out = tmp_path / "run"
    workload = Workload(
        scenario="single", batch_size=1, concurrency=1, requests=100, seconds=0, max_seconds=20, rounds=1
    )
    state = run(make_experiment(workloads=(workload,), b_settings={"good-first": "114", "error-every": "2"}), out)
    assert state.state == "finished"
    (record,) = [record for record in blocks(out) if record.label == "b"]
    assert record.complete
    assert record.requests == 100
    assert record.error_messages == ("HTTP 503: the queue is full",)
    assert 20 <= record.errors <= 50
    assert record.items == record.requests - record.errors
    samples = np.load(out / record.samples)
    assert ((samples["error"] == 0) == (samples["status"] == 503)).all()


def test_a_server_that_answers_without_outputs_under_load_does_not_win(tmp_path: Path) -> None:
    out = tmp_path / "run"
    workload = Workload(
        scenario="single", batch_size=1, concurrency=1, requests=60, seconds=0, max_seconds=20, rounds=1
    )
    state = run(make_experiment(workloads=(workload,), b_settings={"good-first": "114", "hollow-every": "2"}), out)
    assert state.state == "finished"
    result = analyse(out)
    (found,) = [check for check in result.checks if check.name == "request_errors"]
    assert found.ok is False, "they have status 200"
    assert "output embedding is FP32 [0, 512] instead of FP32 [1, 512]" in found.detail
    assert {comparison.verdict for comparison in result.comparisons} == {"invalid"}


def test_a_server_that_only_fails_is_not_asked_for_ever(tmp_path: Path) -> None:
    out = tmp_path / "run"
    workload = Workload(
        scenario="single", batch_size=1, concurrency=1, requests=10, seconds=20, max_seconds=20, rounds=1
    )
    state = run(
        make_experiment(
            workloads=(workload,), b_settings={"good-first": "90", "drop-every": "1"}, seed=seed_with_b_first(workload)
        ),
        out,
    )
    assert state.state == "failed"
    assert state.error is not None
    assert "100 requests in a row failed" in state.error
    (record,) = [record for record in blocks(out) if record.label == "b"]
    assert record.error_messages == ("connection closed by the server without a response",)


def test_a_warm_up_that_fails_costs_that_workload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadgen.client.generator.OWN_MODULE", FAULTY_GENERATOR)
    out = tmp_path / "run"
    assert run(make_experiment(), out).state == "finished"
    why = "warm-up of native: 1 of 5 requests failed (the client could not read the answer: RuntimeError('ours'))"
    assert [(record.label, record.note) for record in blocks(out) if not record.complete] == [("a", why)]
    assert {record.workload for record in blocks(out) if record.round == 1} == {"concurrent(4)"}


@pytest.mark.parametrize(
    "changes",
    [{}, {"minutes": 0.08}, {"until_decided": True, "time_limit_minutes": 0.05}, {"others": 1}, {"restarts": 2}],
)
def test_an_arm_that_fails_in_one_workload_costs_that_workload(tmp_path: Path, changes: dict[str, Any]) -> None:
    """However the rounds are counted; a third arm goes on there."""
    out, others = tmp_path / "run", [ArmRequest(label="c", target="native")] if changes.pop("others", None) else []
    single, concurrent = make_experiment().workloads
    concurrent = msgspec.structs.replace(concurrent, concurrency=16)  # the parity check sends a few at once
    batched = Workload(
        scenario="batched", batch_size=2, concurrency=1, requests=5, seconds=0.1, max_seconds=5.0, rounds=2
    )
    experiment = make_experiment(
        workloads=(single, concurrent, batched), b_settings={"error-above": "12", "delay-ms": "10"}, others=others,
        **changes,
    )  # fmt: skip
    assert run(experiment, out).state == "finished"
    failed, good = (
        {(record.workload, record.label) for record in blocks(out) if record.complete is complete}
        for complete in (False, True)
    )
    assert failed == {("concurrent(16)", "b")}
    assert good == {(workload.name, label) for workload in experiment.workloads for label in experiment.labels} - failed
    (record,) = [record for record in blocks(out) if not record.complete]
    assert "warm-up of " in (record.note or "")
    assert "too many at once" in (record.note or "")
    rounds = {record.round for record in blocks(out) if (record.workload, record.label) == ("concurrent(16)", "a")}
    assert (len(rounds) > 1) == bool(others)
    result = analyse(out)
    assert not result.valid
    assert "too many at once" in " ".join(result.verdict.failed)
    for c in (c for c in result.comparisons if c.metric == "throughput"):
        assert (c.pairs == 0) == (c.workload == "concurrent(16)" and "b" in c.pairing)
    scopes = {check.scope for check in invalidating(result.checks)}
    assert "workload concurrent(16)" in scopes
    assert not [c for c in invalidating(result.checks) if c.scope in {"run", "plan"}]


def test_an_arm_that_fails_in_each_workload_ends_the_run_with_its_words(tmp_path: Path) -> None:
    out = tmp_path / "run"
    state = run(make_experiment(b_settings={"good-first": "104", "error-every": "1"}), out)
    assert (state.state, state.failed_arm) == ("failed", "b")
    assert "503" in (state.error or "")
    assert "the queue is full" in (state.error or "")
    assert any(record.label == "a" and record.complete for record in blocks(out))


class Broken(RunProgress):
    """Shows nothing, and fails at it."""

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("_"):
            return super().__getattribute__(name)
        raise BrokenPipeError(name)


@pytest.mark.usefixtures("as_users_have_it")
def test_nothing_that_is_shown_ends_a_run(tmp_path: Path) -> None:
    workload = Workload(
        scenario="single", batch_size=1, concurrency=1, requests=5, seconds=0.1, max_seconds=5, rounds=1
    )
    state = run_experiment(make_experiment(workloads=(workload,)), tmp_path / "run", Broken(), abserve=FAKE_ABSERVE)
    assert state.state == "finished"


def test_a_server_that_cannot_start_says_its_last_words(tmp_path: Path) -> None:
    state = run(make_experiment(b_settings={"crash": "true"}), tmp_path / "run")
    assert state.state == "failed"
    assert state.error is not None
    assert "Triton: the server ended with exit status 3" in state.error
    assert "cannot open the model" in state.error


def test_remote_arms_need_no_statistics_and_an_unknown_model_gets_random_values_if_asked_for(
    tmp_path: Path, fake_url
) -> None:
    urls = [fake_url("--model", "other", "--no-stats"), fake_url("--model", "another", "--no-stats")]
    a, b = ArmRequest(label="a", target=urls[0]), ArmRequest(label="b", target=urls[1], model="another")
    experiment = make_experiment(a=a, b=b, model="other", payload="tensors")
    broken = (sys.executable, "-c", "exit('no images here')")
    state = run_experiment(experiment, tmp_path / "refused", RunProgress(), abserve=broken)
    assert state.state == "failed"
    assert state.error == (
        "no sample inputs for other: no images here; give your own with --inputs DIR or FILE, or --inputs random for "
        "random values of the right shapes"
    )
    out = tmp_path / "run"
    asked = msgspec.structs.replace(experiment, inputs="random")
    state = run_experiment(asked, out, RunProgress(), abserve=broken)
    assert (state.state, state.error) == ("finished", None)
    about = stored(out / "environment.json", Environment).inputs
    assert (about["kind"], about["item"], about["count"], about["seed"]) == ("random values", "item", 16, 1)
    assert [(record.model_config or {})["name"] for record in stored(out / "arms.json", list[ArmRecord])] == [
        "other",
        "another",
    ]
    for record in blocks(out):
        assert (record.stages, record.complete) == (None, True)
        assert record.server_cpu_ns is not None, "the server's process is found by its port"
    assert stored(out / "arms.json", list[ArmRecord])[0].title == "fake 1.0 fp32"


def test_the_users_own_inputs_are_sent_and_checked_against_the_metadata(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).standard_normal((3, 3, 32, 32)).astype("<f4")
    np.savez(tmp_path / "own.npz", pixel_values=pixels)
    out = tmp_path / "run"
    state = run(make_experiment(inputs=str(tmp_path / "own.npz")), out)
    assert (state.state, state.error) == ("finished", None)
    about = stored(out / "environment.json", Environment).inputs
    assert (about["kind"], about["source"], about["count"]) == ("given", "own.npz", 3)
    np.savez(tmp_path / "wrong.npz", pixel_values=pixels[:, :2])
    state = run(make_experiment(inputs=str(tmp_path / "wrong.npz")), tmp_path / "wrong")
    assert state.state == "failed"
    assert "input pixel_values has items of shape [2, 32, 32], and the model takes [3, 32, 32]" in str(state.error)


def test_nobody_at_the_url_is_one_sentence(tmp_path: Path, unused_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for user in (deployment, runner):
        monkeypatch.setattr(user, "RUNNING_READY_SECONDS", 0.5)
    experiment = make_experiment(a=ArmRequest(label="a", target=unused_url))
    state = run(experiment, tmp_path / "run")
    assert state.state == "failed"
    assert state.error is not None
    assert f"{unused_url.partition('//')[2]}: the server at {unused_url} is not live" in state.error


def test_a_folder_with_a_run_in_it_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "experiment.json").write_text("{}")
    with pytest.raises(StorageError, match="choose another folder with --out"):
        run(make_experiment(), tmp_path)


def test_each_restart_is_a_fresh_start_with_its_share_of_the_pairs(tmp_path: Path) -> None:
    out = tmp_path / "run"
    workload = Workload(scenario="single", batch_size=1, concurrency=1, requests=5, seconds=0, max_seconds=5, rounds=3)
    ready: list[str] = []

    class Listener(RunProgress):
        def arm_ready(self, record: ArmRecord) -> None:
            ready.append(record.url)

    state = run_experiment(make_experiment(workloads=(workload,), restarts=2), out, Listener(), abserve=FAKE_ABSERVE)
    assert (state.state, state.error) == ("finished", None)
    assert len(set(ready)) == 4  # fresh ports: other processes
    assert [(record.round, record.restart) for record in blocks(out)[::2]] == [(0, 0), (1, 1), (2, 1)]


def test_the_first_figure_comes_when_all_servers_are_ready_and_before_their_answers_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    both = threading.Barrier(2)
    plan = EmbeddedDeployment.plan

    def at_the_same_time(deployment: EmbeddedDeployment) -> None:
        both.wait(DEADLINE_S)
        plan(deployment)

    monkeypatch.setattr(EmbeddedDeployment, "plan", at_the_same_time)

    class Listener(RunProgress):
        def arm_ready(self, record: ArmRecord) -> None:
            events.append(f"{record.label} is ready")

        def first_figure(self, ratios: Sequence[LiveRatio]) -> None:
            assert all(ratio.ratio for ratio in ratios)
            events.append("first figure")

        def parity_done(self, record: ParityRecord) -> None:
            events.append("parity")

        def block_done(self, block: StoredBlock, summary: BlockSummary) -> None:
            events.append("block")

    out = tmp_path / "run"
    state = run_experiment(make_experiment(minutes=0.01), out, Listener(), abserve=FAKE_ABSERVE)
    assert (state.state, state.error) == ("finished", None)
    assert events[:5] == ["a is ready", "b is ready", "first figure", "parity", "block"]
    assert events.count("first figure") == 1


def test_a_batch_that_a_server_would_refuse_fails_with_the_option_before_any_load(tmp_path: Path) -> None:
    large = Workload(
        scenario="batched", batch_size=64, concurrency=1, requests=5, seconds=0.1, max_seconds=5.0, rounds=2
    )
    state = run(make_experiment(workloads=(large,)), tmp_path / "run")
    assert state.state == "failed"
    assert state.error is not None
    assert "native accepts at most 32 and Triton accepts at most 32" in state.error
    assert "give --a-option max-batch-size=64 --b-option max-batch-size=64" in state.error
    assert stored(tmp_path / "run/arms.json", list[ArmRecord])[0].in_effect["max_batch_size"] == 32
    assert not (tmp_path / "run/parity.json").exists()


@pytest.mark.parametrize(
    ("shared", "own", "asked"),
    [(None, None, None), ("tf32", None, "fp32"), ("fp16", None, "fp16"), ("fp16", "fp32", "fp32")],
)
def test_the_exported_file_is_that_of_the_precision_asked_for_or_the_servers_own(
    tmp_path: Path, shared: str | None, own: str | None, asked: str | None
) -> None:
    experiment = make_experiment(precision=shared, b_settings={"precision": own} if own else {})
    said: list[str] = []
    program = "import sys; print(sys.argv[1:])"
    export_artefacts(experiment, RunStore(tmp_path), said.append, abserve=(sys.executable, "-c", program))
    (argv,) = said
    assert "'export'" in argv
    assert ("'--precision'" in argv) == (asked is not None)
    assert asked is None or f"'--precision', '{asked}'" in argv


def test_a_failed_export_is_told_by_its_own_sentence(tmp_path: Path) -> None:
    program = "import sys; print('looking', flush=True); sys.exit('error: --weights nope: unknown\\nretrying')"
    store = RunStore(tmp_path / "run")
    said: list[str] = []
    with pytest.raises(RunError, match=r"^the export failed: --weights nope: unknown$"):
        export_artefacts(make_experiment(), store, said.append, abserve=(sys.executable, "-c", program))
    assert said == ["looking"]


def test_a_run_chooses_its_processes_and_stores_how_many_took_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fake server is slow, so a share that no server stays below stands for a fast one; eight cores are claimed."""
    monkeypatch.setattr("loadgen.measure.context.USED_SHARE", 1e-6)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    out = tmp_path / "run"
    state = run(make_experiment(workloads=make_experiment().workloads[1:], processes=0), out)
    assert (state.state, state.error) == ("finished", None)
    assert stored(out / "experiment.json", Experiment).processes == 4
    assert {len(block.workers) for block in blocks(out)} == {4}
    assert analyse(out).experiment.processes == 4
