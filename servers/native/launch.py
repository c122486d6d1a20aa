"""How the native server's process is started: its options, checked, and its arguments."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from servers.launch_plan import LaunchPlan
from servers.models.registry import UnknownModelError, get_specification
from servers.models.specification import ModelSpecification
from servers.models.weights import WeightsError, WeightsSource, parse_weights
from servers.native.arguments import to_argv, validation_sentence
from servers.native.listener import ListenerError, bind
from servers.native.settings import NativeSettings

ENGINES_WITH_ARTEFACT = ("onnxruntime",)


class LaunchError(Exception):
    """The server cannot be started as asked; the message is one sentence with the remedy."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Checked options: the settings are valid and the port was free a moment ago."""

    settings: NativeSettings
    specification: ModelSpecification
    weights: WeightsSource

    @property
    def needs_artefact(self) -> bool:
        """Whether the engine executes an exported file."""
        return self.settings.engine in ENGINES_WITH_ARTEFACT

    def plan(self, artefact: Path | None, manifest: dict[str, object] | None) -> LaunchPlan:
        """How to start the process; `manifest` describes `artefact`."""
        settings = self.settings.model_copy(update={"artefact": artefact})
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        url = f"http://{host}:{settings.http_port}"
        return LaunchPlan(
            argv=(sys.executable, "-m", "servers.native", *to_argv(settings)),
            env={},
            http_url=url,
            grpc_address=None,
            metrics_url=f"{url}/metrics",
            model=self.specification.name,
            title=f"native {settings.engine} {settings.precision}",
            artefact=manifest,
        )


def check(options: Mapping[str, Any]) -> Launch:
    """Raises `LaunchError` at the first option that cannot be honoured."""
    try:
        settings = NativeSettings(**options)
        specification = get_specification(settings.model)
        weights = parse_weights(settings.weights)
        bind(settings.host, settings.http_port).close()
    except ValidationError as exc:
        raise LaunchError(validation_sentence(exc)) from exc
    except (UnknownModelError, WeightsError, ListenerError) as exc:
        raise LaunchError(str(exc)) from exc
    return Launch(settings, specification, weights)
