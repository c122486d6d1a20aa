"""Which plan a batch runs with: the table on the card it was measured on, a quick measurement on any other."""

# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

import torch
from triton.runtime.errors import OutOfResources

from servers.engines.vit.device_weights import FusedWeights
from servers.engines.vit.fused import FusedVisionTower, Workspace
from servers.engines.vit.plans import CUBLAS, Plan, hopper_plan, portable_plans

MEASURING_BUDGET_S = 20.0
"""All batch sizes together, kernel compilation included; those left over run the plan that needs no measurement."""

HOPPER = (9, 0)


@dataclass(frozen=True, slots=True)
class Choice:
    """A plan and where it came from: "table", "measured" or "default"."""

    plan: Plan
    origin: str


class PlanChooser:
    """Chooses for one tower on one device; the measuring budget runs from its construction."""

    def __init__(self, weights: FusedWeights, workspace: Workspace, dtype: torch.dtype, item: tuple[int, ...]) -> None:
        self._weights, self._space = weights, workspace
        self._item, self._dtype = item, dtype
        self._deadline = time.monotonic() + MEASURING_BUDGET_S

    def choose(self, images: int) -> Choice:
        """The plan for batches of `images`."""
        shape = self._weights.shape
        if torch.cuda.get_device_capability(self._weights.device) == HOPPER:
            plan = hopper_plan(images)
            if plan.fits(shape):
                return Choice(plan, "table")
        candidates = [plan for plan in portable_plans(images) if plan.fits(shape)]
        timed: list[tuple[float, int]] = []
        for index, plan in enumerate(candidates):
            if time.monotonic() > self._deadline:
                break
            try:
                timed.append((self._time_us(images, plan), index))
            except OutOfResources:  # a card with less shared memory than the tile wants
                continue
        return Choice(candidates[min(timed)[1]], "measured") if timed else Choice(CUBLAS, "default")

    def _time_us(self, images: int, plan: Plan) -> float:
        device = self._weights.device
        tower = FusedVisionTower(self._weights, self._space, images, plan)
        # Random pixels: on zeros a matrix product draws less power and runs faster.
        pixels = torch.randint(0, 256, (images, *self._item), device=device, dtype=torch.uint8).to(self._dtype)
        out = torch.empty(images, self._weights.shape.output_width, device=device)
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            for _ in range(2):
                tower.run(pixels, out)
        stream.synchronize()
        with torch.cuda.graph(graph):
            tower.run(pixels, out)
        times: list[float] = []
        for _ in range(12):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3)
        return median(times[2:])
