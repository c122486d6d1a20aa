"""From settings to what runs: the arms, the workloads with their sizes, the combinations of transport and payload, and
how the servers pad batches.

Whatever cannot run is refused here, before anything starts or is written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from itertools import product
from pathlib import Path

import msgspec

from loadgen.base.quantities import significant
from loadgen.experiment.replay import Replay, has_answer
from loadgen.experiment.settings import (
    DEFAULT_SCENARIOS,
    SURFACE_SCENARIOS,
    ArmSettings,
    ExperimentSettings,
    read_limits,
)
from loadgen.records.names import names_of
from loadgen.records.payloads import BACKEND_ENDINGS, IMAGE_PAYLOADS, implied_payload, served_name, takes_images
from loadgen.records.run import Access, ArmRequest, Experiment, Label, Workload, asked_for, option_of, setting_key
from loadgen.records.scenarios import SCENARIOS, Scenario
from loadgen.records.targets import ROUTES, TARGETS, TRANSPORTS, Kind, Transport
from loadgen.records.traffic import TrafficError
from loadgen.stats.percentiles import queries_needed

GPU_WINDOW_S = 11.0
GPU_REQUESTS = 110
"""Load per arm and workload, so that the GPU verification can decide: a little over its thresholds of 10 s and 100
requests in `loadgen.findings.gpu.records`."""
GPU_BLOCK_S = 0.8
"""Shortest block whose GPU is watched: the energy counter of an H200 advances every 0.1 s."""
SPAN = 3.0
"""A block lasts at least this many requests: one while the load builds up, two that are measured."""
BOUNDS_PER_TRIAL = 20.0
"""A trial lasts at least this many times its bound; a shorter one ends before the queue of a rate that is 5 % too high
has grown to the bound."""
SURFACE_ROUNDS, MOST_POINTS = 4, 200
"""Of a surface: the first rounds of every load, below which no interval that stays valid can be computed, and the most
loads."""
AS_SERVED = "as in the stack's .env"
"""Recorded as the weights of a compose run, which uses those of the stack."""
PAD_TO = (32, 64, 128, 256, 512)
"""Sizes to which batches of texts are padded where no others are asked for."""
_GPU_DEVICES = ("/dev/nvidiactl", "/dev/dxg")  # the second one is that of WSL
_IN_ENV = "in .env, then run docker compose up --detach --wait"


class PlanError(Exception):
    """The options contradict each other or name something that does not exist; the message names an alternative."""


@dataclass(frozen=True, slots=True)
class Preset:
    """How much time to spend. `seconds` is the least per block, `minutes` the time of two arms without ablations. A
    trial of a search lasts `trial_seconds` at least and `longest_trial_seconds` at most, and may have `late_answers`.
    `least_rounds`: per workload, where `--rounds` does not set the number; a balanced one of two arms is two."""

    minutes: float
    cold_starts: int
    seconds: float
    max_seconds: float
    search_rounds: int
    late_answers: int
    trial_seconds: float
    longest_trial_seconds: float
    least_rounds: int

    @property
    def queries(self) -> int:
        """The fewest requests of a trial."""
        return queries_needed(self.late_answers)


PRESETS = {
    "smoke": Preset(1.0, 1, 0.3, 6.0, 1, 0, 2.0, 30.0, 2),
    "quick": Preset(5.0, 3, 0.6, 12.0, 3, 2, 4.0, 90.0, 4),
    "full": Preset(25.0, 5, 1.0, 20.0, 6, 10, 10.0, 300.0, 4),
}


@dataclass(frozen=True, slots=True)
class Care:
    """How much a run does beside its load. A screening of `abserve tune` does less, so that it can screen more
    contenders; the final does all of it for those that are left."""

    answers: int
    """Answers compared per workload and arm. 16 find wrong ones, if they are a sixth of all, with 95 % probability."""
    warm_up_requests: int
    """Of each user."""
    span: float
    """A block lasts at least this many requests of the slowest arm …"""
    times_baseline: float | None
    """… but no longer than those of an arm that takes so many times as long as the baseline."""
    few_inputs: bool
    """Whether the parity check sends few inputs and prompts, and nothing is sent to find caches."""
    leaves_out: bool
    """Whether an arm that fails before the load is left out; else its failure ends the run."""
    least_rounds: int | None
    """The fewest rounds to which the load is cut if it would take longer than half of what came before it; None: never
    cut. Two are enough where the scatter is estimated from all arms together."""
    plan_s: float | None = None
    """Time limit for making what a server executes, such as a compiled package; None: the server's own."""
    ready_s: float | None = None
    """Time limit for a launched server to start once the baseline has started; None: as long as for the baseline."""


FULL = Care(64, 2, SPAN, None, few_inputs=False, leaves_out=False, least_rounds=None)
SCREENING = Care(16, 1, 2.0, 1.5, few_inputs=True, leaves_out=True, least_rounds=2, plan_s=300.0, ready_s=180.0)


def care_of(experiment: Experiment) -> Care:
    """The care that the run of an experiment takes."""
    return SCREENING if experiment.screening else FULL


def unknown(place: str, value: str, choices: Sequence[str], kind: str = "value") -> str:
    """The sentence for a value that does not exist, with the closest one that does, or all of them."""
    close = get_close_matches(value, choices, n=1)
    remedy = f"did you mean {close[0]}?" if close else f"choose from {', '.join(choices)}"
    return f"{place}: unknown {kind} {value}; {remedy}"


# The arms


def make_arms(settings: ExperimentSettings) -> tuple[ArmRequest, ...]:
    """The arms; those of Triton get the options that all of them share. Raises `PlanError` as `make_arm` does."""
    names = ("tritonserver", "backend", "triton_repository")
    shared = {setting: value for setting in names if (value := getattr(settings, setting)) is not None}
    if ignored_settings(settings):
        shared.pop("tritonserver")
    if shared and not any(arm.target == "triton" for arm in settings.arms.values()):
        raise PlanError(f"--{next(iter(shared)).replace('_', '-')} has no effect, because no arm is triton")
    arms = [make_arm(label, arm) for label, arm in settings.arms.items()]
    return tuple(
        msgspec.structs.replace(arm, settings=_with_shared(shared, arm.settings)) if arm.target == "triton" else arm
        for arm in arms
    )


def ignored_settings(settings: ExperimentSettings) -> tuple[str, ...]:
    """Notes about settings without effect that need not be refused: a tritonserver on this machine does not matter to a
    Triton that runs at a URL."""
    targets = [arm.target for arm in settings.arms.values()]
    if settings.tritonserver is None or "triton" in targets or set(targets) <= TARGETS.keys():
        return ()
    return (f"--tritonserver {settings.tritonserver} is ignored: no arm is triton, and a server at a URL runs already",)


def _with_shared(shared: Mapping[str, str], options: Mapping[str, str]) -> dict[str, str]:
    """An arm's own value of an option replaces the shared one, whatever its spelling."""
    set_by_arm = {setting_key(name) for name in options}
    return {name.replace("_", "-"): value for name, value in shared.items() if name not in set_by_arm} | dict(options)


def make_arm(label: Label, arm: ArmSettings) -> ArmRequest:
    """One arm. Raises `PlanError` for an unknown target and for settings without effect on it."""
    target, options = arm.target, {name.strip().lstrip("-"): value for name, value in arm.options.items()}
    if target not in TARGETS:
        if ":" not in target:
            place = f"{unknown(option_of(label), target, [*TARGETS], 'server').rstrip('?')}"
            raise PlanError(f"{place}, or give a URL such as http://127.0.0.1:8000")
        if options:
            raise PlanError(
                f"{option_of(label, 'option')} has no effect on {target}, because abserve does not start that server"
            )
    elif port := next((name for name in options if name.endswith("-port")), None):
        raise PlanError(f"{option_of(label, 'option')} {port} has no effect, because abserve chooses free ports")
    elif arm.grpc is not None:
        raise PlanError(f"{option_of(label, 'grpc')} has no effect on {target}, because abserve chooses its address")
    request = arm.stored(
        ArmRequest, label=label, settings=options, access=arm.stored(Access), body=arm.body or {}
    )  # fmt: skip
    _check_access(request)
    return request


def _check_access(arm: ArmRequest) -> None:
    """Raises `PlanError` for settings of an access that have no effect or contradict each other."""
    label, access = arm.label, arm.access
    names = [name for name in Access.__struct_fields__ if getattr(access, name)]
    if arm.embedded and names:
        raise PlanError(
            f"{option_of(label, names[0])} has no effect on {arm.target}, because abserve starts that server; it is "
            "for the URL of a running one"
        )
    tls = [name for name in names if name in ("ca", "insecure", "cert", "key")]
    if tls and not arm.tls_addresses:
        raise PlanError(
            f"{option_of(label, tls[0])} has no effect without TLS; give an address with https:// or grpcs://"
        )
    if access.insecure and access.ca is not None:
        raise PlanError(
            f"{option_of(label, 'insecure')} does not verify the certificate, so that {option_of(label, 'ca')} has no "
            "effect; give one of them"
        )
    if access.key is not None and access.cert is None:
        raise PlanError(f"{option_of(label, 'key')} is the key of a certificate; add {option_of(label, 'cert')} FILE")


def expects_gpu(*arms: ArmRequest) -> bool:
    """Whether an arm may run on a GPU: there is a device file, and the arm is not told to use the CPU."""
    return any(Path(path).exists() for path in _GPU_DEVICES) and any(
        not arm.settings.get("device", "").startswith("cpu") for arm in arms
    )


# Transports and payloads


@dataclass(frozen=True, slots=True)
class Combination:
    """One transport with one payload, for every arm."""

    transport: Transport
    payload: str

    @property
    def folder(self) -> str:
        """The sub-folder of the matrix."""
        return f"{self.transport}-{self.payload}"

    @property
    def title(self) -> str:
        """The title for readers: "jpeg over grpc"."""
        return f"{self.payload} over {self.transport}"


def plan_combinations(arms: Sequence[ArmRequest], settings: ExperimentSettings) -> tuple[Combination, ...]:
    """Every transport with every payload, in the order given; all of them in a matrix. Raises `PlanError` where an
    arm has its own payload and there are several."""
    transports: tuple[Transport, ...] = settings.transport or (TRANSPORTS if settings.matrix else ("http",))
    every = settings.matrix and takes_images(settings.model)
    payloads = settings.payload or (IMAGE_PAYLOADS if every else (implied_payload(settings.model),))
    for arm in arms:
        if arm.payload is not None and len(payloads) > 1:
            raise PlanError(f"{option_of(arm.label, 'payload')} contradicts several payloads; give one --payload")
    return tuple(Combination(transport, payload) for transport, payload in product(transports, payloads))


def measurable_scenarios(settings: ExperimentSettings, arms: Sequence[ArmRequest]) -> tuple[Scenario, ...]:
    """The scenarios, without the default's cold starts where an arm is a URL, whose server abserve cannot start, and
    where no short round could choose for them. Raises `PlanError` where the cold starts were asked for."""
    if "cold-start" not in settings.scenarios or (all(arm.embedded for arm in arms) and not settings.best):
        return settings.scenarios
    if settings.scenarios != DEFAULT_SCENARIOS:
        raise PlanError("cold starts need servers that abserve starts; leave cold-start out of --scenarios with a URL")
    return tuple(name for name in settings.scenarios if name != "cold-start")


def check_tls(settings: ExperimentSettings, arms: Sequence[ArmRequest], combinations: Sequence[Combination]) -> None:
    """Raises `PlanError` where a server that abserve starts cannot be reached over TLS, as `--tls` says."""
    if not settings.tls:
        return
    started = [arm for arm in arms if arm.embedded and settings.deployment == "embedded"]
    if not started:
        raise PlanError("--tls is for servers that abserve starts, and it starts none; give the address with https://")
    over_http = not all(ROUTES[combination.transport].is_grpc for combination in combinations)
    for arm in started:
        if over_http and TARGETS[arm.target].plain_http:
            raise PlanError(
                f"--tls: {TARGETS[arm.target].title} has no TLS over HTTP; use --transport grpc, or start it behind a "
                f"proxy with TLS and give {option_of(arm.label)} https://HOST:PORT"
            )


def check_stack(settings: ExperimentSettings, arms: Sequence[ArmRequest], combinations: Sequence[Combination]) -> None:
    """Raises `PlanError` for settings without effect on a running compose stack, and a stack's options without one."""
    if settings.deployment == "embedded":
        if settings.compose_project is not None:
            raise PlanError("--compose-project has no effect without --deployment compose")
        return
    for arm in arms:
        chosen = {setting_key(name): value for name, value in arm.settings.items()}
        backend = chosen.pop("backend", None) if arm.target == "triton" else None
        if chosen:
            raise PlanError(
                f"{option_of(arm.label, 'option')} has no effect with --deployment compose: set it {_IN_ENV}"
            )
        if backend is not None and backend not in BACKEND_ENDINGS:
            raise PlanError(unknown(option_of(arm.label, "option"), backend, tuple(BACKEND_ENDINGS), "backend"))
        if arm.model is not None:
            raise PlanError(
                f"{option_of(arm.label, 'model')} has no effect with --deployment compose: set MODEL {_IN_ENV}"
            )
    served = [(arm.target, asked_for(arm.settings, "backend")) for arm in arms]
    unnamed = sum(target == "triton" for target, _ in served) > 1 and ("triton", None) in served
    if not all(arm.embedded for arm in arms) or len({*served}) < len(served) or unnamed:
        raise PlanError(
            "--deployment compose compares native with triton, and models of that triton by their option "
            f"backend={' or '.join(BACKEND_ENDINGS)}, each once; for a URL leave --deployment out"
        )
    for option, remedy, changed in (
        ("--weights", f"set WEIGHTS {_IN_ENV}", settings.weights is not None),
        ("--threads", f"set THREADS {_IN_ENV}", settings.threads != 0),
        ("--precision", f"set PRECISION {_IN_ENV}", settings.precision is not None),
        ("--pad-to", "leave it out", settings.pad_to is not None),
    ):
        if changed:
            raise PlanError(f"{option} has no effect with --deployment compose: {remedy}")
    transports = {combination.transport for combination in combinations}
    if any(ROUTES[transport].shares_memory for transport in transports):
        raise PlanError("containers share no memory with this process; use --transport http or grpc")
    if "cold-start" in settings.scenarios and transports != {"http"}:
        raise PlanError(
            "cold starts of containers are measured over HTTP; leave cold-start out of --scenarios or use "
            "--transport http"
        )


def check_models(settings: ExperimentSettings, arms: Sequence[ArmRequest]) -> None:
    """Raises `PlanError` for a URL if no setting says what that server calls the model."""
    if settings.deployment == "compose" or any(arm.embedded and arm.model is None for arm in arms):
        return
    for arm in arms:
        if (
            not arm.embedded
            and arm.model is None
            and served_name(settings.model, implied_payload(settings.model)) is None
        ):
            raise PlanError(
                f"{option_of(arm.label)} {arm.target}: {settings.model} is not a name on a server; add "
                f"{option_of(arm.label, 'model')} NAME, as that server calls the model"
            )


def sweep(settings: ExperimentSettings) -> tuple[int, ...]:
    """The lengths of a list, which are an axis of a surface; empty for one length or a text's."""
    lengths = (settings.sequence_length or "text").split(",")
    return tuple(dict.fromkeys(int(length) for length in lengths)) if len(lengths) > 1 else ()


def buckets(settings: ExperimentSettings) -> tuple[int, ...] | None:
    """The sizes to pad to as asked for; empty for none, None without the setting."""
    if settings.pad_to is None:
        return None
    return tuple(sorted({int(size) for size in settings.pad_to.split(",") if size != "none"}))


# Repetition


DECIDED_ROUNDS = 8
"""Rounds before the first decision of `--until decided`. An arm that is fast or slow for several rounds in a row often
stays in one state for 4 rounds, and seldom for 8 (`tests/truth/test_one_run_in_twenty.py`)."""


BEST_MINUTES = 1.5
"""How many times as long as other comparisons one lasts by default that first chooses every server's settings."""


def least_rounds(settings: ExperimentSettings) -> int:
    """Rounds per workload without `--rounds`: two per restart at least, and each arm equally often in each place."""
    arms = len(settings.arms)
    least = DECIDED_ROUNDS if settings.until == "decided" else PRESETS[settings.preset].least_rounds
    return math.ceil(max(least, 2 * settings.restarts) / arms) * arms


def minutes_of(settings: ExperimentSettings) -> float | None:
    """Minutes of the comparison, where the number of rounds follows from the time; more arms get more. Raises
    `PlanError`."""
    if settings.surface or (settings.rounds is None and settings.until == "planned"):
        usual = PRESETS[settings.preset].minutes * len(settings.arms) / 2
        return settings.minutes or usual * (BEST_MINUTES if settings.best else 1.0)
    if settings.minutes is not None:
        other = "--rounds" if settings.rounds is not None else "--until decided"
        raise PlanError(f"--minutes and {other} both say how long the load lasts; give one of them")
    return None


def check_restarts(settings: ExperimentSettings, workloads: Sequence[Workload]) -> None:
    """Raises `PlanError` for restarts that are not possible, with an alternative."""
    restarts = settings.restarts
    if restarts == 1:
        return
    if settings.surface:
        raise PlanError(
            "--surface adds rounds where the winner is uncertain, and --restarts needs as many everywhere; give one of "
            "the two options"
        )
    if settings.until == "decided":
        raise PlanError(
            "--until decided stops after any pair, and --restarts needs all of them; give one of the two options"
        )
    for label, arm in settings.arms.items():
        if arm.target not in TARGETS:
            raise PlanError(
                f"--restarts {restarts}: abserve did not start {option_of(label)} {arm.target} and cannot restart it; "
                "leave --restarts out"
            )
    fewest = min((workload.rounds for workload in workloads if workload.has_blocks), default=restarts)
    if fewest < restarts:
        raise PlanError(
            f"--restarts {restarts} needs a round per restart and there are {fewest}; give --rounds {restarts} or more"
        )


# Workloads


def make_workloads(
    settings: ExperimentSettings, scenarios: Sequence[Scenario] = (), *, gpu: bool = False
) -> tuple[Workload, ...]:
    """The workloads of an experiment in the order of the report, for these scenarios instead of the settings'. How long
    a block must last is known after a first request (`sized`). With `gpu`, the blocks of an arm together last long
    enough for the GPU verification. Raises `PlanError`."""
    scenarios = scenarios or settings.scenarios
    for scenario in scenarios:
        for name, example in SCENARIOS[scenario].settings.items():
            if not getattr(settings, name):
                option = f"--{name.replace('_', '-')}"
                raise PlanError(f"the scenario {scenario} needs {option}, as in {option} {example}")
    asked = (make for name, make in LOADS.items() if name in scenarios or name in ASKED_BY_SETTING)
    single = base_workload(settings, gpu=gpu)
    return unique_names([workload for make in asked for workload in make(settings, single, gpu)])


def _concurrent(settings: ExperimentSettings, single: Workload, _: bool) -> list[Workload]:
    most = max(settings.requests, single.requests)
    return [
        msgspec.structs.replace(single, scenario="concurrent", concurrency=users, requests=most)
        for users in sorted(set(settings.concurrency))
    ]


def _surface(settings: ExperimentSettings, _: Workload, gpu: bool) -> list[Workload]:
    first = surface_base(settings, gpu=gpu)
    most = max(settings.requests, first.requests)
    return [
        msgspec.structs.replace(
            first, scenario="surface", concurrency=users, batch_size=size, requests=most, sequence_length=length
        )
        for size in settings.batch_sizes
        for length in sweep(settings) or (None,)
        for users in surface_users(settings)
    ]


def _open(settings: ExperimentSettings, single: Workload, _: bool) -> list[Workload]:
    due = max(settings.open_seconds, single.seconds)
    loop = partial(
        msgspec.structs.replace, single, scenario="open", concurrency=settings.connections, seconds=due,
        max_seconds=max(due, PRESETS[settings.preset].max_seconds), arrivals=settings.arrivals,
    )  # fmt: skip
    return [loop(rate_per_s=float(rate)) for rate in sorted(set(settings.rates))]


def replays_of(settings: ExperimentSettings, seconds: float, transport: Transport) -> list[Replay]:
    """A replay of the recorded traffic per speed; none without any. Raises `PlanError` for a folder that cannot be
    replayed."""
    if settings.traffic is None:
        for option, given in (("--speed", settings.speed), ("--check-answers", settings.check_answers)):
            if given:
                raise PlanError(f"{option} is about recorded traffic; give --traffic FOLDER, or leave it out")
        return []
    replays = [Replay(settings.traffic, transport, seconds, speed) for speed in sorted(set(settings.speed or (1.0,)))]
    try:
        for replay in replays:
            replay.window(0)
            answered = any(map(has_answer, replay.requests()))
    except TrafficError as exc:
        raise PlanError(f"--traffic {exc}") from exc
    if settings.check_answers and not answered:
        raise PlanError(
            f"--check-answers: {settings.traffic} has no answers; record it again with --answers, or leave it out"
        )
    return replays


def of_replay(workload: Workload, replay: Replay, settings: ExperimentSettings) -> Workload:
    """The workload as a replay of recorded traffic, or of a trace."""
    scenario, source = ("open", "trace") if replay.is_trace else ("traffic", "traffic")
    return msgspec.structs.replace(
        workload, scenario=scenario, concurrency=settings.connections, seconds=replay.seconds, arrivals="trace",
        max_seconds=max(replay.seconds, workload.max_seconds), speed=replay.speed,
        rate_per_s=significant(replay.rate_per_s(), 3), check_answers=bool(settings.check_answers),
        **{source: replay.folder},
    )  # fmt: skip


def _traffic(settings: ExperimentSettings, single: Workload, _: bool) -> list[Workload]:
    """A replay per speed, and a search with a limit. Raises `PlanError` for a folder that cannot be replayed."""
    transports = settings.transport or ("http",)
    if settings.traffic is not None and (transports not in (("http",), ("grpc",)) or settings.matrix):
        raise PlanError("--traffic is replayed over one transport; give --transport http or grpc")
    replays = replays_of(settings, max(settings.open_seconds, single.seconds), transports[0])
    workloads = [of_replay(single, replay, settings) for replay in replays]
    for bound_ms in read_limits(settings.limits).values() if settings.limits and replays else ():
        workloads.append(search_of_replay(_search(settings, bound_ms), replays[0], settings, "lower --slo-queries"))
    return workloads


def search_of_replay(search: Workload, replay: Replay, settings: ExperimentSettings, remedy: str) -> Workload:
    """The search as one for the highest speed of recorded traffic. Raises `PlanError` for too few requests, which
    `remedy` helps too."""
    replay = msgspec.structs.replace(replay, speed=1.0)
    if (count := len(replay.requests())) < search.requests:
        raise PlanError(
            f"--limits: {settings.traffic} has {count:,} requests, and a trial of the search needs "
            f"{search.requests:,}; record more, or {remedy}"
        )
    return msgspec.structs.replace(
        search, arrivals="trace", traffic=settings.traffic, rate_per_s=significant(replay.rate_per_s(), 3),
        check_answers=bool(settings.check_answers),
    )  # fmt: skip


def _search(settings: ExperimentSettings, bound_ms: float) -> Workload:
    """A search for the highest rate within a latency bound."""
    preset = PRESETS[settings.preset]
    queries = settings.slo_queries or preset.queries
    least = BOUNDS_PER_TRIAL * bound_ms / 1000.0
    return Workload(
        scenario="slo",
        batch_size=1,
        concurrency=settings.connections,
        requests=queries,
        seconds=max(preset.trial_seconds, least),
        max_seconds=max(preset.longest_trial_seconds * max(1.0, queries / preset.queries), 2.0 * least),
        rounds=settings.rounds or preset.search_rounds,
        arrivals="poisson",
        latency_bound_ms=float(bound_ms),
    )


def cold_start(settings: ExperimentSettings, alone: Workload) -> Workload:
    """Starts of the servers, each with one request like those of this workload."""
    rounds = PRESETS[settings.preset].cold_starts
    return msgspec.structs.replace(
        alone, scenario="cold-start", requests=1, seconds=0.0, max_seconds=300.0, rounds=rounds
    )


LOADS: Mapping[Scenario, Callable[[ExperimentSettings, Workload, bool], list[Workload]]] = {
    "cold-start": lambda settings, single, _: [cold_start(settings, single)],
    "single": lambda _, single, __: [single],
    "batched": lambda settings, single, _: [
        msgspec.structs.replace(single, scenario="batched", batch_size=size)
        for size in sorted(set(settings.batch_sizes))
    ],
    "concurrent": _concurrent,
    "surface": _surface,
    "open": _open,
    "traffic": _traffic,
    "slo": lambda settings, _, __: [_search(settings, bound) for bound in sorted(set(settings.slo_p99_ms))],
}
"""The workloads of a scenario for models that take tensors, in the order of the report: from the settings, the workload
of one user, and whether an arm may run on a GPU."""
ASKED_BY_SETTING: tuple[Scenario, ...] = ("open", "traffic", "slo")
"""Scenarios whose setting asks for them without their name."""


def check_best(settings: ExperimentSettings) -> None:
    """Raises `PlanError` for what has no short rounds that could choose the settings of a load."""
    if not settings.best:
        return
    for option, given in (
        ("--surface", settings.surface),
        ("--slo-p99-ms", settings.slo_p99_ms),
        ("--limits", settings.limits and settings.traffic),
        ("--deployment compose", settings.deployment == "compose"),
        ("--until decided", settings.until == "decided"),
        ("--explain", settings.explain),
        ("--ceiling", settings.ceiling),
        *((f"--scenarios {name}", name in settings.scenarios) for name in ("slo", "goodput")),
        ("--scenarios cold-start", "cold-start" in settings.scenarios and settings.scenarios != DEFAULT_SCENARIOS),
    ):
        if given:
            raise PlanError(f"--best chooses the settings of closed and open loops in short rounds; leave {option} out")


def check_surface(settings: ExperimentSettings) -> None:
    """Raises `PlanError` for settings that a surface does not have, with an alternative."""
    if not settings.surface:
        if "surface" in settings.scenarios:
            raise PlanError("the scenario surface is asked for with --surface; leave it out of --scenarios")
        if len(settings.prompt_tokens or ()) > 1:
            raise PlanError("several --prompt-tokens make a surface; add --surface, or give one")
        if sweep(settings):
            raise PlanError("several --sequence-length make a surface; add --surface, or give one")
        return
    if settings.scenarios != SURFACE_SCENARIOS:
        raise PlanError("--surface is a scenario of its own; leave --scenarios out")
    if settings.until == "decided":
        raise PlanError("--surface adds rounds until its --minutes are over; leave --until out")
    for name in ("rates", "slo_p99_ms", "traffic"):
        if getattr(settings, name):
            raise PlanError(
                f"--surface varies the users of closed loops, so that --{name.replace('_', '-')} has no place in it; "
                "leave it out"
            )
    if len(sweep(settings)) > 1 and len(settings.batch_sizes) > 1:
        raise PlanError(
            "a surface has two axes, the users and one more; give several --batch-sizes or several --sequence-length"
        )
    points = surface_points(settings)
    if len(surface_users(settings)) < 2:
        raise PlanError("a surface needs several numbers of users; give a larger --concurrency, as in 16, or a list")
    if points > MOST_POINTS:
        raise PlanError(f"a surface has at most {MOST_POINTS} loads, not {points}; give fewer values")


def surface_users(settings: ExperimentSettings) -> tuple[int, ...]:
    """The numbers of users of a surface: those of a list, or 1, 2, 4, … up to a single one."""
    if len(settings.concurrency) != 1:
        return tuple(sorted(set(settings.concurrency)))
    most = settings.concurrency[0]
    return (*(2**power for power in range(most.bit_length()) if 2**power < most), most)


def surface_points(settings: ExperimentSettings) -> int:
    """The number of loads of a surface."""
    across = {Kind.TENSORS: settings.batch_sizes, Kind.TOKENS: settings.prompt_tokens or (1,)}[settings.kind]
    return len(surface_users(settings)) * len(across) * len(sweep(settings) or (1,))


def surface_base(settings: ExperimentSettings, *, gpu: bool, factor: float = 1.0) -> Workload:
    """`base_workload` with few rounds, since further ones follow where the winner is uncertain. On a GPU the blocks of
    these few and of all loads last as long together as its proof needs, which is one for the whole surface."""
    arms = len(settings.arms)
    first = settings.rounds or math.ceil(SURFACE_ROUNDS / arms) * arms
    few = settings.model_copy(update={"rounds": first})
    return base_workload(few, gpu=gpu, factor=factor, loads=surface_points(settings))


def base_workload(settings: ExperimentSettings, *, gpu: bool = False, factor: float = 1.0, loads: int = 1) -> Workload:
    """The workload of one user, from which the others are made; its blocks last at least `factor` times the
    preset's least time. So many `loads` share one GPU proof."""
    preset = PRESETS[settings.preset]
    seconds, rounds, requests = factor * preset.seconds, settings.rounds or least_rounds(settings), 1
    if gpu:
        seconds = max(seconds, GPU_BLOCK_S)
        if settings.rounds is None:
            rounds = max(rounds, math.ceil(GPU_WINDOW_S / seconds))
        else:
            seconds = max(seconds, GPU_WINDOW_S / (rounds * loads))
        requests = math.ceil(GPU_REQUESTS / (rounds * loads))
    return Workload(
        scenario="single",
        batch_size=1,
        concurrency=1,
        requests=requests,
        seconds=seconds,
        max_seconds=max(preset.max_seconds, 2.0 * seconds),
        rounds=rounds,
    )


def unique_names(workloads: Sequence[Workload]) -> tuple[Workload, ...]:
    """The workloads. Raises `PlanError` if two have the same name."""
    names = [workload.name for workload in workloads]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise PlanError(f"two workloads would both be called {twice}; give values that differ in six digits")
    return tuple(workloads)


def sized(
    workloads: Sequence[Workload], request_seconds: Mapping[str, float], span: float = SPAN
) -> tuple[Workload, ...]:
    """The workloads with closed-loop blocks of `span` requests of the slowest arm, whose seconds per request are given
    by the workload's name. All arms get the same time."""
    return tuple(
        workload
        if workload.is_open or workload.name not in request_seconds
        else msgspec.structs.replace(
            workload, seconds=min(max(workload.seconds, span * request_seconds[workload.name]), workload.max_seconds)
        )
        for workload in workloads
    )


# Padding: it decides which requests share a batch and how much each computes, so the arms pad alike, to the same sizes
# where every arm can, else not at all. An arm's own option `pad-to` is a difference that was asked for.


def decide_padding(
    experiment: Experiment, cannot_pad: Mapping[Label, str], pads_to: Mapping[Label, tuple[int, ...]]
) -> Experiment:
    """The experiment with the padding that every arm can do; the sizes follow from the samples where none are set here.
    `cannot_pad` says why an arm does not take `pad-to`; `pads_to` has the sizes of servers that run already. Raises
    `PlanError` for sizes that an arm which abserve starts cannot pad to."""
    if experiment.deployment != "embedded" or experiment.kind is Kind.TOKENS:
        return experiment
    common = [arm for arm in experiment.arms if own_padding(arm) is None]
    if experiment.pad_to:
        _require_padding(experiment, common, cannot_pad)
    starts = any(arm.embedded and not arm.own_repository for arm in experiment.arms)
    if experiment.pad_to is not None or not starts or not has_mixed_lengths(experiment):
        return experiment
    fixed = {arm.label: cannot_pad[arm.label] for arm in common if arm.label in cannot_pad}
    sizes = {pads_to.get(label, ()) for label in fixed}
    if len(sizes) == 1 and (same := sizes.pop()):
        return msgspec.structs.replace(experiment, pad_to=same)
    return msgspec.structs.replace(experiment, cannot_pad=fixed)


def _require_padding(experiment: Experiment, arms: Sequence[ArmRequest], cannot_pad: Mapping[Label, str]) -> None:
    if not any(arm.embedded for arm in experiment.arms):
        raise PlanError("--pad-to has no effect, because abserve starts no server; leave it out")
    unable = next((arm for arm in arms if arm.embedded and arm.label in cannot_pad), None)
    if unable is None:
        return
    able = next((arm for arm in arms if arm.label not in cannot_pad), None)
    names, alone = names_of(experiment.arms, ()), ""
    if able is not None:
        alone = f", or pad on {names[able.label]} alone: {_padding_option(able, experiment.pad_to or ())}"
    raise PlanError(
        f"--pad-to: {names[unable.label]} cannot pad batches, because {cannot_pad[unable.label]}; "
        f"leave --pad-to out, and no arm pads{alone}"
    )


def own_padding(arm: ArmRequest) -> str | None:
    """The arm's own sizes, which replace those of the experiment; None without."""
    return asked_for(arm.settings, "pad_to")


def has_mixed_lengths(experiment: Experiment) -> bool:
    """Whether the lengths are those of texts or of the user's inputs, not fixed ones."""
    return experiment.sequence_length in (None, "text")


def default_sizes(largest: int, lengths: Sequence[int]) -> tuple[int, ...]:
    """The sizes to pad to for items of these lengths and a model that takes `largest`."""
    last = max([min(PAD_TO[-1], largest), *lengths])
    return (*(size for size in PAD_TO if size < last), last)


def held_back(experiment: Experiment) -> tuple[ArmRequest, ...]:
    """The arms that could pad but do not by default, because another arm cannot."""
    if experiment.pad_to != () or not experiment.cannot_pad:
        return ()
    return tuple(
        arm
        for arm in experiment.arms
        if arm.embedded and arm.label not in experiment.cannot_pad and own_padding(arm) is None
    )


def padding_in_words(experiment: Experiment, longest: int) -> str:
    """How the servers that abserve starts pad, in a sentence without a full stop; empty for a model without such an
    axis. `longest` is the length of the longest input."""
    if experiment.pad_to is None:
        return ""
    names = names_of(experiment.arms, ())
    asked = {names[arm.label]: sizes for arm in experiment.arms if (sizes := own_padding(arm)) is not None}
    words = [f"{label} has its own pad-to={sizes}" for label, sizes in asked.items()]
    if len(asked) < len(experiment.arms):
        words.insert(0, _common_rule(experiment, longest))
    return "; ".join(words)


def _common_rule(experiment: Experiment, longest: int) -> str:
    if experiment.pad_to:
        return f"batches are padded to {_listed(experiment.pad_to)}"
    alike = "only requests of equal lengths share a batch"
    able, names = held_back(experiment), names_of(experiment.arms, ())
    if not able:
        running = [arm.label for arm in experiment.arms if not arm.embedded and arm.label in experiment.cannot_pad]
        return "; ".join([alike, *(f"{names[label]}: {experiment.cannot_pad[label]}" for label in running)])
    sizes = default_sizes(longest, (longest or PAD_TO[2],))
    options = " ".join(_padding_option(arm, sizes) for arm in able)
    unable = " and ".join(f"{names[label]} ({why})" for label, why in experiment.cannot_pad.items())
    padding = " and ".join(names[arm.label] for arm in able)
    return (
        f"no arm is asked to pad batches, because abserve cannot make {unable} do so: {alike}; add {options} to let "
        f"{padding} pad, and the report then names the difference"
    )


def _padding_option(arm: ArmRequest, sizes: Sequence[int]) -> str:
    return f"{option_of(arm.label, 'option')} pad-to={_listed(sizes)}"


def _listed(sizes: Sequence[int]) -> str:
    return ",".join(map(str, sizes))
