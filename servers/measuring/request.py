"""One configuration of the engine matrix as `abserve engines` asks for it, and whether this machine can measure it.

Imports no library of an engine or a model.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import BinaryIO

import msgspec

from servers.engines.batches import executed_mode
from servers.engines.factory import check_engine, environment_of
from servers.engines.interface import EngineError
from servers.engines.processors import thread_count
from servers.engines.settings import EngineSettings, engine_kind, engine_names, precision_on, resolved_device
from servers.gpu.info import gpu_info
from servers.language.engine import (
    GENERATING_ENGINES,
    GENERATING_MODES,
    GENERATING_PRECISIONS,
    generating_environment,
    generation_precision,
)
from servers.language.specification import PREFIX, LanguageModel, language_model
from servers.models.registry import UnknownModelError, get_variant
from servers.models.specification import ModelSpecification, reason_of
from servers.models.weights import WeightsError, parse_weights
from servers.options import defaults

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
    def environment(self) -> Path | None:
        """The interpreter that has the engine's libraries; None: this one. Raises `EngineError` where none has."""
        return generating_environment(self.engine) if self.generates else environment_of(self.engine)

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


def offers(device: str, *, generating: bool = False) -> dict[str, object]:
    """The device, the modes and the precisions by engine and kind of device, and this machine's GPUs; of the engines
    that generate tokens if `generating`. Raises `EngineError`."""
    EngineSettings(device=device).check_here()
    modes, precisions = GENERATING_MODES, dict.fromkeys(GENERATING_ENGINES, GENERATING_PRECISIONS)
    if not generating:
        kinds = {name: engine_kind(name) for name in engine_names()}
        modes = {name: kind.modes for name, kind in kinds.items()}
        precisions = {name: dict(kind.precisions) for name, kind in kinds.items()}
    return {"device": resolved_device(device), "modes": modes, "precisions": precisions, "gpu": gpu_info(None)}


PROMPT_TOKENS = {"cpu": 32, "cuda": 128}
GENERATED_TOKENS = 64
"""Of each request, measured while all requests of a batch decode."""
Lengths = tuple[int | None, ...]


def checked(request: MeasurementRequest) -> RequestCheck:
    """Whether this machine can measure the request; loads no library."""
    device = resolved_device(request.device)
    try:
        if request.generates:
            model: LanguageModel | ModelSpecification = language_model(request.model, request.weights)
            precision = generation_precision(request.precision, device)
        else:
            model, precision = request.specification(), precision_on(device, request.precision)
            parse_weights(request.weights, model.default_weights)
    except (UnknownModelError, WeightsError) as exc:
        return RequestCheck(reason=str(exc), wrong=True)
    threads = thread_count(request.threads) if device == "cpu" else None
    resolved = partial(RequestCheck, precision=precision, device=device, threads=threads)
    try:
        if isinstance(model, LanguageModel):
            mode, lengths, too_long = _of_tokens(model, request, device, precision)
        else:
            mode, lengths, too_long = _of_tensors(model, request)
    except EngineError as exc:
        return resolved(reason=str(exc))
    return resolved(mode=mode, lengths=lengths, too_long=too_long)


def _of_tensors(specification: ModelSpecification, request: MeasurementRequest) -> tuple[str, Lengths, str | None]:
    """The mode in which the engine executes, the lengths, and which are too long. Raises `EngineError`."""
    settings, axis = request.settings(), specification.main_axis
    check_engine(specification, settings)
    settings.check_here()
    mode, _ = executed_mode(specification, settings, "cpu" if settings.device == "cpu" else "cuda")
    _ = request.environment
    if axis is None:
        return mode, (None,), None
    about = f"{specification.name} takes at most {axis.largest}; leave it out"
    return mode, *_lengths(request.lengths, axis.default, axis.largest, f"{axis.name} ", f": {about}")


def _of_tokens(
    model: LanguageModel, request: MeasurementRequest, device: str, precision: str
) -> tuple[str, Lengths, str | None]:
    """As `_of_tensors`, of an engine that generates tokens."""
    place = "cpu" if device == "cpu" else "cuda"
    _ = request.environment
    modes, precisions = GENERATING_MODES[request.engine][place], GENERATING_PRECISIONS[place]
    mode = modes[0] if request.mode == "auto" else request.mode
    if mode not in modes:
        raise EngineError(
            f"the engine {request.engine} has no mode {request.mode} here; choose from {', '.join(modes)}"
        )
    if precision not in precisions:
        raise EngineError(
            f"language models are not measured in {request.precision} here; choose from {', '.join(precisions)}"
        )
    longest = model.max_length - GENERATED_TOKENS - 1
    about = f" tokens: {model.title} takes at most {longest} here; leave them out"
    return mode, *_lengths(request.lengths, PROMPT_TOKENS[place], longest, "prompts of ", about)


def _lengths(asked: Lengths, default: int, longest: int, before: str, after: str) -> tuple[Lengths, str | None]:
    """The lengths that a model takes, and a sentence about those that it does not, which stand between the two texts,
    if there are some. Raises `EngineError` with it if none is left."""
    lengths = dict.fromkeys(default if length is None else length for length in asked or (None,))
    accepted = tuple(length for length in lengths if length <= longest)
    too_long = ", ".join(str(length) for length in lengths if length > longest)
    if not accepted:
        raise EngineError(f"{before}{too_long}{after}")
    return accepted, f"{before}{too_long}{after}" if too_long else None


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
    name, reason = type(exc).__name__, reason_of(exc)
    return reason if type(exc).__module__.startswith("servers.") or reason == name else f"{name}: {reason}"
