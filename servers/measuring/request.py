"""One configuration of the engine matrix as `abserve engines` asks for it, and whether this machine can measure it.

Imports no library of an engine or a model.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any, BinaryIO

import msgspec

from servers.engines.batches import has_buckets
from servers.engines.factory import check_engine, environment_of
from servers.engines.interface import EngineError, first_line
from servers.engines.processors import cuda_index, nvidia_device_present, thread_count
from servers.engines.settings import EngineSettings, engine_kind, engine_names, precision_on
from servers.gpu.info import gpu_info
from servers.language.engine import (
    GENERATING_ENGINES,
    GENERATING_MODES,
    GENERATING_PRECISIONS,
    generating_environment,
    generation_precision,
)
from servers.language.specification import PREFIX, language_model
from servers.models.registry import UnknownModelError, get_variant
from servers.models.specification import ModelSpecification
from servers.models.weights import WeightsError, parse_weights
from servers.options import defaults

GRAPHS = ("graph", "compile")
"""Modes that need the shape of every batch in advance."""


SendAnswer = Callable[[object], None]


class MeasurementRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one engine process is to measure. `lengths` are sizes along the model's axis: (None,) for a model without an
    axis, empty for the model's default."""

    model: str
    engine: str
    batches: tuple[int, ...]
    lengths: tuple[int | None, ...] = ()
    payload: str = ""
    weights: str | None = None
    precision: str = defaults.PRECISION
    mode: str = defaults.MODE
    device: str = defaults.DEVICE
    threads: int = 0
    spinning: bool | None = None
    artefacts: str = defaults.ARTEFACTS
    references: str = ""
    """The file of the model's own answers; made if it is missing or another model's."""
    profile: bool = False
    first_calls: bool = False
    """Whether the first call of every shape comes before the engine is ready, so that processes that load side by side
    also compile side by side."""

    @property
    def generates(self) -> bool:
        """Whether the model is a language model, whose lengths are those of prompts."""
        return self.model.startswith(PREFIX)

    @property
    def on_cpu(self) -> bool:
        return resolved_device(self.device) == "cpu"

    def specification(self) -> ModelSpecification:
        """The variant that the engine executes. Raises `UnknownModelError`."""
        return get_variant(self.model, self.payload)

    def settings(self) -> EngineSettings:
        """The settings of the engine, which prepares these batches and lengths and no others if it can."""
        return EngineSettings(
            kind=self.engine,
            precision=self.precision,
            mode=self.mode,
            device=resolved_device(self.device),
            threads=self.threads,
            max_batch_size=max(self.batches),
            pad_to=tuple(sorted({length for length in self.lengths if length is not None})),
            buckets=tuple(sorted(set(self.batches))),
            spinning=self.spinning,
        )


class WorkerCommand(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A line on standard input: a cell to measure, or cells to profile, after which nothing can be measured."""

    batch: int = 0
    length: int | None = None
    seconds: float = 1.0
    energy: bool = True
    profile: tuple[tuple[int, int | None], ...] = ()


class RequestCheck(msgspec.Struct, frozen=True, kw_only=True):
    """The request with everything resolved, or the reason why it is refused."""

    reason: str | None = None
    wrong: bool = False
    """Whether the model or the weights do not exist, so that no engine can measure them."""
    precision: str = ""
    mode: str = ""
    device: str = ""
    threads: int | None = None
    """None on a GPU."""
    lengths: tuple[int | None, ...] = ()
    too_long: str | None = None
    """The lengths that the model does not take; the others are measured."""


def resolved_device(device: str) -> str:
    """cpu or cuda:N. `auto` is the first GPU if the kernel offers one, for every engine alike."""
    if device == "auto":
        return "cuda:0" if nvidia_device_present() else "cpu"
    index = cuda_index(device)
    return device if index is None else f"cuda:{index}"


def offers(device: str) -> dict[str, object]:
    """The device, the modes and the precisions by engine and kind of device, and this machine's GPUs. Raises
    `EngineError`."""
    EngineSettings(device=device).check_here()
    kinds = {name: engine_kind(name) for name in engine_names()}
    return {
        "device": resolved_device(device),
        "modes": {name: kind.modes for name, kind in kinds.items()},
        "precisions": {name: kind.precisions for name, kind in kinds.items()},
        "gpu": gpu_info(None),
    }


def checked(request: MeasurementRequest) -> RequestCheck:
    """Whether this machine can measure the request; loads no library."""
    try:
        specification = request.specification()
        parse_weights(request.weights, specification.default_weights)
    except (UnknownModelError, WeightsError) as exc:
        return RequestCheck(reason=str(exc), wrong=True)
    device = resolved_device(request.device)
    resolved: dict[str, Any] = {
        "precision": precision_on(device, request.precision),
        "device": device,
        "threads": thread_count(request.threads) if device == "cpu" else None,
    }
    try:
        settings = request.settings()
        check_engine(specification, settings)
        settings.check_here()
        mode = _mode(specification, settings)
        environment_of(request.engine)
        lengths, too_long = _lengths(specification, request.lengths)
    except EngineError as exc:
        return RequestCheck(reason=str(exc), **resolved)
    return RequestCheck(mode=mode, lengths=lengths, too_long=too_long, **resolved)


PROMPT_TOKENS = {"cpu": 32, "cuda": 128}
GENERATED_TOKENS = 64
"""Of each request, measured while all requests of a batch decode."""


def offers_of_generation(device: str) -> dict[str, object]:
    """What `offers` says, of the engines that generate tokens."""
    EngineSettings(device=device).check_here()
    return {
        "device": resolved_device(device),
        "modes": {name: GENERATING_MODES[name] for name in GENERATING_ENGINES},
        "precisions": dict.fromkeys(GENERATING_ENGINES, GENERATING_PRECISIONS),
        "gpu": gpu_info(None),
    }


def checked_generation(request: MeasurementRequest) -> RequestCheck:
    """Whether this machine can measure the engine on a language model; loads no library."""
    try:
        model = language_model(request.model, request.weights)
    except (UnknownModelError, WeightsError) as exc:
        return RequestCheck(reason=str(exc), wrong=True)
    device = resolved_device(request.device)
    place = "cpu" if device == "cpu" else "cuda"
    modes = GENERATING_MODES[request.engine][place]
    resolved: dict[str, Any] = {
        "precision": generation_precision(request.precision, device),
        "mode": modes[0] if request.mode == "auto" else request.mode,
        "device": device,
        "threads": thread_count(request.threads) if device == "cpu" else None,
    }
    longest = model.max_length - GENERATED_TOKENS - 1
    lengths = tuple(length or PROMPT_TOKENS[place] for length in request.lengths or (None,))
    accepted = tuple(dict.fromkeys(length for length in lengths if length <= longest))
    too_long = ", ".join(str(length) for length in lengths if length > longest)
    reason = None
    try:
        generating_environment(request.engine)
    except EngineError as exc:
        reason = str(exc)
    if reason is None and resolved["mode"] not in modes:
        reason = f"the engine {request.engine} has no mode {request.mode} here; choose from {', '.join(modes)}"
    elif reason is None and resolved["precision"] not in GENERATING_PRECISIONS[place]:
        offered = ", ".join(GENERATING_PRECISIONS[place])
        reason = f"language models are not measured in {request.precision} here; choose from {offered}"
    if too_long:
        too_long = f"prompts of {too_long} tokens: {model.title} takes at most {longest} here; leave them out"
        reason = reason or (None if accepted else too_long)
    return RequestCheck(reason=reason, lengths=accepted, too_long=too_long or None, **resolved)


def answer_commands(
    commands: BinaryIO, answer: SendAnswer, answer_to: Callable[[WorkerCommand], dict[str, object]]
) -> None:
    """Answer each line; an error is the answer to its line alone."""
    for line in commands:
        try:
            answer(answer_to(msgspec.json.decode(line, type=WorkerCommand)))
        except BrokenPipeError:
            raise
        except Exception as exc:  # noqa: BLE001  the other cells may still be measured, such as smaller ones
            traceback.print_exc()
            answer({"error": sentence_of(exc)})


def sentence_of(exc: Exception) -> str:
    """The first line of an error's message, with its kind where it is not abserve's own."""
    if type(exc).__module__.startswith("servers."):
        return first_line(exc)
    return f"{type(exc).__name__}: {first_line(exc)}"


def _mode(specification: ModelSpecification, settings: EngineSettings) -> str:
    """The mode in which the engine will execute; graphs need a model whose shapes are known."""
    place = "cpu" if settings.device == "cpu" else "cuda"
    mode = settings.mode_on(place)
    if mode not in GRAPHS or has_buckets(specification):
        return mode
    reason = f"{specification.name} has dimensions of any size that cannot be padded, which the mode {mode} needs"
    other = next((mode for mode in engine_kind(settings.kind).modes[place] if mode not in GRAPHS), None)
    if other is None:
        raise EngineError(f"{reason}; use the engine torch or onnxruntime")
    if settings.mode != "auto":
        raise EngineError(f"{reason}; use mode {other}")
    return other


def _lengths(
    specification: ModelSpecification, asked: tuple[int | None, ...]
) -> tuple[tuple[int | None, ...], str | None]:
    axis = specification.main_axis
    if axis is None:
        return (None,), None
    lengths = [axis.default if length is None else length for length in asked or (None,)]
    long = sorted({length for length in lengths if length > axis.largest})
    reason = None
    if long:
        listed = ", ".join(map(str, long))
        reason = f"{axis.name} {listed}: {specification.name} takes at most {axis.largest}; leave it out"
    accepted = tuple(dict.fromkeys(length for length in lengths if length <= axis.largest))
    if not accepted:
        raise EngineError(str(reason))
    return accepted, reason
