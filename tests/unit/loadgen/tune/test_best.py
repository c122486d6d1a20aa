"""What a comparison at every load's best tries, what it chooses, and the comparison that follows."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from msgspec.structs import replace

from loadgen.cli.compare import _resumed, _run_best
from loadgen.experiment.plan import GPU_BLOCK_S, GPU_REQUESTS, GPU_WINDOW_S, PlanError
from loadgen.experiment.settings import ExperimentSettings
from loadgen.findings.best import BestRecord, Tried, TriedConfiguration, TriedServer
from loadgen.measure.machine import read_environment
from loadgen.measure.planning import plan_experiment
from loadgen.records.run import Environment, Experiment, RunState
from loadgen.records.store import write_record
from loadgen.records.tuning import Space, TunableSetting
from loadgen.tune import best
from loadgen.tune.best import (
    CHOOSING_ROUNDS,
    FOLDER,
    NOTHING_TO_TRY,
    choose,
    chosen,
    configurations,
    final_experiment,
    read_servers,
    shortened,
    stages,
    with_arms,
)
from loadgen.tune.search import factor_of

LOADS = ("single", "concurrent(8)")


def setting(name: str, default: str, *values: str, **more: object) -> TunableSetting:
    return TunableSetting(name=name, default=default, values=values, by_load=True, **more)  # type: ignore[arg-type]


INSTANCES = setting("instances", "2", "1", "2", "4", ordered=True)


def planned(**more: object) -> Experiment:
    content = {"arms": {"a": "native", "b": "triton"}, "best": True, "scenarios": "single,concurrent", **more}
    return plan_experiment(ExperimentSettings.model_validate({"concurrency": "8", **content})).runs[0][1]


def server(label: str, *settings: dict[str, str]) -> TriedServer:
    named = tuple(TriedConfiguration(name=f"{label}-{n}", settings=some) for n, some in enumerate(({}, *settings)))
    best = dict.fromkeys(LOADS, named[0].name)
    return TriedServer(server=label, target="triton", configurations=named, compromise=named[0].name, best=best)


def tried(label: str, *gains: tuple[float, float], error: float = 0.01) -> list[Tried]:
    """The gains of each further configuration in both loads, and those of the first one, which are 1."""
    return [
        Tried(
            configuration=f"{label}-{number}", workload=load, value=100.0 * gain,
            gain=factor_of(math.log(gain), error),
        )
        for number, of_loads in enumerate(((1.0, 1.0), *gains))
        for load, gain in zip(LOADS, of_loads, strict=True)
    ]  # fmt: skip


def test_what_is_tried() -> None:
    """Combinations, with what a value needs; the nearest of many; each alone where there are too many."""
    threads = TunableSetting(name="threads", default="2", values=("1", "2"), ordered=True)
    on_cpu = setting("instances", "1", "1", "2", ordered=True, values_when={"2": {"threads": ("1",)}})
    assert configurations(Space(target="t", settings=(threads, on_cpu))) == [{}, {"threads": "1", "instances": "2"}]
    batching = setting("batching", "on", "on", "off")
    assert configurations(Space(target="t", settings=(INSTANCES, batching))) == [
        {}, {"batching": "off"}, {"instances": "1"}, {"instances": "1", "batching": "off"}, {"instances": "4"},
        {"instances": "4", "batching": "off"},
    ]  # fmt: skip
    fronts = setting("fronts", "8", "0", "1", "2", "4", "8", ordered=True)
    assert configurations(Space(target="t", settings=(fronts,))) == [{}, {"fronts": "2"}, {"fronts": "4"}]
    search = setting("search", "x", "x", "y")
    assert configurations(Space(target="t", settings=(INSTANCES, batching, search))) == [
        {}, {"instances": "1"}, {"instances": "4"}, {"batching": "off"}, {"search": "y"},
    ]  # fmt: skip
    backend = TunableSetting(name="backend", default="python", values=("python", "onnxruntime"))
    merging = setting("batching", "on", "on", "off", when={"backend": ("onnxruntime",)})
    assert configurations(Space(target="t", settings=(threads, backend, merging))) == [{}]


def test_configurations_of_servers_with_long_names_have_names_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(best, "read_space", lambda target, *_: Space(target=target, settings=(INSTANCES,)))
    alike = ("triton-with-batching-on1", "triton-with-batching-on2")
    servers = read_servers(planned(arms=dict.fromkeys((*alike, "plain"), "triton")))
    names = [entry.name for server in servers for entry in server.configurations]
    assert len({*names}) == len(names) == 9
    assert max(map(len, names)) <= 24
    assert names[-3:] == ["plain-0", "plain-1", "plain-2"]


def test_servers_share_a_run_as_far_as_they_fit() -> None:
    few, many, one = server("a", {"x": "1"}), server("b", {"x": "1"}, {"x": "2"}, {"x": "3"}), server("c")
    assert [[c.name for c in run] for run in stages([few, many, one], 8)] == [
        ["a-0", "a-1", "b-0", "b-1", "b-2", "b-3"]
    ]
    assert [[c.name for c in run] for run in stages([few, many], 2)] == [
        ["a-0", "a-1"], ["b-0", "b-1"], ["b-0", "b-2"], ["b-0", "b-3"],
    ]  # fmt: skip
    assert stages([one], 8) == []


def test_the_best_of_each_load_and_the_least_loss_over_all() -> None:
    """The first configuration is best for one user and worst for eight; the second loses least over both."""
    triton = server("c", {"instances": "1"}, {"instances": "4"})
    found = chosen(triton, tried("c", (1.3, 0.6), (0.9, 1.4)), {})
    assert found.best == {"single": "c-1", "concurrent(8)": "c-2"}
    assert found.compromise == "c-2"


@pytest.mark.parametrize(("gain", "error", "best"), [(1.01, 0.02, "c-0"), (1.2, 0.3, "c-0"), (1.2, 0.15, "c-1")])
def test_a_load_takes_what_is_probably_better_and_the_advice_what_is_surely_better(
    gain: float, error: float, best: str
) -> None:
    """By more than one standard error of the log; the advice for all loads needs 99 %."""
    found = chosen(server("c", {"x": "1"}), tried("c", (gain, gain), error=error), {})
    assert found.best == dict.fromkeys(LOADS, best)
    assert found.compromise == "c-0"


def test_an_uncertain_figure_does_not_hide_a_certain_one() -> None:
    """The third configuration may be the best or not; the second is surely better than the first."""
    uncertain = tried("c", (1.5, 1.5), (1.6, 1.6), error=0.5)[-len(LOADS) :]
    known = [*tried("c", (1.5, 1.5)), *uncertain]
    found = chosen(server("c", {"x": "1"}, {"x": "2"}), known, {})
    assert found.best == dict.fromkeys(LOADS, "c-1")
    assert found.compromise == "c-1"


def test_a_configuration_that_fails_is_not_chosen_and_one_that_was_asked_for_and_fails_is_replaced() -> None:
    triton = server("c", {"x": "1"}, {"x": "2"})
    known = [entry for entry in tried("c", (1.3, 0.6), (0.9, 1.4)) if entry.configuration != "c-0"]
    found = chosen(triton, known, {"c-0": "It did not start."})
    assert found.best == {"single": "c-1", "concurrent(8)": "c-2"}
    assert found.configurations[0].out == "It did not start."
    only_one_load = [entry for entry in known if entry.workload == "single"]
    assert chosen(triton, only_one_load, {"c-0": "It did not start."}).best["concurrent(8)"] == "c-1"


def test_each_load_gets_what_was_chosen_for_it_and_the_one_for_all() -> None:
    triton = chosen(server("b", {"instances": "1"}, {"instances": "4"}), tried("b", (1.3, 0.6), (0.9, 1.4)), {})
    record = BestRecord(servers=with_arms([server("a"), triton]), seconds=60.0)
    final = final_experiment(planned(minutes=9), record)
    assert [(arm.label, arm.server, arm.settings) for arm in final.arms] == [
        ("a", "a", {}), ("b", "b", {"instances": "4"}), ("b2", "b", {"instances": "1"}),
    ]  # fmt: skip
    assert [(load.arms, load.beside) for load in final.workloads] == [(("a", "b2"), ("b",)), (("a", "b"), ())]
    assert final.minutes == 8.0
    assert final.arm_of("b", "single") == "b2"
    assert final.baseline_in("single") == "a"


def test_servers_without_such_settings_are_compared_as_asked_for(tmp_path: Path) -> None:
    def no_stage(*_: object) -> RunState:
        raise AssertionError

    asked = BestRecord(servers=(server("a"), server("b")))
    settings = ExperimentSettings.model_validate({"best": True})
    record = choose(settings, planned(), asked, tmp_path, no_stage, gpu=False)
    assert record.problems == (NOTHING_TO_TRY,)
    final = final_experiment(planned(), record)
    assert final.labels == ("a", "b")
    assert not final.is_at_best


def test_arms_with_names_get_names() -> None:
    triton = chosen(server("triton", {"x": "1"}, {"x": "2"}), tried("triton", (1.3, 0.6), (0.9, 1.4)), {})
    (named,) = with_arms([triton])
    assert [entry.arm for entry in named.configurations] == [None, "triton-2", "triton"]


@pytest.mark.parametrize(
    "more",
    [{"surface": True}, {"slo_p99_ms": "50"}, {"until": "decided"}, {"explain": True}, {"transport": "http,grpc"},
     {"scenarios": "cold-start,single"}],
)  # fmt: skip
def test_what_short_rounds_cannot_choose_for_is_refused(more: dict[str, object]) -> None:
    with pytest.raises(PlanError, match="--best"):
        planned(**more)


def test_on_a_gpu_all_loads_of_a_configuration_share_the_time_of_its_proof() -> None:
    settings = ExperimentSettings.model_validate({"best": True})
    few = settings.model_copy(update={"rounds": CHOOSING_ROUNDS})
    loads = plan_experiment(few).runs[0][1].workloads
    brief = shortened(settings, loads, gpu=True)
    assert [load.name for load in brief] == [load.name for load in loads]
    assert sum(load.rounds * load.seconds for load in brief) >= GPU_WINDOW_S
    assert sum(load.rounds * load.requests for load in brief) >= GPU_REQUESTS
    assert all(load.seconds >= GPU_BLOCK_S for load in brief)
    assert shortened(settings, loads, gpu=False) == list(loads)


def test_cold_starts_of_the_default_are_left_out() -> None:
    asked = ExperimentSettings.model_validate({"best": True})
    assert "cold-start" not in {load.scenario for load in plan_experiment(asked).runs[0][1].workloads}


def test_it_goes_on_where_it_was_begun_alone(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"holds no comparison with --best; best\.json is missing"):
        _resumed(tmp_path, None)
    write_record(
        tmp_path / BestRecord.FILE, BestRecord(servers=(), settings=ExperimentSettings.model_validate({}).content())
    )
    assert _resumed(tmp_path, None) == ExperimentSettings.model_validate({})
    here = read_environment({"status": "unknown"}, {})
    (tmp_path / FOLDER / "1").mkdir(parents=True)
    other = replace(here, host={**here.host, "cpu_model": "another CPU"})
    write_record(tmp_path / FOLDER / "1" / Environment.FILE, other)
    with pytest.raises(PlanError, match=r"another machine or with other versions \(cpu_model another CPU instead of"):
        _resumed(tmp_path, None)


def test_an_interruption_names_how_it_goes_on_only_if_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> BestRecord:
        raise KeyboardInterrupt

    monkeypatch.setattr(best, "read_servers", interrupted)
    monkeypatch.setattr(best, "choose", interrupted)
    settings = ExperimentSettings.model_validate({"best": True})
    assert _run_best(settings, planned(), tmp_path, None) == (130, None)
    assert "--resume" not in capsys.readouterr().err
    write_record(tmp_path / BestRecord.FILE, BestRecord(servers=(), settings=settings.content()))
    assert _run_best(settings, planned(), tmp_path, None) == (130, None)
    assert "abserve compare --resume" in capsys.readouterr().err
