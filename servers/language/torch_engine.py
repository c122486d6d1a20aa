"""What the generating engines that execute with torch share: device, precision, limits, and the settings in effect."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from functools import cached_property

import torch
from torch import Tensor

from servers.engines.interface import PROFILE_AT_START
from servers.engines.processors import thread_count
from servers.engines.settings import EngineError
from servers.engines.torch.device import resolve_device, set_fp32_products
from servers.gpu.kernel_probe import probe_kernels
from servers.language.engine import (
    MAX_LENGTH,
    SLOTS,
    GeneratingEngine,
    GenerationRequest,
    GenerationSettings,
    generation_precision,
)
from servers.language.specification import LanguageModel
from servers.language.weights import weights_sha256


class TorchGeneratingEngine:
    """The part of a `GeneratingEngine` that does not depend on how it generates."""

    def __init__(self, model: LanguageModel, settings: GenerationSettings) -> None:
        """Raises `EngineError` for a length that the model does not have."""
        self._model, self._settings = model, settings
        self._device = resolve_device(settings.device)
        self._kind = "cpu" if self._device.type == "cpu" else "cuda"
        self._precision = generation_precision(settings.precision, str(self._device))
        self.slots = settings.slots or SLOTS[self._kind]
        if settings.max_length > model.max_length:
            raise EngineError(
                f"max_length {settings.max_length}: {model.title} has at most {model.max_length} positions"
            )
        self.max_length = settings.max_length or min(model.max_length, MAX_LENGTH)
        self.vocabulary, self.eos = model.vocabulary, model.eos
        self._parameters_by_device: dict[str, int] = {}

    def _prepare_torch(self) -> None:
        """Set the number of threads and the precision of products; before the weights are loaded."""
        if self._kind == "cpu":
            torch.set_num_threads(thread_count(self._settings.threads))
        set_fp32_products(tf32=False)

    def _note_devices(self, parameters: Iterable[Tensor]) -> None:
        """Count where the parameters are, once they are loaded."""
        self._parameters_by_device = dict(Counter(str(parameter.device) for parameter in parameters))

    @cached_property
    def _weights_sha256(self) -> str:
        """Files are read whole for it, and the settings are asked for several times."""
        return weights_sha256(self._model.weights, self._model.fields)

    def _settings_of_torch(self, engine: str, version: str, prefill_chunk: int) -> dict[str, object]:
        """The first settings of `GeneratingEngine.settings`, in its order."""
        return {
            "engine": engine,
            "engine_version": version,
            "device": str(self._device),
            "precision": self._precision,
            "threads": torch.get_num_threads() if self._kind == "cpu" else None,
            "slots": self.slots,
            "max_length": self.max_length,
            "prefill_chunk": prefill_chunk,
            "weights": self._model.weights.label,
            "weights_sha256": self._weights_sha256,
            "parameters_by_device": self._parameters_by_device,
        }


def generation_kernels(engine: GeneratingEngine) -> dict[str, object]:
    """`kernel_probe`: the kernels of one short answer of an idle engine, which prove that it executes on a GPU. Empty
    on a CPU, where `PROFILE_AT_START` is 0, and where the driver refuses to profile. Takes about a second, so it
    belongs to the start of a server."""
    device = torch.device(str(engine.settings()["device"]))
    if device.type != "cuda" or os.environ.get(PROFILE_AT_START) == "0":
        return {}

    def generate() -> None:
        engine.add(GenerationRequest(-1, [1 % engine.vocabulary], 2))
        while engine.active or engine.waiting:
            engine.step()

    try:
        return {"kernel_probe": probe_kernels(generate, device)}
    except Exception:  # noqa: BLE001  a driver that refuses to profile must not stop a server from starting
        return {}
