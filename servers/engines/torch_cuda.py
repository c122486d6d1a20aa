"""The torch engine on a CUDA device: one tower, one runner with two slots, and the proof that it computes the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from servers.contract.tensors import Array
from servers.engines.canary import Canary, run_canary
from servers.engines.interface import EngineError
from servers.engines.random_inputs import random_array
from servers.engines.torch_device import fp32_products
from servers.engines.torch_towers import DeviceTower, fast_tower, own_tower
from servers.engines.vit.graph_runner import GraphRunner
from servers.models.specification import ModelSpecification
from servers.models.uint8_module import UInt8Images

MIN_COSINE = 0.9995
"""Of every row with the model's own module in FP32 on the CPU."""

GRAPH_MODES = ("graph", "compile")
"""Captured a batch bucket; the other modes enqueue every batch anew, at its own size."""

PROOF_ROWS = 3
"""A batch that is padded, so that the padding is proven too."""


class CudaExecution:
    """See `servers.engines.interface.Pipeline`. Built once, at load; raises `EngineError` or torch's `RuntimeError`."""

    def __init__(
        self,
        module: torch.nn.Module,
        specification: ModelSpecification,
        device: torch.device,
        dtype: torch.dtype,
        mode: str,
        buckets: Sequence[int],
    ) -> None:
        if len(specification.inputs) != 1 or len(specification.outputs) != 1:
            raise EngineError(
                f"{specification.name}: on CUDA the torch engine takes models of one input and one output"
            )
        self._input, self._output = specification.inputs[0], specification.outputs[0]
        self._device, self._mode = device, mode
        pixels, expected = _proof(module, specification, min(PROOF_ROWS, buckets[-1]))
        self._graphs = mode in GRAPH_MODES
        if not self._graphs:
            self._tower: DeviceTower = own_tower(module, specification, device, dtype, buckets[-1], mode=mode)
        else:
            self._tower = fast_tower(module, specification, device, dtype, buckets[-1], compiled=mode == "compile")
        self._runner = GraphRunner(
            self._tower.build,
            item=self._input.item_shape,
            dtype=torch.uint8 if self._input.datatype == "UINT8" else torch.float32,
            width=self._output.item_shape[0],
            buckets=buckets,
            device=device,
            graphs=self._graphs,
        )
        self.slots = self._runner.slots
        answer = torch.from_numpy(self._runner.infer(pixels))
        self._cosine = float(torch.nn.functional.cosine_similarity(answer, expected).min())
        if not self._cosine >= MIN_COSINE:
            raise EngineError(
                f"{self._tower.kernels} on {device} does not compute the model: cosine {self._cosine:.6f} to its own "
                f"module in FP32 is below {MIN_COSINE}; use mode eager"
            )

    @property
    def parameters(self) -> Sequence[torch.Tensor]:
        """The weights on the device."""
        return self._tower.parameters

    def infer(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """One batch, start to end."""
        return {self._output.name: self._runner.infer(inputs[self._input.name])}

    def staging(self, slot: int) -> Mapping[str, Array]:
        """See `Pipeline`."""
        return {self._input.name: self._runner.staging(slot)}

    def submit(self, slot: int, count: int) -> None:
        """See `Pipeline`."""
        self._runner.submit(count, slot)

    def collect(self, slot: int) -> Mapping[str, Array]:
        """See `Pipeline`."""
        try:
            return {self._output.name: self._runner.collect(slot)}
        except RuntimeError as exc:
            raise EngineError(f"torch failed to execute the batch: {str(exc).partition(chr(10))[0]}") from exc

    def execution_ns(self, count: int, repeats: int) -> list[int]:
        """Device times without copies, on random pixels in both slots."""
        generator = np.random.default_rng(0)
        for slot in range(self.slots):
            array = self._runner.staging(slot)
            array[:count] = random_array(generator, array[:count].shape, array.dtype)
            self._runner.submit(count, slot)
            self._runner.collect(slot)
        return [round(time_us * 1e3) for time_us in self._runner.replay_us(count, repeats)]

    def run_only(self, count: int) -> None:
        """One execution without copies, waited for."""
        self._runner.run_only(count)

    def canary(self) -> Canary:
        """Profile one inference of one row."""
        pixels = np.array(self._runner.staging(0)[:1])
        return run_canary(lambda: self._runner.infer(pixels), self._device)

    def details(self) -> dict[str, object]:
        """For the description."""
        return {
            "kernels": self._tower.kernels,
            "gelu": self._tower.gelu,
            "compiled": self._mode == "compile",
            "cuda_graphs": self._graphs,
            "buckets": list(self._runner.buckets) if self._graphs else None,
            "plans": dict(self._tower.plans()),
            "slots": self.slots,
            "fp32_products": fp32_products(),
            "cosine_to_fp32": round(self._cosine, 7),
        }

    def close(self) -> None:
        """Return the memory to the driver. Idempotent."""
        self._runner.close()
        torch.cuda.empty_cache()


def _proof(module: torch.nn.Module, specification: ModelSpecification, rows: int) -> tuple[Array, torch.Tensor]:
    """Random input as it arrives, and what the model's own module makes of it in FP32 on the CPU."""
    own = module if specification.payload == "fp32" else UInt8Images(module, specification.preprocessing).eval()
    tensor = specification.inputs[0]
    pixels = random_array(np.random.default_rng(1), (rows, *tensor.item_shape), tensor.dtype)
    with torch.inference_mode():
        return pixels, own(torch.from_numpy(pixels)).clone()
