"""From options to cells: what a preset runs, and about how long that takes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from loadgen.experiment.arrivals import RATE_LIMIT_PER_S
from loadgen.records.run import ArmRequest, Arrivals, Cell, Scenario

BATCH_SIZES = (8, 32)
"""A batch of one is the scenario single."""
CONCURRENCY = (16,)
GPU_WINDOW_S = 11.0
GPU_REQUESTS = 110
"""Of one arm in one cell, where its GPU evidence is to carry a verdict: a little over the thresholds of 10 s and 100
requests in `loadgen.studies.gpu_proof.records`."""
GPU_BLOCK_S = 0.8
"""At least, of a block whose GPU is watched: the energy counter of an H200 goes on every 0.1 s."""
LEAST_ROUNDS = 4
"""Two balanced rounds, where time or the decision and not `--rounds` says how many there are."""
SPAN = 3.0
"""A block lasts at least so many times a request: one goes while the load builds up, two are measured."""

_GPU_DEVICES = ("/dev/nvidiactl", "/dev/dxg")  # the second one is WSL's
SCENARIOS: tuple[Scenario, ...] = ("cold-start", "single", "batched", "concurrent")
"""Those that run unless others are asked for; `open` needs a rate, `slo` a bound. `loadgen.experiment.search_plan`
makes the cells of `slo` and `ramp`."""
CONNECTIONS = 64
OPEN_SECONDS = 5.0


class PlanError(Exception):
    """The options contradict each other or name nothing that exists; the message says what would do."""


@dataclass(frozen=True, slots=True)
class Preset:
    """How much time. `seconds` are of one block at least, `minutes` of the comparison without explaining causes."""

    cold_starts: int
    seconds: float
    max_seconds: float
    minutes: float


PRESETS = {
    "quick": Preset(cold_starts=3, seconds=0.6, max_seconds=12.0, minutes=5.0),
    "full": Preset(cold_starts=5, seconds=1.0, max_seconds=20.0, minutes=25.0),
}


def make_cells(
    preset: str,
    scenarios: Sequence[str],
    *,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    concurrency: Sequence[int] = CONCURRENCY,
    requests: int = 1,
    rounds: int | None = None,
    least_rounds: int = LEAST_ROUNDS,
    gpu: bool = False,
    rates: Sequence[float] = (),
    arrivals: str = "poisson",
    connections: int = CONNECTIONS,
    open_seconds: float = OPEN_SECONDS,
) -> tuple[Cell, ...]:
    """The cells of an experiment, in the order of the report. `requests` are the least of a concurrent block, `rounds`
    those of each cell; without it time decides, and there are `least_rounds` in any case. How long a block must last
    is known when a request has been seen (`sized`); with `gpu` all blocks of an arm together last long enough to carry
    GPU evidence. `rates` adds an open cell each, of blocks in which requests fall due for `open_seconds`. Raises
    `PlanError`."""
    if preset not in PRESETS:
        raise PlanError(f"--preset {preset}: there are {', '.join(PRESETS)}")
    known = (*SCENARIOS, "open", "slo", "ramp")
    unknown = [name for name in scenarios if name not in known]
    if unknown or not scenarios:
        raise PlanError(f"--scenarios {','.join(unknown) or '(empty)'}: there are {', '.join(known)}")
    if "open" in scenarios and not rates:
        raise PlanError("--scenarios open: say at which rates, in requests a second, as in --rates 20,50")
    kind = check_open_loop(rates, arrivals, connections, open_seconds)
    if min((*batch_sizes, *concurrency, requests), default=1) < 1 or (rounds is not None and rounds < 1):
        raise PlanError("batch sizes, concurrency, requests and rounds are whole numbers from 1")
    for scenario, option, values in (
        ("batched", "--batch-sizes", batch_sizes),
        ("concurrent", "--concurrency", concurrency),
    ):
        if scenario in scenarios and not values:
            raise PlanError(f"{option} (empty): give one size at least, or leave {scenario} out of --scenarios")
    amount = PRESETS[preset]
    load_rounds, seconds, least_requests = rounds or least_rounds, amount.seconds, 1
    if gpu:
        seconds = max(seconds, GPU_BLOCK_S)
        if rounds is None:
            load_rounds = max(least_rounds, math.ceil(GPU_WINDOW_S / seconds))
        else:
            seconds = max(seconds, GPU_WINDOW_S / rounds)
        least_requests = math.ceil(GPU_REQUESTS / load_rounds)

    def cell(scenario: Scenario, batch_size: int, users: int, number: int = 1) -> Cell:
        return Cell(
            scenario=scenario,
            batch_size=batch_size,
            concurrency=users,
            requests=max(number, least_requests),
            seconds=seconds,
            max_seconds=max(amount.max_seconds, 2.0 * seconds),
            rounds=load_rounds,
        )

    cells: list[Cell] = []
    if "cold-start" in scenarios:
        cells.append(
            Cell(
                scenario="cold-start",
                batch_size=1,
                concurrency=1,
                requests=1,
                seconds=0.0,
                max_seconds=300.0,
                rounds=amount.cold_starts,
            )
        )
    if "single" in scenarios:
        cells.append(cell("single", 1, 1))
    if "batched" in scenarios:
        for batch_size in sorted(set(batch_sizes)):
            cells.append(cell("batched", batch_size, 1))
    if "concurrent" in scenarios:
        cells += [cell("concurrent", 1, users, requests) for users in sorted(set(concurrency))]
    cells += [
        msgspec.structs.replace(
            cell("open", 1, connections, 1),
            seconds=max(open_seconds, seconds),
            max_seconds=max(open_seconds, seconds, amount.max_seconds),
            arrivals=kind,
            rate_per_s=float(rate),
        )
        for rate in sorted(set(rates))
    ]
    return tuple(cells)


def sized(cells: Sequence[Cell], request_seconds: Mapping[str, float]) -> tuple[Cell, ...]:
    """The cells with blocks of closed loops that last long enough for a request of the slowest arm, which is known by
    the cell's name: the same time for all arms."""
    return tuple(
        cell
        if cell.is_open or cell.name not in request_seconds
        else msgspec.structs.replace(
            cell, seconds=min(max(cell.seconds, SPAN * request_seconds[cell.name]), cell.max_seconds)
        )
        for cell in cells
    )


def check_open_loop(rates: Sequence[float], arrivals: str, connections: int, seconds: float) -> Arrivals:
    """The kind of arrivals. Raises `PlanError` for what no open loop can be."""
    kinds: dict[str, Arrivals] = {"constant": "constant", "poisson": "poisson"}
    if arrivals not in kinds:
        raise PlanError(f"--arrivals {arrivals}: there are constant, poisson; without --rates every loop is closed")
    wrong = [rate for rate in rates if not 0.0 < rate <= RATE_LIMIT_PER_S]
    if wrong:
        raise PlanError(
            f"--rates {wrong[0]:g}: give requests a second above 0 and up to {RATE_LIMIT_PER_S:,.0f}, as in 20,50"
        )
    if connections < 1 or seconds <= 0.0:
        raise PlanError("--connections is a whole number from 1, and --open-seconds a number above 0")
    return kinds[arrivals]


def expects_gpu(*arms: ArmRequest) -> bool:
    """Whether there may be a GPU for an arm that is not told to stay on the CPU: a cheap sign, and no proof."""
    return any(Path(path).exists() for path in _GPU_DEVICES) and any(
        arm.settings.get("device") != "cpu" for arm in arms
    )
