"""All settings of a matrix of engines: the keys of a matrix file, which are also the options of `abserve engines`.

To add one, add a field to `MatrixSettings`: the key, the option, the variable ABSERVE_ENGINES_… and the stored settings
follow from it. Lists are separated by commas on the command line.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from loadgen.experiment.settings import MAIN, MEASUREMENT, SEPARATED, TARGET, Settings, Sizes, in_panel, shared
from loadgen.records.payloads import DEFAULT_MODEL, kind_of_model
from loadgen.records.targets import Kind

ALL, AUTO, NO_BASELINE = "all", "auto", "none"
_ENGINES = {Kind.TENSORS: ("torch", "onnxruntime"), Kind.TOKENS: ("slots", "jax", "continuous")}
_BASELINES = {Kind.TENSORS: "torch/eager", Kind.TOKENS: "continuous/paged"}
OptionalNames = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], SEPARATED]
Names = Annotated[OptionalNames, Field(min_length=1)]


def _engine_and_mode(text: str) -> str:
    if text not in (NO_BASELINE, AUTO) and not re.fullmatch(r"[^/]+/[^/]+", text):
        raise ValueError(f"give ENGINE/MODE, as in torch/eager, or {NO_BASELINE}")
    return text


Threads = Annotated[tuple[Annotated[int, Field(ge=0, le=1024)], ...], SEPARATED, Field(min_length=1)]


_main, _target, _measurement = map(in_panel, (MAIN, TARGET, MEASUREMENT))


class MatrixSettings(Settings):
    """One matrix as asked for, with every default filled in."""

    models: Names = _main((DEFAULT_MODEL,), description="Models: SOURCE:NAME (see `abserve models`), files or folders.")
    engines: OptionalNames = _main(
        (),
        description="Engines, or all: every one that computes the model on the device (default: torch,onnxruntime; "
        "of language models slots,jax,continuous).",
    )
    precisions: Names = _main(
        (AUTO,),
        description="Precisions, such as fp32,fp16; auto: fp16 on a GPU, fp32 on a CPU; all: those of each engine.",
    )
    modes: Names = _main(
        (AUTO,), description="Modes, such as eager,traced; auto: the engine's first; all: those of each engine."
    )
    batches: Sizes = _main((), description="Batch sizes (default: 1,8,32,128 on a GPU, 1,4,8 on a CPU).")
    sequence_lengths: Sizes = _main(
        (),
        description="Lengths of the inputs of models with an axis of variable size (default: each model's); of the "
        "prompts of language models (default: 32, on a GPU 128).",
    )
    threads: Threads = _main((0,), description="Engine threads on a CPU; 0 uses all cores.")
    device: str = _main(AUTO, min_length=1, description="cpu, cuda:N or auto: a GPU if there is one.")
    payload: Literal["fp32", "uint8"] | None = _target(
        None, description="What models of images take: fp32 (the default) or uint8 pixels."
    )
    weights: str | None = _target(
        None, min_length=1, description="random:SEED, a pretrained tag or a checkpoint file (default: each model's)."
    )
    artefacts: str = _target(".artefacts", min_length=1, description="Folder of exported files; made if missing.")
    rounds: int = _measurement(5, ge=1, le=1000, description="Times that every configuration is measured.")
    seconds: float = _measurement(1.0, ge=0.001, le=600.0, description="Seconds per cell and round.")
    processes: Literal["fresh", "kept"] = _measurement(
        "fresh",
        description="fresh: a new process per round, so that the intervals include restarts; kept: one process per "
        "configuration for all rounds of a model, faster, and all of them hold memory at once.",
    )
    baseline: Annotated[str, AfterValidator(_engine_and_mode)] = _measurement(
        AUTO,
        description="ENGINE/MODE that speed-ups are computed over. It is measured too; none leaves it out (default: "
        "torch/eager, in fp32; of language models continuous/paged, in each precision).",
    )
    min_cosine: float = _measurement(
        0.99, ge=-1.0, le=1.0, description="A cell whose answers have a lower cosine with FP32 is not ranked."
    )
    min_top1: float = _measurement(
        0.99, ge=0.0, le=1.0, description="A cell that agrees with FP32 on fewer highest classes is not ranked."
    )
    seed: int = shared("seed", description="Seed for the order of configurations and cells.")
    strict: bool = shared("strict")
    profile: bool = _measurement(False, description="In the last round, also record the time per kernel.")

    @property
    def kind(self) -> Kind:
        """What its models give. Raises `ValueError` if not all give the same."""
        kinds = set(map(kind_of_model, self.models))
        if len(kinds) > 1:
            raise ValueError("language models and other models have a matrix each; give them in two commands")
        return kinds.pop()

    @property
    def chosen_engines(self) -> tuple[str, ...]:
        """The engines as asked for, or the default ones."""
        return self.engines or _ENGINES[self.kind]

    @property
    def chosen_baseline(self) -> str:
        return _BASELINES[self.kind] if self.baseline == AUTO else self.baseline
