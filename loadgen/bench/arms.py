"""One arm of a comparison while it runs: its deployment and what its server reports about itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import sleep
from typing import Any

import msgspec

from loadgen.bench.server_statistics import ServerStatistics
from loadgen.client.endpoint import Endpoint, EndpointError, Signature
from loadgen.client.transports import Target
from loadgen.documents import one_line
from loadgen.generator.messages import Open, Prepare
from loadgen.launch.interface import Deployment
from loadgen.records.model_config import effective_settings, read_triton, step_calls
from loadgen.records.run import REQUEST_TIMEOUT_S, ArmRecord, ArmRequest, Experiment, StepRecord, Transport, Workload
from loadgen.records.samples import NS_PER_MS

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
            timeout_s=self.request_timeout_s,
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
            triton = read_triton(config, _text(server.get("version")), steps := self._steps(config))
            in_effect, title = triton.settings, one_line(triton.title, _MOST_TITLE)
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
        found: dict[tuple[str, str | None], StepRecord] = {}
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
                before = found[name, version].calls if (name, version) in found else 0
                found[name, version] = StepRecord(model=name, version=version, calls=before + calls, config=step_config)
        return tuple(found.values())


def _title(server: Mapping[str, Any], in_effect: Mapping[str, object]) -> str:
    words = [server.get("name") or "unnamed server", server.get("version")]
    words += [in_effect.get(name) for name in ("engine", "precision")]
    return one_line(" ".join(str(word) for word in words if word), _MOST_TITLE)


def _text(value: object) -> str | None:
    return None if value is None else one_line(str(value), _MOST_TITLE)
