"""A comparison of servers of a language model: which protocol each arm speaks, and the workloads with their lengths.

Prompts go out as token ids and answers come back as token ids, over one of two protocols: OpenAI's completions, or
Triton's generate extension. A server at a URL that takes no ids gets prompts as text, over completions or as a chat.
All arms get one protocol if they have one in common. Then they get the same prompts in the same bytes; otherwise each
arm gets its own protocol, and a check names the difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec

from loadgen.base.quantities import join, significant
from loadgen.experiment.plan import (
    PRESETS,
    SPAN,
    Combination,
    PlanError,
    base_workload,
    cold_start,
    expects_gpu,
    make_workloads,
    measurable_scenarios,
    of_replay,
    plan_combinations,
    replays_of,
    search_of_replay,
    surface_base,
    surface_users,
    unique_names,
)
from loadgen.experiment.prompts import SETTLING
from loadgen.experiment.replay import recorded_protocol
from loadgen.experiment.schedule import block_seconds, warm_up_users
from loadgen.experiment.settings import (
    BATCH_SIZES,
    LANGUAGE_USERS,
    SMOKE_BATCH_SIZES,
    SURFACE_BATCH_SIZES,
    ExperimentSettings,
    read_limits,
)
from loadgen.records.names import names_of
from loadgen.records.payloads import TOKENS
from loadgen.records.run import ArmRequest, Experiment, Label, TokenLimits, Workload, option_of
from loadgen.records.scenarios import Scenario, scenarios_of
from loadgen.records.targets import ROUTES, TARGETS, TOKEN_TRANSPORTS, Kind, TokenTransport
from loadgen.records.traffic import TrafficError
from loadgen.stats.percentiles import queries_needed

SHORT, LONG = (32, 64), (128, 128)
"""Tokens of a prompt and of its answer on a CPU, and of a single user's on a GPU."""
CONCURRENT = (256, 256)
"""Those of several users on a GPU."""
LONG_PROMPT, LONG_ANSWER = (2048, 64), (64, 1024)
GPU_USERS = 64
RATE_SHARES = (0.5, 0.8)
"""Rates of the open loop as shares of the slowest arm's rate, where --rates names none."""
SHARED_SHARE = 0.75
"""The part of each prompt that all prompts have in common in the scenario shared-prefix."""
GOOD_SHARE = 0.9
"""The share of answers that must be good at the rate that the scenario goodput searches for."""
BLOCK_FACTOR = 3.0
"""The shortest block lasts so many times the preset's, since an answer of many tokens takes long."""
SMOKE = (32, 32)
"""Lengths with the preset smoke, which must end within its minute also where a server is slow."""
PlannedLoads = tuple[tuple[Combination, ...], tuple[ArmRequest, ...], tuple[Workload, ...]]
"""The transports with their payloads, the arms with their own protocol, and the workloads."""
_MEANT_FOR_TENSORS = (
    ("payload", "a language model gets prompts as token ids"),
    ("inputs", "abserve makes the prompts; set their length with --prompt-tokens"),
    ("sequence_length", "set the lengths with --prompt-tokens and --output-tokens"),
    ("pad_to", "servers of language models do not pad"),
    ("slo_p99_ms", "search with --scenarios goodput and --limits"),
    ("batch_sizes", "a request has one prompt; use --concurrency"),
    ("check_answers", "its answers are judged by a reference"),
    ("ceiling", "engines of language models are measured by `abserve engines`"),
    ("handicap_check", "it does not exist for language models"),
    ("matrix", "language models have one payload"),
)


def check_kind(settings: ExperimentSettings, arms: Sequence[ArmRequest]) -> None:
    """Raises `PlanError` for settings without effect on models of this kind, and for what cannot be measured of
    them."""
    _CHECKS[settings.kind](settings, arms)


def plan_loads(settings: ExperimentSettings, arms: Sequence[ArmRequest]) -> PlannedLoads:
    """What the arms are sent. Raises `PlanError`."""
    return _LOADS[settings.kind](settings, arms)


def _check_tokens(settings: ExperimentSettings, arms: Sequence[ArmRequest]) -> None:
    for name, reason in _MEANT_FOR_TENSORS:
        usual = None, (), False, BATCH_SIZES, SMOKE_BATCH_SIZES, SURFACE_BATCH_SIZES
        if name in settings.model_fields_set and getattr(settings, name) not in usual:
            option = f"--{name.replace('_', '-')}"
            raise PlanError(f"{option} has no effect on a language model: {reason}; leave it out")
    if settings.deployment == "compose":
        raise PlanError("--deployment compose serves no language models; leave it out")
    able = scenarios_of(Kind.TOKENS)
    if other := next((name for name in settings.scenarios if name not in able), None):
        raise PlanError(f"the scenario {other} is not for language models; choose from {', '.join(able)}")
    if "cold-start" in settings.scenarios and not all(arm.embedded for arm in arms):
        raise PlanError("cold starts need servers that abserve starts; leave cold-start out of --scenarios with a URL")
    asked = settings.transport or ()
    if len(asked) > 1 or not {*asked} <= {*TOKEN_TRANSPORTS}:
        raise PlanError(
            f"--transport {','.join(asked)}: a language model is reached over one of {', '.join(TOKEN_TRANSPORTS)}; "
            "give one of them"
        )
    for label, arm in settings.arms.items():
        if arm.payload is not None:
            raise PlanError(f"{option_of(label, 'payload')} has no effect on a language model; leave it out")


def _check_tensors(settings: ExperimentSettings, _: Sequence[ArmRequest]) -> None:
    of_speed = settings.traffic is not None and set(read_limits(settings.limits or "p99=1ms")) == {"p99"}
    if settings.traffic is not None and settings.limits and not of_speed:
        raise PlanError(f"--limits {settings.limits} is for prompts; of recorded tensors give p99, as in p99=50ms")
    for name in ("prompt_tokens", "output_tokens", *(() if of_speed else ("limits",)), "price"):
        if getattr(settings, name) is not None:
            raise PlanError(
                f"--{name.replace('_', '-')} is for language models, and {settings.model} is not one; name one as in "
                "--model language:demo"
            )
    able = scenarios_of(Kind.TENSORS)
    if other := next((name for name in settings.scenarios if name not in able), None):
        raise PlanError(
            f"the scenario {other} is for language models, and {settings.model} is not one; name one as in --model "
            "language:demo"
        )
    for label, arm in settings.arms.items():
        if arm.target in TARGETS and not TARGETS[arm.target].transports:
            raise PlanError(
                f"{option_of(label)} {arm.target} serves language models only; name one as in --model language:demo"
            )


def choose_protocol(
    settings: ExperimentSettings, arms: Sequence[ArmRequest]
) -> tuple[TokenTransport, tuple[ArmRequest, ...]]:
    """The protocol of the comparison, and the arms with their own where they cannot speak it: what was asked for, else
    the first protocol that all arms speak, else A's. Raises `PlanError` for an arm that does not speak the one asked
    for."""
    spoken = {arm.label: _spoken_by(arm) for arm in arms}
    asked = _protocol_asked_for(settings)
    common = [transport for transport in TOKEN_TRANSPORTS if all(transport in able for able in spoken.values())]
    wanted = [transport for transport in TOKEN_TRANSPORTS if transport == asked]
    chosen = next(iter([*wanted, *common]), spoken[arms[0].label][0])
    with_own = []
    for arm in arms:
        able = spoken[arm.label]
        if asked is not None and asked not in able and arm.transport is None:
            raise PlanError(
                f"{option_of(arm.label)} {arm.target} speaks {' and '.join(able)} only; "
                + (
                    f"the recorded prompts need {asked}, which {_speakers(asked)} speak"
                    if settings.transport is None
                    else f"leave --transport {asked} out"
                )
            )
        with_own.append(msgspec.structs.replace(arm, transport=None if chosen in able else able[0]))
    return chosen, tuple(with_own)


def _speakers(transport: str) -> str:
    """The servers that speak a protocol, in words."""
    able = [name for name, target in TARGETS.items() if transport in target.protocols]
    return join([*able, "URLs"])


def _protocol_asked_for(settings: ExperimentSettings) -> TokenTransport | None:
    """The protocol that was asked for, or that of the recorded prompts; None: any. Raises `PlanError`."""
    wanted = [transport for transport in TOKEN_TRANSPORTS if transport in (settings.transport or ())]
    if wanted or settings.traffic is None:
        return next(iter(wanted), None)
    try:
        return recorded_protocol(settings.traffic)
    except TrafficError as exc:
        raise PlanError(f"--traffic {exc}") from exc


def _spoken_by(arm: ArmRequest) -> tuple[TokenTransport, ...]:
    """The protocols of an arm. Raises `PlanError` for a server that serves no language models."""
    able = TARGETS[arm.target].protocols if arm.embedded else TOKEN_TRANSPORTS
    if not able:
        able_targets = ", ".join(name for name, target in TARGETS.items() if target.protocols)
        place = f"{option_of(arm.label)} {arm.target}"
        raise PlanError(f"{place} serves no language models; choose from {able_targets}, or a URL")
    if arm.transport is None:
        return able
    if arm.transport not in able:
        raise PlanError(
            f"{option_of(arm.label, 'transport')} {arm.transport}: {arm.target} speaks {' and '.join(able)} only"
        )
    return (arm.transport,)


def protocol_in_words(experiment: Experiment) -> str:
    """Which protocol the arms get, for the first screen."""
    names = names_of(experiment.arms, ())
    spoken = {names[arm.label]: ROUTES[experiment.transport_of(arm)].title for arm in experiment.arms}
    if len(titles := set(spoken.values())) == 1:
        kind = "text" if ROUTES[experiment.transport].is_text else "token ids"
        return f"all arms get prompts as {kind} over {titles.pop().removesuffix(' of text')}"
    each = ", ".join(f"{label} over {title}" for label, title in spoken.items())
    return f"the arms have no protocol in common, so each gets its own: {each}"


def _limits(settings: ExperimentSettings) -> TokenLimits | None:
    given = read_limits(settings.limits) if settings.limits else {}
    if "p99" in given:
        raise PlanError("--limits p99 is for recorded traffic of tensors; give ttft, tpot or gap")
    return TokenLimits(**{f"{name}_ms": limit_ms for name, limit_ms in given.items()}) if given else None


def token_workloads(settings: ExperimentSettings, *, gpu: bool = False) -> tuple[Workload, ...]:
    """The workloads of a language model in the order of the report. `gpu`: an arm may run on one. Raises
    `PlanError`."""
    scenarios, preset = settings.scenarios, PRESETS[settings.preset]
    base = base_workload(settings, gpu=gpu, factor=BLOCK_FACTOR)
    base = msgspec.structs.replace(base, requests=1, limits=_limits(settings))  # an answer is many steps of a GPU
    prompts = settings.prompt_tokens or (None,)

    def like(scenario: Scenario, lengths: tuple[int, int], **more: object) -> Workload:
        prompt, output = lengths
        load = msgspec.structs.replace(base, scenario=scenario, prompt_tokens=prompt, output_tokens=output, **more)
        if load.is_open or not load.has_blocks:
            return load
        # A number of answers ends a block, and no time does: one time for all arms would be that of the slowest.
        # Of the `SPAN` answers of each user the first comes while the load builds up.
        return msgspec.structs.replace(load, requests=max(load.requests, math.ceil(SPAN * load.concurrency)))

    def lengths(default: tuple[int, int]) -> tuple[int, int]:
        return prompts[0] or default[0], settings.output_tokens or default[1]

    short = settings.preset == "smoke"
    alone, several = (lengths(SMOKE if short else long if gpu else SHORT) for long in (LONG, CONCURRENT))
    users = sorted({*settings.concurrency, *((GPU_USERS,) if gpu and settings.concurrency == LANGUAGE_USERS else ())})
    workloads: list[Workload] = []
    if "cold-start" in scenarios:
        workloads.append(cold_start(settings, like("single", alone)))
    if "single" in scenarios:
        workloads.append(like("single", alone))
    if "concurrent" in scenarios:
        workloads += [like("concurrent", several, concurrency=n, requests=settings.requests) for n in users]
    if "long-prompt" in scenarios:
        workloads.append(like("long-prompt", (LONG_PROMPT[0], settings.output_tokens or LONG_PROMPT[1])))
    if "long-answer" in scenarios:
        workloads.append(like("long-answer", (prompts[0] or LONG_ANSWER[0], LONG_ANSWER[1])))
    if "shared-prefix" in scenarios:
        shared = like("shared-prefix", several, concurrency=max(1, min(users)))
        prefix = int(SHARED_SHARE * several[0])
        workloads.append(msgspec.structs.replace(shared, shared_prefix=prefix))
    workloads += _surface(settings, partial(like, "surface"), several, gpu=gpu)
    if "open" in scenarios or settings.rates:
        due = max(settings.open_seconds, base.seconds)
        open_loop = partial(
            like, "open", several, concurrency=settings.connections, seconds=due, arrivals=settings.arrivals,
            max_seconds=max(due, base.max_seconds),
        )  # fmt: skip
        rates = sorted(set(settings.rates))
        workloads += [open_loop(rate_per_s=float(rate)) for rate in rates]
        workloads += [open_loop(rate_share=share) for share in (() if rates else RATE_SHARES)]
    search = like(
        "goodput", several, concurrency=settings.connections, arrivals="poisson",
        requests=queries_needed(preset.late_answers, GOOD_SHARE), seconds=preset.trial_seconds,
        max_seconds=preset.longest_trial_seconds, rounds=settings.rounds or preset.search_rounds,
    )  # fmt: skip
    workloads += _replays(settings, base, search)
    if "goodput" in scenarios:
        if base.limits is None:
            raise PlanError("the scenario goodput needs --limits, as in --limits ttft=200ms,tpot=50ms")
        workloads.append(search)
    return unique_names(workloads)


def _replays(settings: ExperimentSettings, base: Workload, search: Workload) -> list[Workload]:
    """The recorded prompts at each speed, and with limits the search for the highest; of a trace its first part at each
    speed."""
    transport = _protocol_asked_for(settings) or TOKEN_TRANSPORTS[0]
    workloads: list[Workload] = []
    for replay in replays_of(settings, max(settings.open_seconds, base.seconds), transport):
        longest = replay.longest()
        loads = [of_replay(base, replay, settings)]
        if base.limits is not None and not workloads and not replay.is_trace:
            loads.append(search_of_replay(search, replay, settings, "use --preset smoke"))
        workloads += [
            msgspec.structs.replace(load, prompt_tokens=longest.prompt_tokens, output_tokens=longest.output_tokens)
            for load in loads
        ]
    return sorted(workloads, key=lambda load: load.is_search)


def _surface(
    settings: ExperimentSettings, like: Callable[..., Workload], lengths: tuple[int, int], *, gpu: bool
) -> list[Workload]:
    """With --surface every number of users with every prompt; without any the prompts have the first of these
    `lengths`."""
    if not settings.surface:
        return []
    first = surface_base(settings, gpu=gpu, factor=BLOCK_FACTOR)
    times = {"seconds": first.seconds, "max_seconds": first.max_seconds, "rounds": first.rounds}
    return [
        like((prompt, lengths[1]), concurrency=users, requests=settings.requests, **times)
        for prompt in settings.prompt_tokens or lengths[:1]
        for users in surface_users(settings)
    ]


def with_rates(workloads: Sequence[Workload], request_seconds: Mapping[str, float]) -> tuple[Workload, ...]:
    """The workloads with the rates of open loops that were asked for as shares, by the seconds per request and user of
    each closed loop on the slowest arm."""
    measured = [workload for workload in workloads if request_seconds.get(workload.name, 0.0) > 0.0]
    closed = [workload for workload in measured if not workload.is_open] or measured
    rates = [warm_up_users(workload) / request_seconds[workload.name] for workload in closed]
    capacity = max((rate for rate in rates if math.isfinite(rate)), default=1.0)
    return tuple(
        workload
        if workload.rate_share is None
        else msgspec.structs.replace(workload, rate_per_s=significant(workload.rate_share * capacity, 3))
        for workload in workloads
    )


def fitted(
    workloads: Sequence[Workload],
    request_seconds: Mapping[str, Mapping[Label, float]],
    seconds: float | None,
    *,
    restarts: int = 1,
    gpu: bool = False,
) -> tuple[tuple[Workload, ...], tuple[str, ...]]:
    """The workloads as the time of the load allows, by the seconds that a request takes on each arm, and the names of
    those that it does not allow.

    Blocks end when the slowest arm has its answers. Where the planned rounds take too long there are fewer, but each
    arm comes once in each place; where that is still too much, the workloads that take longest are left out, all but
    one. On a GPU fewer rounds have longer blocks, since all blocks of an arm together are the proof that it ran there.
    `seconds`: of all rounds; None: whatever they take.
    """
    longer = [_with_time(load, request_seconds.get(load.name, {})) for load in workloads]
    blocks = [load for load in longer if load.has_blocks]
    if seconds is None or not blocks:
        return tuple(longer), ()
    arms = max(map(len, request_seconds.values()), default=1)
    planned = max(load.rounds for load in blocks)
    least = min(planned, math.ceil(max(arms, restarts) / arms) * arms)

    def in_rounds(load: Workload, rounds: int) -> Workload:
        stretch = planned / rounds if gpu else 1.0
        return msgspec.structs.replace(
            load,
            rounds=min(load.rounds, rounds),
            seconds=load.seconds * stretch,
            max_seconds=load.max_seconds * stretch,
        )

    def needed_s(load: Workload, rounds: int) -> float:
        load, by_arm = in_rounds(load, rounds), request_seconds.get(load.name, {})
        return load.rounds * sum(block_seconds(load, request_s) for request_s in by_arm.values())

    longest_first = sorted(blocks, key=lambda load: -needed_s(load, least))
    kept = list(longest_first)
    while len(kept) > 1 and sum(needed_s(load, least) for load in kept) > seconds:
        kept.pop(0)
    more = (planned, *range(planned // arms * arms, least, -arms))
    rounds = next((many for many in more if sum(needed_s(load, many) for load in kept) <= seconds), least)
    return (
        tuple(
            in_rounds(load, rounds) if load in kept else load for load in longer if load in kept or not load.has_blocks
        ),
        tuple(load.name for load in longest_first if load not in kept),
    )


def _with_time(load: Workload, request_seconds: Mapping[Label, float]) -> Workload:
    """The workload of a closed loop with time enough for the requests of a block on the slowest arm."""
    request_s = max(request_seconds.values(), default=math.inf)
    if load.is_open or not math.isfinite(request_s):
        return load
    needed_s = (math.ceil(load.requests / load.concurrency) + 1) * request_s
    return msgspec.structs.replace(load, max_seconds=max(load.max_seconds, needed_s))


def _tensor_loads(settings: ExperimentSettings, arms: Sequence[ArmRequest]) -> PlannedLoads:
    combinations = plan_combinations(arms, settings)
    workloads = make_workloads(settings, measurable_scenarios(settings, arms), gpu=expects_gpu(*arms))
    return combinations, tuple(arms), workloads


def _token_loads(settings: ExperimentSettings, arms: Sequence[ArmRequest]) -> PlannedLoads:
    transport, with_own = choose_protocol(settings, arms)
    return (Combination(transport, TOKENS),), with_own, token_workloads(settings, gpu=expects_gpu(*with_own))


_CHECKS = {Kind.TENSORS: _check_tensors, Kind.TOKENS: _check_tokens}
_LOADS = {Kind.TENSORS: _tensor_loads, Kind.TOKENS: _token_loads}


def longest_answer(workloads: Sequence[Workload]) -> int:
    """The most tokens of a prompt and its answer together, also of the small request before a block."""
    least = SETTLING.prompt_tokens + SETTLING.output_tokens
    return max([least, *((load.prompt_tokens or 0) + (load.output_tokens or 0) for load in workloads)])
