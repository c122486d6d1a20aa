"""The weights of a language model: random ones that anybody can draw again, or safetensors files with their SHA-256.

Random weights are a pure function of the seed, the tensor's name and the place in it: integer arithmetic gives the same
numbers on a CPU and on a GPU, in every release of torch, and for each tensor alone. They are uniform with a standard
deviation of 1.3/√hidden. With the usual 0.02 a model repeats one token whatever the prompt, so that wrong answers would
look right. Norms and biases are not exactly 1 and 0 either: an engine that leaves one out must give other answers.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from servers.models.files import known_sha256, named_path, user_path
from servers.models.weights import CheckpointWeights, RandomWeights, WeightsError, parse_weights

if TYPE_CHECKING:
    import torch

FORMAT, MIXTURE_FORMAT = "abserve random weights 1", "abserve random weights 2"
"""Of models without and with experts; changes with the numbers that are drawn, and thereby the digest."""
WEIGHT_SCALE = 1.3
EXPERT_SCALE = 0.35 * WEIGHT_SCALE
"""Of the experts' last matrix. Rounding exchanges experts, which changes the input of the next router. With the usual
scale this grows from layer to layer: 24 layers with 32 experts in BF16 (hidden size 256) choose another token than in
FP32 at 96 of 100 places, as far below the best as 2.1 on average, so that right engines look wrong. With this scale
they do at 36, by 0.12; a token chosen at random is 4.7 below."""
ROUTER_SCALE = 4 * WEIGHT_SCALE
"""It does not spread tokens over more experts: 16 tokens choose 27.5 of 32, with the usual scale 27.3. But answers
repeat less: 71 instead of 57 of 100 tokens are different."""
NORM_DEVIATION = BIAS_DEVIATION = 0.1
SINK_DEVIATION = 1.0
_ROUTERS = ("router.weight", ".gate.weight")
_EXPERT_ENDS = ".experts.down_proj"
_AFTER_GELU = ".mlp.c_proj.weight"
"""[inputs, outputs] of GPT-2, whose second half of the inputs has the first half's weights with the other sign: the
mean of an activation without a gate is not 0, and layer by layer it would drown what differs between prompts."""
_ENDING = ".safetensors"
_CHUNK_ON_CPU, _CHUNK_ON_GPU = 2**18, 2**26
"""Elements drawn at once: on the CPU what its cache holds."""


@dataclass(frozen=True, slots=True)
class FileWeights(CheckpointWeights):
    """A folder with safetensors files, or one such file; `sha256` is the required hash of all files."""

    @property
    def label(self) -> str:
        """For people: without the folders above, since results get published."""
        return f"weights of {self.path.name}" + ("" if self.sha256 is None else f", SHA-256 {self.sha256}")


LanguageWeights = RandomWeights | FileWeights


def has_weights(folder: Path) -> bool:
    """Whether a model's folder holds weights. Raises `WeightsError` if they are of a kind that is not read."""
    if any(folder.glob(f"*{_ENDING}")):
        return True
    if any(folder.glob("pytorch_model*.bin")):
        raise WeightsError(
            f"{folder.name}: its weights are pickles, which abserve does not read; save them with "
            "model.save_pretrained(DIR), which writes safetensors, or give --weights random:0"
        )
    return False


def parse_language_weights(option: str | None, default: LanguageWeights) -> LanguageWeights:
    """Read `--weights`. Raises `WeightsError` for a malformed seed or pin, or missing files."""
    if option is None:
        return default
    path, _, pin = option.partition("@sha256:")
    folder = user_path(path)
    if path.partition(":")[0] != "random" and folder.is_dir():
        if not has_weights(folder):
            raise WeightsError(f"--weights {folder.name}: the folder has no .safetensors file")
        if pin and not (len(pin) == 64 and set(pin) <= set("0123456789abcdef")):
            raise WeightsError(f"--weights {option}: after @sha256: give 64 hexadecimal digits")
        return FileWeights(named_path(folder), pin or None)
    source = parse_weights(option)
    if isinstance(source, RandomWeights):
        return source
    file = getattr(source, "path", None)
    if file is None or file.suffix != _ENDING:
        raise WeightsError(f"--weights {option}: give random:SEED, a folder, or a .safetensors file")
    return FileWeights(file, source.sha256)


def weights_files(weights: FileWeights) -> tuple[Path, ...]:
    """The safetensors files, in the order in which they are hashed."""
    return (weights.path,) if weights.path.is_file() else tuple(sorted(weights.path.glob(f"*{_ENDING}")))


def weights_sha256(weights: LanguageWeights, fields: Mapping[str, Any]) -> str:
    """The digest that names the weights, equal wherever they are equal. Of files the SHA-256 of their content. Random
    weights are determined by the seed and the configuration, so theirs is that of these two. Raises `WeightsError` if
    the files are not the pinned ones."""
    if isinstance(weights, RandomWeights):
        drawn = MIXTURE_FORMAT if fields.get("num_local_experts") else FORMAT
        named = json.dumps([drawn, weights.seed, dict(fields)], sort_keys=True)
        return hashlib.sha256(named.encode()).hexdigest()
    try:
        digest = known_sha256(*weights_files(weights))
    except OSError as exc:
        raise WeightsError(f"--weights {weights.path.name}: cannot read the files ({exc.strerror or exc})") from exc
    if weights.sha256 not in (None, digest):
        raise WeightsError(
            f"--weights {weights.path.name}: the files have SHA-256 {digest}, but the pin requires {weights.sha256}"
        )
    return digest


def pin_language_weights(weights: LanguageWeights, fields: Mapping[str, Any]) -> LanguageWeights:
    """The weights with the SHA-256 of their files, which each process that loads them verifies."""
    if isinstance(weights, RandomWeights):
        return weights
    return replace(weights, sha256=weights_sha256(weights, fields))


def draw_tensor(
    name: str, shape: tuple[int, ...], hidden_size: int, seed: int, device: str | torch.device = "cpu"
) -> torch.Tensor:
    """The random tensor of this name, FP32 on the device; equal bytes on every device."""
    import torch

    if name.endswith("bias"):
        return _uniform(name, shape, seed, 0.0, BIAS_DEVIATION, device)
    if name.endswith("sinks"):
        return _uniform(name, shape, seed, 0.0, SINK_DEVIATION, device)
    if len(shape) == 1:
        return _uniform(name, shape, seed, 1.0, NORM_DEVIATION, device)
    if name.endswith(_ROUTERS):
        return _uniform(name, shape, seed, 0.0, ROUTER_SCALE / math.sqrt(hidden_size), device)
    deviation = (EXPERT_SCALE if name.endswith(_EXPERT_ENDS) else WEIGHT_SCALE) / math.sqrt(hidden_size)
    if name.endswith(_AFTER_GELU) and shape[0] % 2 == 0:
        half = _uniform(name, (shape[0] // 2, *shape[1:]), seed, 0.0, deviation, device)
        return torch.cat((half, -half))
    return _uniform(name, shape, seed, 0.0, deviation, device)


def _uniform(
    name: str, shape: tuple[int, ...], seed: int, mean: float, deviation: float, device: str | torch.device
) -> torch.Tensor:
    """Uniform values from 24 bits of a hash of the place: multiplications of a 32-bit mixer (Ellis's lowbias32) with
    the tensor's key before each of them."""
    import torch

    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    first, second = (int.from_bytes(digest[start : start + 4], "little", signed=True) for start in (0, 4))
    count = math.prod(shape)
    assert count < 2**31
    values = torch.empty(count, dtype=torch.float32, device=device)
    chunk = _CHUNK_ON_GPU if values.is_cuda else _CHUNK_ON_CPU
    scale = deviation * math.sqrt(3.0) / 2**23
    for start in range(0, count, chunk):
        stop = min(start + chunk, count)
        bits = torch.arange(start, stop, dtype=torch.int32, device=device)
        bits ^= first
        for shift, key, factor in ((16, 0, 0x7FEB352D), (15, second, 0x846CA68B - 2**32)):
            # The shift of a signed number copies the sign into the free bits, which are cleared.
            bits ^= (bits >> shift) & (2 ** (32 - shift) - 1)
            bits ^= key
            bits *= factor
        bits ^= (bits >> 16) & 0xFFFF
        # Whole numbers of 24 bits and a half are exact in FP32, so each step rounds alike everywhere.
        values[start:stop] = (bits >> 8).float().add_(0.5).mul_(scale).add_(mean)
    return values.reshape(shape)
