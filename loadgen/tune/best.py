"""Every server at its best for each load: short runs choose the settings, then one comparison measures them freshly.

    DIR/best.json         what is tried, then what was chosen, see `loadgen.findings.best`
    DIR/choices/1/ …      the runs that choose: screenings whose arms are the configurations of some servers
    DIR/                  the comparison, whose arms are the chosen configurations

Which settings are tried is declared beside them (`Searched.by_load`). A load gets the settings that are probably the
best there, better than those that were asked for by more than one standard error (the one-standard-error rule of
Breiman et al., Classification and Regression Trees, 1984): a wrong choice costs a server what it loses by it, and the
comparison measures afresh what was chosen, so chance wins nothing. The one configuration for all loads, which is
advice, is the best by the geometric mean over the loads if that is shown at 99 %. What another start of a server
changes is part of every error.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count, product
from pathlib import Path
from time import monotonic

from msgspec.structs import replace

from loadgen.base.child_process import ABSERVE
from loadgen.base.documents import free_path
from loadgen.experiment.plan import base_workload
from loadgen.experiment.settings import ExperimentSettings
from loadgen.findings.best import BestRecord, Tried, TriedConfiguration, TriedServer
from loadgen.launch.work_folder import work_folder
from loadgen.measure.planning import plan_experiment
from loadgen.measure.preparation import Prepared, serve_options
from loadgen.metrics.facts import RUN, workload_scope
from loadgen.metrics.registry import METRICS, leading_metric
from loadgen.records.run import ArmRequest, Experiment, Label, RunState, Workload
from loadgen.records.store import read_one, read_run, write_record
from loadgen.records.targets import Kind
from loadgen.records.tuning import Space, TunableSetting
from loadgen.tune.declared import read_space
from loadgen.tune.outcome import Z99
from loadgen.tune.screening import faults_of, scores_of
from loadgen.tune.search import START_SPREAD, Z95, factor_of
from loadgen.tune.space import canonical
from loadgen.verdict.result import Result, analyse_run, readable

FOLDER = "choices"
CHOOSING_SHARE = 1.0 / 3.0
"""Of the minutes."""
CHOOSING_ROUNDS = 3
"""At least. What another start changes is more than what further rounds would tell."""
LEAST_SHARE_OF_FINAL = 0.5
"""Of the comparison's planned time, however long choosing took."""
MOST_CONFIGURATIONS = 8
"""Of a server. Where all combinations of its settings are more, each setting is changed alone."""
NEIGHBOURS = 2
"""Values of an ordered setting that are tried beside its default: the nearest."""
MOST_OF_LABEL = 21
"""Characters of a server's name that begin those of its configurations, which are no longer than other labels."""
AT_ONCE, AT_ONCE_ON_GPU = 8, {Kind.TENSORS: 16, Kind.TOKENS: 2}
"""Most servers of a run that chooses; they are all up at once and share the memory."""
NOTHING_TO_TRY = "No server has settings that are tried, so they are compared as they were asked for."
RunStage = Callable[[Experiment, Path, Prepared], RunState]


# What is tried


def read_servers(planned: Experiment, abserve: Sequence[str] = ABSERVE) -> tuple[TriedServer, ...]:
    """The configurations of every arm. Raises `PlanError`."""
    heads = Counter(arm.label[:MOST_OF_LABEL] for arm in planned.arms)

    def read(place: int, arm: ArmRequest) -> TriedServer:
        head = arm.label[:MOST_OF_LABEL]
        if heads[head] > 1:
            head = f"{head[:-3]}-{place}"
        settings: list[dict[str, str]] = [{}]
        defaults: dict[str, str] = {}
        if arm.embedded and not arm.own_repository:
            options = {
                name: value
                for name, value in (serve_options(arm, planned) | arm.settings).items()
                if (name, value) != ("threads", "0")
            }
            space = read_space(arm.target, options, abserve)
            settings = configurations(space)
            defaults = {entry.name: entry.default for entry in space.settings if entry.by_load and len(settings) > 1}
        named = tuple(
            TriedConfiguration(name=f"{head}-{number}", settings=changed) for number, changed in enumerate(settings)
        )
        return TriedServer(
            server=arm.label, target=arm.target, configurations=named, compromise=named[0].name, defaults=defaults,
            best={load.name: named[0].name for load in planned.workloads if load.has_blocks},
        )  # fmt: skip

    with ThreadPoolExecutor(4) as pool:
        return tuple(pool.map(read, count(), planned.arms))


def configurations(space: Space) -> list[dict[str, str]]:
    """The settings of every configuration that is tried, the defaults first: all combinations of the settings whose
    best value depends on the load, or each of them changed alone."""
    values = {setting.name: _tried(setting) for setting in space.settings if setting.by_load}
    every = [dict(zip(values, chosen, strict=True)) for chosen in product(*values.values())]
    if len(every) > MOST_CONFIGURATIONS:
        every = [{}, *({name: value} for name, several in values.items() for value in several[1:])]
    applied = (_applied(space, chosen) for chosen in every)
    return list({tuple(changed.items()): changed for changed in applied if changed is not None}.values())


def _tried(setting: TunableSetting) -> list[str]:
    """The default, then the others; of an ordered setting the ones that are nearest to it."""
    others = [value for value in setting.values if value != setting.default]
    if setting.ordered:
        place = setting.values.index(setting.default)
        others = sorted(others, key=lambda value: abs(setting.values.index(value) - place))[:NEIGHBOURS]
        others.sort(key=setting.values.index)
    return [setting.default, *others]


def _applied(space: Space, chosen: Mapping[str, str]) -> dict[str, str] | None:
    """The settings with the numbers that a chosen value needs: several instances on a CPU need fewer threads each. None
    if it needs anything else."""
    defaults = space.fixed | {setting.name: setting.default for setting in space.settings}
    searched, changed = {setting.name: setting for setting in space.settings}, dict(chosen)
    for name, value in chosen.items():
        for other, able in {**searched[name].when, **searched[name].values_when.get(value, {})}.items():
            if value == searched[name].default or changed.get(other, defaults.get(other)) in able:
                continue
            if other not in searched or not searched[other].ordered:  # such as another backend, which is another arm
                return None
            changed[other] = able[-1]
    return canonical(space, changed)


def stages(servers: Sequence[TriedServer], at_once: int) -> list[list[TriedConfiguration]]:
    """The configurations of each run that chooses, with at most `at_once` servers: those of one server stay together,
    or are beside its first one in several runs. None of a server that has only one."""
    groups = [
        [first, *others[place : place + max(1, at_once - 1)]]
        for server in servers
        for first, *others in [server.configurations]
        for place in range(0, len(others), max(1, at_once - 1))
    ]
    runs: list[list[TriedConfiguration]] = []
    for group in groups:
        fitting = (run for run in runs if len(run) + len(group) <= at_once and group[0] not in run)
        run = next(fitting, None)
        if run is None:
            runs.append(group)
        else:
            run += group
    return runs


def most_at_once(planned: Experiment, *, gpu: bool) -> int:
    """How many servers a run that chooses may have."""
    return AT_ONCE_ON_GPU[planned.kind] if gpu else AT_ONCE


# Choosing


def choose(
    settings: ExperimentSettings, planned: Experiment, record: BestRecord, out: Path, run_stage: RunStage, *, gpu: bool
) -> BestRecord:
    """Measure every configuration briefly and choose, in runs below `out`; one that is finished there is not repeated.
    The record is stored before and after. Raises `KeyboardInterrupt`, `PlanError`, `StorageError`,
    `StoredRunError`."""
    runs = stages(record.servers, most_at_once(planned, gpu=gpu))
    minutes = None if planned.minutes is None or not runs else CHOOSING_SHARE * planned.minutes / len(runs)
    few = settings.model_copy(update={"rounds": CHOOSING_ROUNDS, "minutes": None, "restarts": 1})
    loads = plan_experiment(few).runs[0][1].workloads
    brief = shortened(settings, loads, gpu=gpu and planned.kind is Kind.TENSORS)
    (out / FOLDER).mkdir(parents=True, exist_ok=True)
    write_record(out / BestRecord.FILE, record)
    began, processes = monotonic(), planned.processes
    problems = [] if runs else [NOTHING_TO_TRY]
    measured: dict[Label, list[Tried]] = {}
    left_out: dict[Label, str] = {}
    with work_folder("best") as work:
        prepared = Prepared(work / "samples")
        for number, members in enumerate(runs, start=1):
            experiment = stage_experiment(planned, record.servers, members, brief, minutes, number)
            experiment = replace(experiment, processes=processes)
            new, *before = _folders(out / FOLDER, number)
            finished = next((place for place in before if _state(place) == "finished"), None)
            folder = finished or new
            if finished is None and run_stage(experiment, folder, prepared).state == "interrupted":
                raise KeyboardInterrupt
            with readable(folder):
                run = read_run(folder)
                result = analyse_run(run)
                out_here, faults = faults_of(run, result)
            left_out |= out_here
            processes = max(processes, result.experiment.processes)
            problems += [_problem(scope, why) for scope, why in faults.items()]
            for server in record.servers:
                measured.setdefault(server.server, []).extend(_tried_in(result, server, members, out_here, faults))
    servers = tuple(chosen(server, measured.get(server.server, ()), left_out) for server in record.servers)
    seconds = record.seconds + monotonic() - began
    told = {"problems": tuple(problems), "seconds": seconds, "processes": processes}
    record = replace(record, servers=with_arms(servers), done=True, **told)
    write_record(out / BestRecord.FILE, record)
    return record


def renewed(out: Path) -> None:
    """Move a comparison that was interrupted aside, to OUT-interrupted, so that it can begin again with what was
    chosen."""
    if not (out / Experiment.FILE).exists():
        return
    aside = free_path(out.with_name(f"{out.name}-interrupted"))
    out.rename(aside)
    out.mkdir()
    for name in (BestRecord.FILE, FOLDER):
        (aside / name).rename(out / name)


def _folders(choices: Path, number: int) -> list[Path]:
    """The folder for a run that chooses, which does not exist, and those of earlier tries of it."""
    places = [choices / str(number)]
    while places[-1].exists():
        places.append(choices / f"{number}-{len(places) + 1}")
    return places[::-1]


def _state(folder: Path) -> str | None:
    state = read_one(folder, RunState)
    return None if state is None else state.state


def _problem(scope: str, why: str) -> str:
    where = "" if not scope.startswith(workload_scope("")) else f" in {scope.removeprefix(workload_scope(''))}"
    return f"The rounds that choose do not count{where}, so the servers keep the settings that were asked for. {why}"


def shortened(settings: ExperimentSettings, loads: Sequence[Workload], *, gpu: bool) -> list[Workload]:
    """On a GPU all loads of an arm together last as long as its proof needs, as on a surface."""
    if not gpu:
        return list(loads)
    few = settings.model_copy(update={"rounds": CHOOSING_ROUNDS})
    base = base_workload(few, gpu=True, loads=len(loads))
    return [
        load if load.is_open else replace(load, seconds=base.seconds, requests=max(base.requests, settings.requests))
        for load in loads
    ]


def stage_experiment(
    planned: Experiment, servers: Sequence[TriedServer], members: Sequence[TriedConfiguration],
    brief: Sequence[Workload], minutes: float | None, number: int,
) -> Experiment:  # fmt: skip
    """The screening of these configurations."""
    of = {entry.name: server.server for server in servers for entry in server.configurations}
    arms = [_arm(planned, of[entry.name], entry, entry.name) for entry in members]
    return replace(
        planned, arms=tuple(arms), workloads=tuple(brief), screening=True, minutes=minutes, seed=planned.seed + number,
        restarts=1, until_decided=False, time_limit_minutes=None, explain=False, ceiling=False, handicap_check=False,
        gpu_control=False, cannot_pad=_cannot_pad(planned, {arm.label: of[arm.label] for arm in arms}),
    )  # fmt: skip


def _arm(planned: Experiment, server: Label, configuration: TriedConfiguration, label: Label) -> ArmRequest:
    arm = planned.arm(server)
    return replace(arm, label=label, settings={**arm.settings, **configuration.settings})


def _cannot_pad(planned: Experiment, servers: Mapping[Label, Label]) -> dict[Label, str]:
    return {label: planned.cannot_pad[of] for label, of in servers.items() if of in planned.cannot_pad}


def _tried_in(
    result: Result, server: TriedServer, members: Sequence[TriedConfiguration], out: Mapping[Label, str],
    faults: Mapping[str, str],
) -> list[Tried]:  # fmt: skip
    """What a run that counts shows of the configurations of a server, beside its first one that was measured."""
    names = [entry.name for entry in members if entry in server.configurations and entry.name not in out]
    if len(names) < 2 or RUN in faults:
        return []
    told = []
    for load in result.experiment.workloads:
        if workload_scope(load.name) in faults:
            continue
        blocks = [block for block in result.blocks if block.workload == load.name and block.label in names]
        metrics = (leading_metric(load), METRICS["latency_p50"], METRICS["latency_mean"])
        scores = next((found for metric in metrics if (found := scores_of(blocks, metric, names[0]))), {})
        told += [
            Tried(
                configuration=name,
                workload=load.name,
                value=value,
                gain=factor_of(log, error if name == names[0] else math.hypot(error, math.sqrt(2.0) * START_SPREAD)),
            )
            for name, (log, error, value) in scores.items()
        ]
    return told


def chosen(server: TriedServer, tried: Iterable[Tried], out: Mapping[Label, str]) -> TriedServer:
    """The server with what was measured, its best configuration for each load, and the one for all loads."""
    once: dict[tuple[str, Label], Tried] = {}
    for entry in tried:  # the first configuration is measured in several runs, and its first figures count
        once.setdefault((entry.workload, entry.configuration), entry)
    known = list(once.values())
    first = server.configurations[0].name
    means = [
        (_mean(own, Z99), entry.name)
        for entry in server.configurations
        if len(own := [t for t in known if t.configuration == entry.name]) == len({t.workload for t in known}) > 0
    ]
    has_first = any(name == first for _, name in means)
    shown_better = [(mean, name) for (mean, low), name in means if low > 0.0 or not has_first]
    compromise = max(shown_better, default=(0.0, first))[1]
    usual = compromise if first in out else first
    return replace(
        server,
        configurations=tuple(replace(entry, out=out.get(entry.name)) for entry in server.configurations),
        tried=tuple(known), compromise=compromise,
        best={load: _best([t for t in known if t.workload == load], usual) for load in server.best},
    )  # fmt: skip


def _best(tried: Sequence[Tried], first: Label) -> Label:
    """The configuration that is best at its lower bound of one standard error, or the first one: it is 1 by definition,
    unless it could not be measured."""
    has_first = any(entry.configuration == first for entry in tried)
    lows = [(_mean([entry], 1.0)[1], entry.configuration) for entry in tried]
    return max((low for low in lows if low[0] > 0.0 or not has_first), default=(0.0, first))[1]


def _mean(tried: Sequence[Tried], errors: float) -> tuple[float, float]:
    """The mean log gain over the loads, and what it is that many standard errors lower; what a start changes, all loads
    have in common."""
    logs = [math.log(entry.gain.value) for entry in tried]
    lows = [math.log(entry.gain.low or entry.gain.value) for entry in tried]
    error = math.fsum((log - low) / Z95 for log, low in zip(logs, lows, strict=True)) / len(logs)
    mean = math.fsum(logs) / len(logs)
    return mean, mean - errors * error


# The comparison


def with_arms(servers: Sequence[TriedServer]) -> tuple[TriedServer, ...]:
    """The servers with the names of their arms in the comparison: that of the user for the one configuration for all
    loads, and a number after it for each other one that is best for some load."""
    taken = {server.server for server in servers}

    def named(server: TriedServer) -> TriedServer:
        arms = {server.compromise: server.server}
        for entry in server.configurations:
            if entry.name in server.best.values() and entry.name not in arms:
                between = "" if len(server.server) == 1 else "-"
                names = (f"{server.server[:20]}{between}{number}" for number in range(2, 1000))
                arms[entry.name] = next(name for name in names if name not in taken)
                taken.add(arms[entry.name])
        return replace(
            server, configurations=tuple(replace(entry, arm=arms.get(entry.name)) for entry in server.configurations)
        )

    return tuple(map(named, servers))


def final_experiment(planned: Experiment, record: BestRecord) -> Experiment:
    """The comparison of the chosen configurations in the minutes that are left. Each workload loads what was chosen for
    it, and of each server the one configuration for all loads."""
    has_chosen = any(server.tried for server in record.servers)
    arms = [
        replace(
            _arm(planned, server.server, entry, entry.arm),
            server=server.server if has_chosen else None,
            tried=tuple(server.defaults),
        )
        for server in record.servers
        for entry in sorted(server.configurations, key=lambda entry: entry.name != server.compromise)
        if entry.arm is not None
    ]
    labels = {entry.name: entry.arm for server in record.servers for entry in server.configurations}

    def of_load(load: Workload) -> Workload:
        compared = tuple(labels[server.best[load.name]] or server.server for server in record.servers)
        beside = tuple(server.server for server in record.servers if server.server not in compared)
        return replace(load, arms=compared, beside=beside)

    minutes = planned.minutes
    if minutes is not None:
        least = LEAST_SHARE_OF_FINAL * (1.0 - CHOOSING_SHARE) * minutes
        minutes = max(least, round(minutes - record.seconds / 60.0, 1))
    return replace(
        planned, arms=tuple(arms), workloads=tuple(map(of_load, planned.workloads)), minutes=minutes,
        processes=planned.processes or record.processes,
        cannot_pad=_cannot_pad(planned, {arm.label: arm.server or arm.label for arm in arms}),
    )  # fmt: skip
