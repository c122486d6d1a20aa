"""One side of a comparison while it runs: its deployment and what its server says about itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loadgen.clients.endpoint import Endpoint, EndpointError
from loadgen.clients.transports import Door
from loadgen.deployment.interface import Deployment
from loadgen.records.run import ArmRecord, ArmRequest, Transport


@dataclass(frozen=True, slots=True)
class Arm:
    """A deployment together with what was asked of it."""

    request: ArmRequest
    deployment: Deployment
    model: str
    """Under the name of the payload's variant."""
    transport: Transport = "http"
    payload: str = "fp32"

    @property
    def endpoint(self) -> Endpoint:
        """For questions other than inference."""
        return Endpoint(self.deployment.url)

    @property
    def body_key(self) -> str:
        """Arms with the same key are sent the very same requests: a gRPC request holds the model's name."""
        return f"{self.model} {self.payload} {self.transport}"

    @property
    def door(self) -> Door:
        """For inference."""
        return Door(self.transport, self.deployment.url, self.model, self.deployment.grpc_address)

    def record(self) -> ArmRecord:
        """What is in effect, by the server's own documents. Raises `EndpointError` when it does not answer."""
        endpoint = self.endpoint
        server = endpoint.document("/v2") or {}
        config = endpoint.document(f"/v2/models/{self.model}/config")
        gpu_info = _gpu_info(endpoint)
        in_effect = effective_settings(config)
        return ArmRecord(
            label=self.request.label,
            title=self.deployment.title or _title(server, in_effect),
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


def effective_settings(config: Mapping[str, Any] | None) -> dict[str, object]:
    """Settings in effect from a model's configuration: its `parameters`, batching and instances. Only what is there."""
    if config is None:
        return {}
    settings: dict[str, object] = {}
    parameters = config.get("parameters")
    for name, value in (parameters if isinstance(parameters, Mapping) else {}).items():
        settings[name] = value.get("string_value") if isinstance(value, Mapping) else value
    for name in ("backend", "platform", "max_batch_size"):
        if config.get(name) not in (None, ""):
            settings[name] = config[name]
    batching = config.get("dynamic_batching")
    settings["dynamic_batching"] = isinstance(batching, Mapping)
    if isinstance(batching, Mapping):
        delay = batching.get("max_queue_delay_microseconds", 0)
        settings["max_queue_delay_us"] = int(delay) if str(delay).isdigit() else delay
    groups = config.get("instance_group")
    if isinstance(groups, list) and groups:
        settings["instances"] = sum(int(group.get("count", 1)) for group in groups if isinstance(group, Mapping))
    return settings


def _gpu_info(endpoint: Endpoint) -> dict[str, object] | None:
    try:
        return endpoint.document("/gpu-info")
    except EndpointError:
        return None


def _title(server: Mapping[str, Any], in_effect: Mapping[str, object]) -> str:
    words = [server.get("name") or "unnamed server", server.get("version")]
    words += [in_effect.get(name) for name in ("engine", "precision")]
    return " ".join(str(word) for word in words if word)


def _text(value: object) -> str | None:
    return None if value is None else str(value)
