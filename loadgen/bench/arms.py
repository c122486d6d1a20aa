"""One arm of a comparison while it runs: its deployment and what its server reports about itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import sleep
from typing import Any

import msgspec

from loadgen.documents import one_line
from loadgen.generator.messages import Open, Prepare
from loadgen.records.model_config import effective_settings, listed, mapping, read_triton, step_names, whole
from loadgen.records.run import ArmRecord, ArmRequest, Experiment, StageTotals, Transport, Workload
from loadgen.records.samples import NS_PER_MS
from loadgen.targets.interface import Deployment
from loadgen.transport.endpoint import Endpoint, EndpointError, Signature
from loadgen.transport.transports import Target

REQUEST_TIMEOUT_S = 60.0
BODIES_PER_TURN = 13
"""Odd, so that successive rounds of a workload begin with each of its 4, 8, 16 or 32 bodies."""
_MOST_STEPS = 16
_MOST_TITLE = 120
TRITON = "triton"
"""The name that a Triton server gives itself."""
OWN_STAGES = "abserve_stages"
"""The native server's own object in its statistics: receive, decode, queue, compute, encode."""

_MOST_NS = 2**53
"""104 days in nanoseconds."""

Statistics = Mapping[str, Any]


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

    @property
    def endpoint(self) -> Endpoint:
        """The endpoint for all requests except inference."""
        return Endpoint(self.deployment.url, access=self.deployment.access)

    @property
    def body_key(self) -> str:
        """Arms with the same key get the same requests and owe the same answers; a gRPC request contains the model's
        name and version."""
        return f"{self.model} {self.payload} {self.transport} {self.deployment.access.version} {self.signature}"

    @property
    def target(self) -> Target:
        """The target of inference requests."""
        deployment = self.deployment
        return Target(self.transport, deployment.url, self.model, deployment.grpc_address, deployment.access)

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
            transport=self.transport,
            key=self.body_key,
        )

    def load(
        self, workload: Workload, samples: Path | None, *, turn: int = 0, arrivals_seed: int = 0, late_allowed: int = 0
    ) -> Open:
        """The command that opens a block on this arm with the prepared bodies; each turn begins with another body."""
        return Open(
            url=self.deployment.url,
            grpc_address=self.deployment.grpc_address,
            access=self.deployment.access,
            key=self.body_key,
            batch_size=workload.batch_size,
            length=workload.sequence_length,
            first_body=turn * BODIES_PER_TURN,
            concurrency=workload.concurrency,
            requests=workload.requests,
            seconds=workload.seconds,
            max_seconds=workload.max_seconds,
            timeout_s=REQUEST_TIMEOUT_S,
            samples_path=None if samples is None else str(samples),
            arrivals=workload.arrivals,
            rate_per_s=workload.rate_per_s,
            arrivals_seed=arrivals_seed,
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
            triton = read_triton(config, _text(server.get("version")), self._step_configs(config))
            in_effect, title = triton.settings, one_line(triton.title, _MOST_TITLE)
        else:
            in_effect = effective_settings(config)
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
        )

    def _step_configs(self, config: Mapping[str, Any] | None) -> Sequence[Mapping[str, Any]]:
        """The configurations of an ensemble's models, as far as the server has them."""
        access = msgspec.structs.replace(self.deployment.access, version=None)
        endpoint, found = Endpoint(self.deployment.url, access=access), []
        for name in step_names(config)[:_MOST_STEPS]:
            with suppress(EndpointError):
                found.append(endpoint.config(name) or {})
        return found


def _title(server: Mapping[str, Any], in_effect: Mapping[str, object]) -> str:
    words = [server.get("name") or "unnamed server", server.get("version")]
    words += [in_effect.get(name) for name in ("engine", "precision")]
    return one_line(" ".join(str(word) for word in words if word), _MOST_TITLE)


def _text(value: object) -> str | None:
    return None if value is None else one_line(str(value), _MOST_TITLE)


def requests_seen(statistics: Statistics) -> int:
    """Requests that a server has finished, good or bad."""
    counts = (_value(statistics, "inference_stats", outcome, "count") for outcome in ("success", "fail"))
    return sum(count or 0 for count in counts)


def stage_totals(before: Statistics, after: Statistics) -> StageTotals | None:
    """The growth between two snapshots (`model_stats[0]` each). A counter that the server does not report is None; one
    that it reports since its first use was 0 before. None when a number is impossible for a block of load."""
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
        batches={size: count for size, count in sorted(batches.items()) if count},
    )
    return totals if all(abs(difference) < _MOST_NS for difference in differences) else None


def _batches(statistics: Statistics) -> dict[int, int]:
    found: dict[int, int] = {}
    for entry in map(mapping, listed(statistics.get("batch_stats"))):
        size = whole(entry.get("batch_size"))
        if size is not None:
            found[size] = _value(entry, "compute_infer", "count") or 0
    return found


def _value(statistics: Statistics, *path: str) -> int | None:
    value: Any = statistics
    for key in path:
        value = mapping(value).get(key)
    return whole(value)
