"""The engine `jax`: the slots, the batching and the weights of the engine `slots`, with JAX and XLA as what executes.

torch draws or reads the weights part by part on the device, and JAX takes their memory as it is (DLPack), so the model
is in memory once. JAX starts threads, so a process that has loaded this engine must not fork.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from servers.engines.jax_engine import MATRIX_PRECISIONS, cpu_threads, start_jax
from servers.language.decoder import Affine, DecoderWeights, LayerWeights, WeightsHandover, decoder_weights
from servers.language.engine import GenerationSettings
from servers.language.forward import SlotForward
from servers.language.module import DTYPES, build_module, draw_part, empty_module
from servers.language.slots import ALONE, SlotsEngine
from servers.language.specification import LanguageModel
from servers.models.weights import RandomWeights


class JaxGeneratingEngine(SlotsEngine):
    """See `GeneratingEngine`, and this module. The number of CPU threads applies to the whole process."""

    name = "jax"

    def __init__(self, model: LanguageModel, settings: GenerationSettings) -> None:
        super().__init__(model, settings)
        start_jax(str(self._device), settings.threads)  # before another module uses JAX with other settings

    def settings(self) -> dict[str, object]:
        import jax

        threads = cpu_threads() if self._kind == "cpu" else None
        return super().settings() | {"engine_version": jax.__version__, "threads": threads}

    def _load_weights(self) -> DecoderWeights:
        return jax_weights(self._model, self._device, self._precision)

    def _make_forward(self, weights: DecoderWeights) -> SlotForward:
        from servers.language.jax_forward import JaxForward

        precision = MATRIX_PRECISIONS[self._precision]
        return JaxForward(weights, self.slots, self.max_length, self._chunk, self._chunk * ALONE, precision)

    def _on_the_way(self, chosen: Any) -> tuple[Any, None]:
        return chosen, None  # since the step was started


def jax_weights(model: LanguageModel, device: torch.device, precision: str) -> DecoderWeights:
    """The weights as arrays of JAX on the device, each of which is in memory once while they are loaded."""
    dtype = getattr(torch, DTYPES[precision])
    random = isinstance(model.weights, RandomWeights)
    # An empty module has parameters without memory, and the frequencies of RoPE in FP32, which they must stay in.
    module = empty_module(model) if random else build_module(model, "cpu", precision)
    names = {part: name for name, part in module.named_modules()}
    prepared: list[nn.Module] = []

    def prepare(part: nn.Module) -> None:
        if random:
            draw_part(part, names[part], model, device, dtype)
        else:
            part.to(device)
        prepared.append(part)

    def take(layer: LayerWeights) -> LayerWeights:
        if layer.router is not None:
            layer = _with_inputs_last(layer)
        parts = {name: getattr(layer, name) for name in layer.__slots__}
        taken = {name: _taken(part) for name, part in parts.items() if isinstance(part, Affine | Tensor)}
        prepared.pop().to("meta")
        return replace(layer, **taken)

    weights = decoder_weights(module, WeightsHandover(prepare, take))
    return replace(
        weights,
        embedding=_taken(weights.embedding),
        norm=_taken(weights.norm),
        head=_taken(weights.head),
        positions=_taken(weights.positions),
        frequencies=None if weights.frequencies is None else _taken(weights.frequencies.to(device)),
    )


def _with_inputs_last(layer: LayerWeights) -> LayerWeights:
    """Experts with `up` as [experts, 2·inner, hidden] and `down` as [hidden, experts, inner]."""
    up, down = layer.up, layer.down
    return replace(layer, up=Affine(up.weight.mT, up.bias), down=Affine(down.weight.permute(2, 0, 1), down.bias))


def _taken(part: Any) -> Any:
    """A tensor, or both of an `Affine`, as arrays of JAX in the same memory; None is None."""
    from jax import dlpack

    if part is None:
        return None
    if isinstance(part, Affine):
        return Affine(_taken(part.weight), _taken(part.bias))
    part = part.detach().contiguous()
    if part.is_cuda:
        torch.cuda.synchronize(part.device)
    return dlpack.from_dlpack(part)
