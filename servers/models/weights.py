"""Where a model's weights come from: `random:SEED`, a pretrained tag or a local checkpoint file.

A tag or a file may be pinned: TAG@REVISION names the commit of the hub's repository, and @sha256:HEX after either is
the required hash of the file. Every launch pins unpinned weights (`pin`), so that all processes of a run load the same
bytes or refuse.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from servers.models.files import for_library, known_sha256, named_path, onnx_parts, user_path

if TYPE_CHECKING:
    import torch

CHECKPOINT_SUFFIXES = (".pt", ".pth", ".bin", ".safetensors", ".ckpt")
_KINDS_OF_FILE = {".onnx": "ONNX file", ".py": "module file"}
_COMMIT = re.compile(r"[0-9a-f]{40}")
_PINNED = re.compile(rf"(.*?)(?:@({_COMMIT.pattern}))?(?:@sha256:([0-9a-f]{{64}}))?", re.DOTALL)


_seeded_initialisation = threading.Lock()
"""torch has one global generator per process: models that load in parallel would draw from each other's sequence."""


class WeightsError(Exception):
    """The requested weights are not available; the message names the remedy."""


@dataclass(frozen=True, slots=True)
class RandomWeights:
    """Initial weights of a seeded generator: right for speed and parity, meaningless as embeddings. All sources have a
    `label` for people, a `slug` that is safe in a file name, and the `text` that `--weights` takes."""

    seed: int

    @property
    def label(self) -> str:
        return f"random weights (seed {self.seed})"

    @property
    def slug(self) -> str:
        return f"random-{self.seed}"

    @property
    def text(self) -> str:
        return f"random:{self.seed}"


@dataclass(frozen=True, slots=True)
class PretrainedWeights:
    """A tag that the model's library can download; `revision` is a commit, None for the newest."""

    tag: str
    revision: str | None = None
    sha256: str | None = None

    @property
    def label(self) -> str:
        """Names the weights by their content, whichever commit holds it."""
        return f"pretrained weights {self.tag}{_suffix(', SHA-256 ', self.sha256)}"

    @property
    def slug(self) -> str:
        return _safe(self.tag)

    @property
    def text(self) -> str:
        return f"{self.tag}{_suffix('@', self.revision)}{_suffix('@sha256:', self.sha256)}"


@dataclass(frozen=True, slots=True)
class CheckpointWeights:
    """A file on this machine: a state dict, an ONNX file, or the Python file that defines a module with its weights."""

    path: Path
    sha256: str | None = None

    @property
    def label(self) -> str:
        """For people: the file's name without its folder, since results get published."""
        kind = _KINDS_OF_FILE.get(self.path.suffix, "checkpoint")
        return f"{kind} {for_library(Path(self.path.name))}{_suffix(', SHA-256 ', self.sha256)}"

    @property
    def slug(self) -> str:
        return f"file-{_safe(for_library(Path(self.path.name)))}"

    @property
    def text(self) -> str:
        return f"{self.path}{_suffix('@sha256:', self.sha256)}"


WeightsSource = RandomWeights | PretrainedWeights | CheckpointWeights
FindPretrained = Callable[[PretrainedWeights], Path]
"""The file of a tag on this machine, downloaded when it is missing. Raises `WeightsError`."""


def parse_weights(option: str | None, default: str = "random:0") -> WeightsSource:
    """Read the `--weights` option; None means `default`, which is the model's. Raises `WeightsError` for a malformed
    seed or pin, or a missing file."""
    text = default if option is None else option
    if text.startswith("random:") or text == "random":
        seed = text.partition(":")[2] or "0"
        if not seed.isdecimal() or len(seed) > 19:  # torch takes 64 bits
            raise WeightsError(
                f"--weights {text}: the seed must be a whole number ≥ 0 of at most 19 digits, as in random:0"
            )
        return RandomWeights(int(seed))
    match = _PINNED.fullmatch(text)
    assert match is not None  # the first part takes any text
    name, revision, sha256 = match[1], match[2], match[3]
    path = user_path(name)
    if path.suffix in CHECKPOINT_SUFFIXES or "/" in name:
        if not path.is_file():
            close = get_close_matches(path.name, [file.name for file in path.parent.glob("*")], n=1)
            raise WeightsError(f"--weights {name}: no such file{f'; did you mean {close[0]}?' if close else ''}")
        named = named_path(path)
        if revision is not None:
            raise WeightsError(f"--weights {text}: a file has no revision; pin it with @sha256: and its hash")
        return CheckpointWeights(named if named.suffix else named.resolve(), sha256)
    if not name:
        raise WeightsError("--weights is empty: give random:SEED, a pretrained tag or a checkpoint file")
    if "@" in name:
        raise WeightsError(
            f"--weights {text}: after @ give a commit of 40 hexadecimal digits, or sha256: and 64 hexadecimal digits"
        )
    return PretrainedWeights(name, revision, sha256)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's generator in the block for random weights, which depend on the seed alone; restore it afterwards.
    torch 2.15 draws truncated normal values otherwise than 2.11, so that two environments would hold two models: here
    every version draws them as the older one."""
    import torch

    init: Any = torch.nn.init
    with _seeded_initialisation, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        of_torch, init.trunc_normal_ = init.trunc_normal_, _truncated_normal_
        try:
            yield
        finally:
            init.trunc_normal_ = of_torch


def _truncated_normal_(
    tensor: torch.Tensor,
    mean: float = 0.0,
    std: float = 1.0,
    a: float = -2.0,
    b: float = 2.0,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Fill the tensor with normal values between `a` and `b`: the inverse of the distribution at uniform values."""
    import torch

    low, high = ((1.0 + math.erf((bound - mean) / std / math.sqrt(2.0))) / 2.0 for bound in (a, b))
    with torch.no_grad():
        tensor.uniform_(2 * low - 1, 2 * high - 1, generator=generator)
        return tensor.erfinv_().mul_(std * math.sqrt(2.0)).add_(mean).clamp_(min=a, max=b)


def pin(source: WeightsSource, find_pretrained: FindPretrained | None) -> WeightsSource:
    """The weights with the SHA-256 of their file, which each process that loads them verifies. Reads the whole file of
    unpinned weights, and downloads it first if it is missing. Raises `WeightsError`."""
    if isinstance(source, RandomWeights) or source.sha256 is not None:
        return source
    if isinstance(source, CheckpointWeights):
        return replace(source, sha256=_hash(source.path, source.path.name))
    if find_pretrained is None:
        return source
    path = find_pretrained(source)
    commit = path.parent.name  # the hub's cache keeps a file under snapshots/COMMIT
    revision = commit if _COMMIT.fullmatch(commit) else source.revision
    return replace(source, revision=revision, sha256=_hash(path, source.tag))


def verify(path: Path, option: str, sha256: str | None) -> None:
    """Raises `WeightsError` if the file is not the pinned one; `option` begins the message."""
    if sha256 is not None and (actual := _hash(path, option)) != sha256:
        raise WeightsError(f"{option}: the file has SHA-256 {actual}, but the pin requires {sha256}")


def _hash(path: Path, name: str) -> str:
    """The SHA-256 of a file; of an ONNX file together with the data files that it names."""
    try:
        return known_sha256(*(onnx_parts(path) if path.suffix == ".onnx" else (path,)))
    except OSError as exc:
        which = Path(exc.filename or path)
        of_data = "" if which == path else f" {which.name} with its weights"
        raise WeightsError(f"{name}: cannot read the file{of_data} ({exc.strerror or exc})") from exc
    except Exception as exc:  # protobuf's DecodeError, of which each implementation has its own
        raise WeightsError(f"{name} is not an ONNX file that can be read") from exc


def _suffix(separator: str, value: str | None) -> str:
    return "" if value is None else f"{separator}{value}"


def _safe(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "_", name)
