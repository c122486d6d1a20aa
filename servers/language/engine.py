"""The interface of an engine that generates tokens for many requests at once, and the choice of one.

Life: construct (cheap) → `load` → `warm_up` → `add`, `cancel` and `step`, any number of times → `close`. Every method
is called from one thread. Tokens are chosen greedily: the token with the largest logit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from servers.engines.factory import interpreter_with
from servers.engines.processors import begin_gpu
from servers.engines.settings import EngineError
from servers.models.specification import choose_from
from servers.protocol.errors import InvalidRequestError
from servers.protocol.tensors import TensorSpec

GENERATING_ENGINES: Mapping[str, str] = {
    "slots": "servers.language.slots:SlotsEngine",
    "continuous": "servers.language.continuous:ContinuousEngine",
    "jax": "servers.language.jax_engine:JaxGeneratingEngine",
}
"""By name, "module:class" of each engine; the class takes the specification and the settings."""
GENERATING_MODES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "slots": {"cpu": ("eager",), "cuda": ("graphs", "eager")},
    "continuous": {"cpu": ("paged",), "cuda": ("paged",)},
    "jax": {"cpu": ("jit",), "cuda": ("jit",)},
}
"""Of the engines that generate tokens, by kind of device."""
GENERATING_PRECISIONS = {"cpu": ("fp32", "bf16"), "cuda": ("bf16", "fp32", "fp16")}
DEFAULT_ENGINE = "slots"
LIBRARIES: Mapping[str, tuple[tuple[str, ...], str]] = {
    "jax": (("jax",), "pip install 'jax[cuda13]', or pip install jax for a CPU")
}
"""By engine, what it needs beside torch and transformers, and the command that installs it."""
GENERATE_INPUTS = (
    TensorSpec("input_ids", "INT32", (-1,)),
    TensorSpec("max_tokens", "INT32", (1,)),
    TensorSpec("ignore_eos", "BOOL", (1,), optional=True),
)
GENERATE_OUTPUTS = (
    TensorSpec("token_ids", "INT32", (-1,)),
    TensorSpec("prompt_tokens", "INT32", (1,)),
    TensorSpec("finish_reason", "BYTES", (1,)),
)
"""The tensors of a language model in Triton's generate extension, without a batch dimension."""
MAX_LENGTH = 4096
"""Where no length is asked for: a model may allow far more, but memory is reserved for every slot."""
SLOTS = {"cpu": 16, "cuda": 64}
"""Where no number of slots is asked for."""
PRECISIONS = ("fp32", "bf16", "fp16")


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt. `number` is the caller's, and no two requests that are not finished share it."""

    number: int
    prompt: Sequence[int]
    max_tokens: int
    ignore_eos: bool = True


class Emission(NamedTuple):
    """The next tokens of one request; with `finish`, its last ones. "length": it has `max_tokens` tokens. "stop": the
    last token is one of `GeneratingEngine.eos`. "error": the request failed, `message` is one sentence for the client,
    and there are no tokens in this emission."""

    number: int
    tokens: tuple[int, ...]
    finish: Literal["length", "stop", "error"] | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    """The requested settings, in which 0 and "auto" leave a value to the engine; see `GeneratingEngine.settings`."""

    engine: str = DEFAULT_ENGINE
    device: str = "auto"  # auto, cpu or cuda:N
    precision: str = "auto"  # fp32, bf16 or fp16; auto: BF16 on a GPU, FP32 on a CPU
    slots: int = 0
    """How many requests are generated at once."""
    max_length: int = 0
    """The most tokens of one prompt and its answer together."""
    prefill_chunk: int = 0
    """The most tokens of prompts that one step takes beside the running answers."""
    graphs: bool = True
    """Whether a GPU replays CUDA graphs; without them each kernel is launched by itself."""
    threads: int = 0
    """Threads of one operator on the CPU."""

    def check(self) -> None:
        """Raise `EngineError` for a value that is wrong on every machine."""
        if self.engine not in GENERATING_ENGINES:
            raise EngineError(
                f"no engine {self.engine!r} generates tokens; {choose_from(self.engine, tuple(GENERATING_ENGINES))}"
            )
        if self.precision not in ("auto", *PRECISIONS):
            raise EngineError(
                f"precision {self.precision!r} is not offered for language models; "
                f"{choose_from(self.precision, ('auto', *PRECISIONS))}"
            )
        for name in ("slots", "max_length", "prefill_chunk", "threads"):
            if (value := getattr(self, name)) < 0:
                raise EngineError(f"{name} {value}: it must be 0 (the engine chooses) or more")


class GeneratingEngine(Protocol):
    """Generates tokens for up to `slots` requests at once; more wait inside, in the order in which they were added."""

    @property
    def slots(self) -> int:
        """How many requests are generated at once."""

    @property
    def max_length(self) -> int:
        """The most tokens of one prompt and its answer together."""

    @property
    def vocabulary(self) -> int:
        """Token ids are at least 0 and below this."""

    @property
    def eos(self) -> tuple[int, ...]:
        """The ids that end an answer unless the request says `ignore_eos`."""

    @property
    def active(self) -> int:
        """How many requests hold a slot."""

    @property
    def waiting(self) -> int:
        """How many requests wait for a slot."""

    def settings(self) -> dict[str, object]:
        """The settings in effect, for `/v2/models/M/config` and the fairness check; known after `load`."""

    def load(self) -> None:
        """Read or make the weights. Raises `EngineError` with the remedy in the message."""

    def warm_up(self) -> None:
        """Execute what the first requests would otherwise wait for: allocations, compilation, CUDA graphs."""

    def add(self, request: GenerationRequest) -> None:
        """Queue a request. Raises `InvalidRequestError` if it can never run (see `check_request`)."""

    def cancel(self, number: int) -> None:
        """Free the request's slot before the next step; nothing more is emitted for it. Unknown numbers are ignored."""

    def step(self) -> Sequence[Emission]:
        """One forward pass, and the tokens that have reached the host since the last step; () if idle. Raises
        `EngineError` if the engine cannot go on; then only `close` is left."""

    def close(self) -> None:
        """Release the memory; the unfinished requests are forgotten."""


def check_request(prompt: Sequence[int], max_tokens: int, max_length: int, vocabulary: int) -> None:
    """Raise `InvalidRequestError` for a request that can never run within these limits of an engine."""
    if not prompt:
        raise InvalidRequestError("the prompt is empty; send at least one token id")
    if max_tokens < 1:
        raise InvalidRequestError(f"max_tokens is {max_tokens}; it must be at least 1")
    if len(prompt) + max_tokens > max_length:
        raise InvalidRequestError(
            f"the prompt has {len(prompt)} tokens and max_tokens is {max_tokens}; together they must not exceed the "
            f"maximum length of {max_length}"
        )
    if not 0 <= min(prompt) <= max(prompt) < vocabulary:
        wrong = next(token for token in prompt if not 0 <= token < vocabulary)
        raise InvalidRequestError(f"token id {wrong} is not in the vocabulary; ids are from 0 to {vocabulary - 1}")


def generation_precision(requested: str, device: str) -> str:
    """The precision to compute in on cpu or cuda:N: "auto" is BF16 on a GPU and FP32 on a CPU."""
    if requested != "auto":
        return requested
    return "fp32" if device == "cpu" else "bf16"


def generating_environment(engine: str) -> Path | None:
    """The interpreter that has the libraries of a generating engine; None: this one. Raises `EngineError` with the
    command that installs them where no environment has them."""
    return interpreter_with(engine, *LIBRARIES.get(engine, (("torch",), "pip install 'abserve[servers]'")))


def make_engine(specification: Any, settings: GenerationSettings) -> GeneratingEngine:
    """The engine that the settings name, not yet loaded. Raises `EngineError` for settings it cannot honour. Imports
    the engine's libraries, which takes seconds."""
    settings.check()
    if generating_environment(settings.engine) is not None:
        raise EngineError(
            f"the {settings.engine} engine needs libraries that another environment has; use abserve serve native"
        )
    begin_gpu(settings.device)
    module_name, _, class_name = GENERATING_ENGINES[settings.engine].partition(":")
    try:
        engine_class = getattr(import_module(module_name), class_name)
    except ImportError as exc:
        raise EngineError(f"the engine {settings.engine} needs a library that is not installed: {exc}") from exc
    engine: GeneratingEngine = engine_class(specification, settings)
    return engine
