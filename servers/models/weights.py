"""Where a model's weights come from: `random:SEED`, a pretrained tag or a local checkpoint file."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

CHECKPOINT_SUFFIXES = (".pt", ".pth", ".bin", ".safetensors", ".ckpt")


class WeightsError(Exception):
    """The weights that were asked for cannot be had; the message names what would work."""


@dataclass(frozen=True, slots=True)
class RandomWeights:
    """Initial weights of a seeded generator: right for speed and parity, meaningless as embeddings."""

    seed: int

    @property
    def label(self) -> str:
        """How outputs name these weights to a person."""
        return f"random weights (seed {self.seed})"

    @property
    def slug(self) -> str:
        """A short form that is safe in a file name."""
        return f"random-{self.seed}"


@dataclass(frozen=True, slots=True)
class PretrainedWeights:
    """A tag that the model's library knows how to download."""

    tag: str

    @property
    def label(self) -> str:
        """How outputs name these weights to a person."""
        return f"pretrained weights {self.tag}"

    @property
    def slug(self) -> str:
        """A short form that is safe in a file name."""
        return re.sub(r"[^A-Za-z0-9_.-]", "_", self.tag)


@dataclass(frozen=True, slots=True)
class CheckpointWeights:
    """A file on this machine."""

    path: Path

    @property
    def label(self) -> str:
        """How outputs name these weights to a person; the file's name alone, since results get published."""
        return f"checkpoint {self.path.name}"

    @property
    def slug(self) -> str:
        """A short form that is safe in a file name."""
        return "file-" + re.sub(r"[^A-Za-z0-9_.-]", "_", self.path.name)


WeightsSource = RandomWeights | PretrainedWeights | CheckpointWeights


def parse_weights(text: str) -> WeightsSource:
    """Read the `--weights` option. Raises `WeightsError` for a malformed seed or a missing file."""
    if text.startswith("random:") or text == "random":
        seed = text.partition(":")[2] or "0"
        if not seed.isdecimal():
            raise WeightsError(f"--weights {text}: the seed must be a whole number ≥ 0, as in random:0")
        return RandomWeights(int(seed))
    path = Path(text).expanduser()
    if path.suffix in CHECKPOINT_SUFFIXES or "/" in text:
        if not path.is_file():
            raise WeightsError(f"--weights {text}: no such file")
        return CheckpointWeights(path.resolve())
    if not text:
        raise WeightsError("--weights is empty: give random:SEED, a pretrained tag or a checkpoint file")
    return PretrainedWeights(text)
