"""The context of a search for the fastest settings, from a model and this machine."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Literal

from servers.engines.factory import engines_here
from servers.engines.settings import EngineError, EngineSettings, engine_kind
from servers.language.engine import GENERATING_ENGINES, PRECISIONS, GenerationSettings, generating_environment
from servers.models.specification import ModelSpecification
from servers.options import defaults
from servers.options.search import SearchContext

LEFT_OUT = {"aotinductor": "its compiler takes minutes per model"}
"""Engines that are not tried, and why."""
MODES_LEFT_OUT = {"cpu": {}, "cuda": dict.fromkeys(("eager", "traced"), "it launches each kernel by itself")}
"""Modes of torch that are not tried, and why."""


def tensor_context(
    specification: ModelSpecification, settings: EngineSettings, cores: int, backends: Iterable[str] = ()
) -> tuple[SearchContext, list[str]]:
    """The context of a model of tensors whose engine has these settings, and what is not searched."""
    device = _device_kind(settings.device_here())
    here = engines_here(specification.executed, settings)
    engines = tuple(name for name in here["installed"] if name not in LEFT_OUT)
    kinds = {name: engine_kind(name) for name in (settings.kind, *engines, *backends) if name != "python"}
    modes = {name: kind.modes[device][1:] for name, kind in kinds.items() if settings.mode == defaults.MODE}
    left_out = MODES_LEFT_OUT[device] if "torch" in modes else {}
    if left_out:
        modes["torch"] = tuple(mode for mode in modes["torch"] if mode not in left_out)
    axis = specification.padded_axis
    context = SearchContext(
        device=device,
        cores=cores,
        payload=specification.payload,
        largest_axis=None if axis is None else axis.largest,
        engines=engines,
        modes=modes,
        precisions={name: kind.precisions[device] for name, kind in kinds.items()},
        backends=tuple(backends),
    )
    not_searched = [f"engine {name}: {why}" for name, why in LEFT_OUT.items() if name in here["installed"]]
    not_searched += [f"mode {mode} of torch: {why}" for mode, why in left_out.items()]
    for names, why in ((here["missing"], "not installed here"), (here["elsewhere"], "in another environment")):
        if names:
            not_searched.append(f"engine {' and '.join(names)}: {why}")
    return context, not_searched


def _device_kind(device: str) -> Literal["cpu", "cuda"]:
    return "cpu" if device == "cpu" else "cuda"


def plain_context(settings: EngineSettings, cores: int) -> SearchContext:
    """The context of a server that has no choice of engines and modes."""
    device = _device_kind(settings.device_here())
    return SearchContext(
        device=device, cores=cores, precisions={settings.kind: engine_kind(settings.kind).precisions[device]}
    )


def language_context(settings: GenerationSettings, cores: int, engines: Iterable[str] = ()) -> SearchContext:
    """The context of a language model whose engine has these settings, with the engines that a server tries."""
    return SearchContext(
        device=_device_kind(settings.device),
        cores=cores,
        language=True,
        engines=tuple(engines),
        precisions=dict.fromkeys((settings.engine, *engines), PRECISIONS),
    )


def generating_engines() -> tuple[str, ...]:
    """The engines of language models that are tried in this environment."""
    tried = []
    for name in GENERATING_ENGINES:
        with suppress(EngineError):
            if generating_environment(name) is None:
                tried.append(name)
    return tuple(tried)
