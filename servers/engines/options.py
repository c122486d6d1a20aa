"""Options that name a model and say how an engine executes it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic_settings import BaseSettings

from servers.engines.padding import pad_to_text, parse_pad_to
from servers.engines.settings import EngineSettings, parse_spinning
from servers.models.registry import DEFAULT_MODEL
from servers.options import defaults, search


def padded_sizes(largest: int | None) -> Sequence[str]:
    """Values of --pad-to for an axis of this largest size: none, and sizes that at most double an item."""
    if largest is None:
        return ()
    last = min(largest, 512)
    return ("none", pad_to_text((*(size for size in (32, 64, 128, 256) if size < last), last)))


PAD_TO = search.Searched(lambda here: padded_sizes(here.largest_axis))

PadTo = Annotated[
    str,
    AfterValidator(lambda text: pad_to_text(parse_pad_to(text))),
    Field(
        title="Batching",
        description="Sizes of the model's variable axis, such as 32,64,128: requests of any size share a batch padded "
        "to one of them; empty: only requests of equal shapes do.",
    ),
    PAD_TO,
]


class ModelOptions(BaseSettings):
    """The model, its weights and the folder of exported files. A field's `title` is its group in the help."""

    model: str = Field(DEFAULT_MODEL, title="Model", description="SOURCE:NAME, a path, or a registered name.")
    weights: str | None = Field(
        None, title="Model", description="random:SEED, a pretrained tag or a checkpoint file; default: the model's."
    )
    artefacts: Path = Field(
        Path(defaults.ARTEFACTS), title="Output", description="Folder of exported files; created if missing."
    )


class EngineOptions(ModelOptions):
    """The engine and how it executes the model."""

    engine: str = Field("torch", title="Engine", description=f"{defaults.ENGINES}.")
    precision: Annotated[str, search.PRECISION] = Field(
        defaults.PRECISION, title="Engine", description=defaults.PRECISIONS
    )
    mode: Annotated[str, search.MODE] = Field(
        defaults.MODE, title="Engine", description="auto or a mode of the engine."
    )
    device: str = Field(
        defaults.DEVICE, title="Engine", description="auto, cpu or cuda:N; auto uses a GPU if there is one."
    )
    threads: Annotated[int, search.THREADS] = Field(
        0, ge=0, title="Engine", description="Intra-op threads on the CPU; 0 uses all cores."
    )
    spinning: Annotated[Literal["auto", "on", "off"], search.SPINNING] = Field(
        "auto", title="Engine", description=defaults.SPINNING
    )

    def engine_settings(self, max_batch_size: int) -> EngineSettings:
        """The options as an engine takes them."""
        return EngineSettings(
            self.engine,
            self.precision,
            self.mode,
            self.device,
            self.threads,
            max_batch_size,
            spinning=parse_spinning(self.spinning),
        )
