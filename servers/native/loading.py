"""From nothing to an engine that is ready for requests: built, loaded, checked against the limits, warmed up."""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog

from servers.engines.interface import Engine, EngineDescription, EngineError, profiled

log = structlog.get_logger("abserve.loading")


def load_engine(
    model: str, build_engine: Callable[[], Engine], max_batch_size: int
) -> tuple[Engine, EngineDescription] | None:
    """Blocks, in the thread that is to use the engine. None when it failed, after saying why in the log."""
    started_ns = time.perf_counter_ns()
    try:
        engine = build_engine()
        log.info("engine imported", model=model)  # with "weights loaded", the steps of a cold start
        engine.load()
        log.info("weights loaded", model=model)
        description = engine.describe()
        _check_batch_size(description, max_batch_size)
        loaded_ns = time.perf_counter_ns()
        engine.warm_up(warm_up_sizes(max_batch_size))
        description = profiled(engine) or description
    except EngineError as error:
        log.error("the model cannot be served", reason=str(error))  # noqa: TRY400  the sentence says it all
        return None
    except Exception:
        log.exception("the model cannot be served")
        return None
    log.info(
        "ready",
        model=model,
        engine=f"{description.kind} {description.version}",
        precision=description.precision,
        device=description.device,
        weights=description.weights,
        load_s=round((loaded_ns - started_ns) / 1e9, 2),
        warm_up_s=round((time.perf_counter_ns() - loaded_ns) / 1e9, 2),
    )
    return engine, description


def _check_batch_size(description: EngineDescription, max_batch_size: int) -> None:
    if description.max_batch_size < max_batch_size:
        raise EngineError(
            f"the engine executes at most {description.max_batch_size} items at once: "
            f"set --max-batch-size {description.max_batch_size} or less"
        )


def warm_up_sizes(max_batch_size: int) -> tuple[int, ...]:
    """Powers of two up to `max_batch_size`, and `max_batch_size` itself; ascending."""
    powers = [1 << exponent for exponent in range(max_batch_size.bit_length()) if 1 << exponent < max_batch_size]
    return (*powers, max_batch_size)
