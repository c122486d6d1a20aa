"""One arm while it runs: its deployment, what its server reports about itself, and the server's statistics of a block.

A block's statistics are the growth of the server's counters. For an ensemble they are those of the models that it
calls: Triton's own entry of an ensemble has one execution per request and no time in a queue, since queues, batches and
decoding are in the statistics of the models that it calls. Those also count the requests that others send to such a
model, so the number of its requests is kept beside its times.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import randbits
from time import sleep
from typing import Any

import msgspec

from loadgen.base.documents import one_line
from loadgen.client.endpoint import Endpoint, EndpointError, Signature
from loadgen.client.messages import Open, Prepare
from loadgen.client.transports import InferenceTarget
from loadgen.experiment.prompts import PromptPlan, PromptShape
from loadgen.experiment.replay import Replay
from loadgen.launch.deployment import Deployment
from loadgen.records.model_config import (
    effective_settings,
    listed,
    mapping,
    read_triton,
    read_vllm,
    split_steps,
    step_calls,
    triton_title,
    whole,
)
from loadgen.records.run import (
    REQUEST_TIMEOUT_S,
    Access,
    ArmRecord,
    ArmRequest,
    Experiment,
    StageTotals,
    StepRecord,
    StepTotals,
    Workload,
    shown,
)
from loadgen.records.samples import NS_PER_MS
from loadgen.records.targets import ROUTES, Transport

OWN_STAGES = "abserve_stages"
"""The native server's own object in its statistics: receive, decode, queue, compute, encode."""
VLLM_INFO_SECONDS = 60.0
_REPLAY_BITS = 32
_MOST_NS = 2**53
"""104 days in nanoseconds."""
_COMPUTE = ("compute_input_ns", "compute_infer_ns", "compute_output_ns")

Statistics = Mapping[str, Any]


Snapshot = tuple[Statistics, tuple[Statistics | None, ...]]
"""The statistics of a model, and of the models that it calls; None: they cannot be read."""


@dataclass(frozen=True, slots=True)
class ServerStatistics:
    """Where the statistics of one model are; `steps` are the models that it calls, if it is an ensemble."""

    url: str
    access: Access
    model: str
    steps: tuple[StepRecord, ...] = ()

    def read(self) -> Snapshot | None:
        """One snapshot; None if the server has no such statistics."""
        statistics = Endpoint(self.url, access=self.access).statistics(self.model)
        return None if statistics is None else (statistics, tuple(map(self._read_step, self.steps)))

    def _read_step(self, step: StepRecord) -> Statistics | None:
        """None also for a step whose configuration is unknown: it may be an ensemble itself."""
        if step.config is None:
            return None
        access = msgspec.structs.replace(self.access, version=step.version)
        return Endpoint(self.url, access=access).statistics(step.model)

    def settled(self, before: Snapshot, after: Snapshot, requests: int) -> bool:
        """Whether all requests between two snapshots are counted, those to the steps too."""
        grown = [(requests_seen(after[0]) - requests_seen(before[0]), 1)]
        grown += [
            (requests_seen(last) - requests_seen(first), step.calls)
            for step, first, last in self._pairs(before, after)
            if first is not None and last is not None
        ]
        return all(seen >= requests * calls for seen, calls in grown)

    def totals(self, before: Snapshot, after: Snapshot) -> StageTotals | None:
        """The growth between two snapshots; None when a number is impossible for a block of load."""
        totals = stage_totals(before[0], after[0])
        if totals is None or not self.steps:
            return totals
        step_totals = [
            (step, None if first is None or last is None else _whole_totals(first, last))
            for step, first, last in self._pairs(before, after)
        ]
        return ensemble_totals(totals, step_totals)

    def _pairs(
        self, before: Snapshot, after: Snapshot
    ) -> Iterator[tuple[StepRecord, Statistics | None, Statistics | None]]:
        return zip(self.steps, before[1], after[1], strict=True)


def ensemble_totals(ensemble: StageTotals, steps: Sequence[tuple[StepRecord, StageTotals | None]]) -> StageTotals:
    """The totals of an ensemble by those of its steps: their times are summed; executions and batches are those of the
    step that computes longest, among the steps that do not only decode. If a step is unknown, only the numbers of
    requests and items are known."""
    decoding, _ = split_steps([step for step, _ in steps])
    reported = [
        StepTotals(
            model=step.model, calls=step.calls, decodes=step in decoding, executes=False, totals=totals
        )
        for step, totals in steps
    ]  # fmt: skip
    measured = [totals for _, totals in steps if totals is not None]
    if len(measured) < len(reported):
        unknown = dict.fromkeys(("executions", "queue_ns", *_COMPUTE, "decode_ns"))
        return msgspec.structs.replace(ensemble, **unknown, batches={}, steps=tuple(reported))
    computing = [step for step in reported if not step.decodes]
    longest = max(computing, key=lambda step: (step.totals and step.totals.compute_infer_ns) or 0)
    place = reported.index(longest)
    executed = measured[place]
    reported[place] = msgspec.structs.replace(longest, executes=True)
    decoders = [totals for step, totals in zip(reported, measured, strict=True) if step.decodes]
    executors = [totals for step, totals in zip(reported, measured, strict=True) if not step.decodes]
    return msgspec.structs.replace(
        ensemble,
        executions=executed.executions,
        batches=executed.batches,
        queue_ns=_sum(measured, "queue_ns"),
        decode_ns=_sum(decoders, *_COMPUTE) if decoders else None,
        **{name: _sum(executors, name) for name in _COMPUTE},
        steps=tuple(reported),
    )


def _whole_totals(before: Statistics, after: Statistics) -> StageTotals | None:
    """The growth between two snapshots of a step; None if the server does not report its requests and all times."""
    totals = stage_totals(before, after)
    needed = ("requests", "queue_ns", *_COMPUTE)
    return None if totals is None or any(getattr(totals, name) is None for name in needed) else totals


def _sum(parts: Sequence[StageTotals], *names: str) -> int:
    """The sum of these times."""
    return sum(getattr(totals, name) for totals in parts for name in names)


def requests_seen(statistics: Statistics) -> int:
    """Requests that a server has finished, good or bad."""
    counts = (_value(statistics, "inference_stats", outcome, "count") for outcome in ("success", "fail"))
    return sum(count or 0 for count in counts)


def stage_totals(before: Statistics, after: Statistics) -> StageTotals | None:
    """The growth between two readings of one model. A counter that the server does not report is None; one that it
    reports since its first use was 0 before. None when a number is impossible for a block of load."""
    differences: list[int] = []

    def grown(*path: str) -> int | None:
        now = _value(after, *path)
        if now is None:
            return None
        differences.append(now - (_value(before, *path) or 0))
        return differences[-1]

    def stage(name: str) -> int | None:
        return grown("inference_stats", name, "ns")

    executed_before, executed_after = _batches(before), _batches(after)
    batches = {size: count - executed_before.get(size, 0) for size, count in executed_after.items()}
    differences += batches.values()
    step_ns = _batch_ns(after) - _batch_ns(before)
    differences.append(step_ns)
    # An execution that no request counts as its own is a step of an engine that generates tokens.
    has_steps = any(batches.values()) and not grown("inference_stats", "compute_infer", "count")
    totals = StageTotals(
        requests=grown("inference_stats", "success", "count"),
        items=grown("inference_count"),
        executions=grown("execution_count"),
        queue_ns=stage("queue"),
        compute_input_ns=stage("compute_input"),
        compute_infer_ns=stage("compute_infer"),
        compute_output_ns=stage("compute_output"),
        receive_ns=grown(OWN_STAGES, "receive", "ns"),
        decode_ns=grown(OWN_STAGES, "decode", "ns"),
        encode_ns=grown(OWN_STAGES, "encode", "ns"),
        step_ns=step_ns if has_steps and mapping(after.get(OWN_STAGES)) else None,
        batches={size: count for size, count in sorted(batches.items()) if count},
    )
    return totals if all(abs(difference) < _MOST_NS for difference in differences) else None


def _batches(statistics: Statistics) -> dict[int, int]:
    counts: dict[int, int] = {}
    for entry in map(mapping, listed(statistics.get("batch_stats"))):
        size = whole(entry.get("batch_size"))
        if size is not None:
            counts[size] = _value(entry, "compute_infer", "count") or 0
    return counts


def _batch_ns(statistics: Statistics) -> int:
    """The time of all executions."""
    return sum(
        _value(entry, "compute_infer", "ns") or 0 for entry in map(mapping, listed(statistics.get("batch_stats")))
    )


def _value(statistics: Statistics, *path: str) -> int | None:
    value: Any = statistics
    for key in path:
        value = mapping(value).get(key)
    return whole(value)


BODIES_PER_TURN = 13
"""Odd, so that successive rounds of a workload begin with each of its 4, 8, 16 or 32 bodies."""
_MOST_STEPS = 16
"""Models of an ensemble whose configurations are read, those of an ensemble among them included."""
_MOST_CALLS = 2**31
_MOST_TITLE = 120
TRITON = "triton"
"""The name that a Triton server gives itself."""


@dataclass(frozen=True, slots=True)
class Arm:
    """A deployment and the request for it."""

    request: ArmRequest
    deployment: Deployment
    model: str
    """The name of the variant for the payload."""
    transport: Transport = "http"
    payload: str = "fp32"
    signature: Signature | None = None
    """Its inputs and outputs by the server's metadata, once the server is ready."""
    request_timeout_s: float = REQUEST_TIMEOUT_S
    called: str = ""
    """Its name by `names_of`, if it is an arm of the run."""

    @property
    def name(self) -> str:
        """What sentences call it."""
        return self.called or shown(self.request.label)

    @property
    def endpoint(self) -> Endpoint:
        """The endpoint for all requests except inference."""
        return self.deployment.endpoint()

    @property
    def body_key(self) -> str:
        """Arms with the same key get the same requests and owe the same answers; a gRPC request contains the model's
        name and version."""
        version, body = self.deployment.access.version, self.request.body
        return f"{self.model} {self.payload} {self.transport} {version} {self.signature} {body}"

    @property
    def target(self) -> InferenceTarget:
        """The target of inference requests."""
        deployment = self.deployment
        return InferenceTarget(
            self.transport, deployment.url, self.model, deployment.grpc_address, deployment.access,
            body=self.request.body,
        )  # fmt: skip

    def bodies(
        self, samples: Path, signature: Signature, batch_sizes: Iterable[int], experiment: Experiment
    ) -> Prepare:
        """The command that makes the generator prepare this arm's request bodies, also those of one length."""
        return Prepare(
            samples_directory=str(samples),
            payload=self.payload,
            signature=signature,
            batch_sizes=tuple(sorted(set(batch_sizes))),
            seed=experiment.seed,
            lengths=experiment.lengths,
            replays=tuple(filter(None, (replay_of(load, self.transport) for load in experiment.workloads))),
            transport=self.transport,
            key=self.body_key,
        )

    def prompts(self, plan: PromptPlan, experiment: Experiment) -> Prepare:
        """The command that makes the generator prepare this arm's prompts, for which no samples are read."""
        bodies = self.bodies(Path(), Signature(self.model, (), ()), (1,), experiment)
        return msgspec.structs.replace(bodies, prompts=plan, body=self.request.body)

    def load(
        self, workload: Workload, samples: Path | None, *, turn: int = 0, arrivals_seed: int = 0, late_allowed: int = 0
    ) -> Open:
        """The command that opens a block on this arm with the prepared bodies; each turn begins with another body."""
        replay = replay_of(workload, self.transport)
        return Open(
            url=self.deployment.url,
            grpc_address=self.deployment.grpc_address,
            access=self.deployment.access,
            key=self.body_key,
            batch_size=workload.batch_size,
            length=workload.sequence_length,
            shape=prompt_shape(workload) if replay is None else None,
            replay=replay,
            first_body=turn * BODIES_PER_TURN,
            concurrency=workload.concurrency,
            requests=workload.requests,
            seconds=workload.seconds,
            max_seconds=workload.max_seconds,
            timeout_s=self.request_timeout_s,
            samples_path=None if samples is None else str(samples),
            arrivals=workload.arrivals,
            rate_per_s=workload.rate_per_s,
            arrivals_seed=arrivals_seed,
            replay_number=randbits(_REPLAY_BITS),
            latency_bound_ns=None if workload.latency_bound_ms is None else int(workload.latency_bound_ms * NS_PER_MS),
            late_allowed=late_allowed,
        )

    def failure_message(self) -> str:
        """The end of a sentence about a server that has died; empty while it runs."""
        sleep(0.05)  # a process that has just closed its sockets needs a moment to end
        failure = self.deployment.failure()
        return "" if failure is None else f"; the server {failure}"

    def record(self) -> ArmRecord:
        """The settings in effect according to the server. Raises `EndpointError` when it does not answer."""
        endpoint = self.endpoint
        server = endpoint.document("/v2") or {}
        config = endpoint.config(self.model)
        gpu_info: dict[str, object] | None = None
        with suppress(EndpointError):
            gpu_info = endpoint.document("/gpu-info")
        if server.get("name") == TRITON:
            in_effect = read_triton(config, steps := self._steps(config))
            version, precision = _text(server.get("version")), in_effect.get("precision")
            title = one_line(triton_title(config, version, precision, steps), _MOST_TITLE)
        elif not server and (release := endpoint.document("/version")) is not None:
            info: dict[str, object] | None = None
            steps = ()
            with suppress(EndpointError):  # it also lists the machine's packages, which takes it seconds
                patient = Endpoint(self.deployment.url, timeout_s=VLLM_INFO_SECONDS, access=self.deployment.access)
                info = patient.document("/server_info?config_format=json")
            server = {"name": "vllm", "version": release.get("version")}
            in_effect = read_vllm(info, _text(release.get("version")), self.deployment.artefact)
            title = _title(server, {"precision": in_effect.get("precision")})
        else:
            in_effect, steps = effective_settings(config), ()
            title = _title(server, in_effect)
        return ArmRecord(
            label=self.request.label,
            title=self.deployment.title or title,
            target=self.request.target,
            url=self.deployment.url,
            server_name=_text(server.get("name")),
            server_version=_text(server.get("version")),
            launched=self.deployment.launched,
            argv=self.deployment.argv,
            settings=self.request.settings,
            in_effect=in_effect,
            model_config=config,
            gpu_info=gpu_info,
            artefact=self.deployment.artefact,
            steps=steps,
        )

    def statistics(self) -> ServerStatistics:
        """Where the statistics of its model are, and of the models that it calls if it is an ensemble, which stays
        unknown if its configuration cannot be read."""
        try:
            steps = self._steps(self.endpoint.config(self.model))
        except EndpointError:
            steps = (StepRecord(model=self.model, config=None),)
        return ServerStatistics(self.deployment.url, self.deployment.access, self.model, steps)

    def _steps(self, config: Mapping[str, Any] | None) -> tuple[StepRecord, ...]:
        """The models that an ensemble calls, in order, those of an ensemble among them in its place. If there are too
        many, the last one stands for all further ones, with an unknown configuration."""
        steps: dict[tuple[str, str | None], StepRecord] = {}
        waiting, read = deque(step_calls(config).items()), 0
        while waiting and read <= _MOST_STEPS:
            (name, version), calls = waiting.popleft()
            step_config = None
            read += 1
            if read <= _MOST_STEPS:
                access = msgspec.structs.replace(self.deployment.access, version=version)
                with suppress(EndpointError):
                    step_config = Endpoint(self.deployment.url, access=access).config(name)
            if called := step_calls(step_config):
                waiting.extendleft((key, min(calls * n, _MOST_CALLS)) for key, n in reversed(called.items()))
            else:
                before = steps[name, version].calls if (name, version) in steps else 0
                steps[name, version] = StepRecord(model=name, version=version, calls=before + calls, config=step_config)
        return tuple(steps.values())


def replay_of(workload: Workload, transport: Transport) -> Replay | None:
    """The replay that a workload is, if it is one."""
    if workload.replayed is None:
        return None
    over: Transport = "http" if ROUTES[transport].shares_memory else transport
    return Replay(workload.replayed, over, workload.seconds, workload.speed)


def prompt_shape(workload: Workload) -> PromptShape | None:
    """The lengths of a workload's prompts and answers; None if it has none."""
    if workload.prompt_tokens is None or workload.output_tokens is None:
        return None
    return PromptShape(workload.prompt_tokens, workload.output_tokens, workload.shared_prefix)


def _title(server: Mapping[str, Any], in_effect: Mapping[str, object]) -> str:
    words = [server.get("name") or "unnamed server", server.get("version")]
    words += [in_effect.get(name) for name in ("engine", "precision")]
    return one_line(" ".join(str(word) for word in words if word), _MOST_TITLE)


def _text(value: object) -> str | None:
    return None if value is None else one_line(str(value), _MOST_TITLE)
