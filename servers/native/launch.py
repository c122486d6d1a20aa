"""How the native server's process is started: its options, checked, and its arguments."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from servers.engines.factory import KINDS_WITH_FILE
from servers.launch_plan import LaunchPlan, host_in_url
from servers.models.registry import UnknownModelError, get_variants
from servers.models.specification import ModelSpecification
from servers.models.weights import WeightsError, WeightsSource, parse_weights, pin
from servers.native.listener import ListenerError, bind, check_free
from servers.native.settings import NativeSettings, to_argv
from servers.options import validation_sentence


class LaunchError(Exception):
    """The server cannot be started as asked; the message is one sentence with the remedy."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Checked options: the settings are valid and the port was free a moment ago."""

    settings: NativeSettings
    specifications: tuple[ModelSpecification, ...]
    weights: WeightsSource

    @property
    def needs_artefacts(self) -> tuple[ModelSpecification, ...]:
        """What the engine executes an exported file of; JPEG and UINT8 share theirs."""
        if self.settings.engine not in KINDS_WITH_FILE:
            return ()
        return tuple({s.executed.name: s.executed for s in self.specifications}.values())

    def plan(self, artefacts: Mapping[str, tuple[Path, dict[str, object] | None]]) -> LaunchPlan:
        """How to start the process; `artefacts` has a file for each name in `needs_artefacts`, and its manifest."""
        paths = {s.payload: artefacts[s.name][0] for s in self.needs_artefacts}
        settings = self.settings.model_copy(
            update={"artefact": paths.get("fp32"), "artefact_uint8": paths.get("uint8")}
        )
        first = self.specifications[0]
        host = host_in_url(settings.host)
        url = f"http://{host}:{settings.http_port}"
        return LaunchPlan(
            argv=(sys.executable, "-m", "servers.native", *to_argv(settings)),
            env={},
            http_url=url,
            grpc_address=f"{host}:{settings.grpc_port}" if settings.grpc_port else None,
            metrics_url=f"{url}/metrics",
            model=first.name,
            title=f"native {settings.engine} {settings.precision}",
            artefact=artefacts[first.executed.name][1] if artefacts else None,
        )


def check(options: Mapping[str, Any]) -> Launch:
    """Raises `LaunchError` at the first option that cannot be honoured."""
    try:
        settings = NativeSettings(**options)
        specifications = get_variants(settings.model, settings.payloads)
        weights = pin(parse_weights(settings.weights), specifications[0].find_pretrained)
        bind(settings.host, settings.http_port).close()
        check_free(settings.host, settings.grpc_port, "--grpc-port")
    except ValidationError as exc:
        raise LaunchError(validation_sentence(exc)) from exc
    except (UnknownModelError, WeightsError, ListenerError) as exc:
        raise LaunchError(str(exc)) from exc
    return Launch(settings.model_copy(update={"weights": weights.text}), specifications, weights)
