"""An engine that generates tokens, measured cell by cell for `abserve engines`; see `servers.measuring.worker`.

A cell is a number of requests with prompts of one length. Its time is that of a decoding step, in which every request
gets one token, so its items are tokens. The answers go along: they are judged after all engines are closed, since a
model and its reference need not fit into memory together.
"""

from __future__ import annotations

import time
from contextlib import closing
from importlib import import_module
from itertools import count
from typing import BinaryIO

from servers.engines.settings import resolved_device
from servers.language.engine import MAX_LENGTH, GenerationSettings, make_engine
from servers.language.specification import language_model
from servers.measuring.generation import Repetition, copy_bytes_per_s, repeat, step_bytes
from servers.measuring.request import (
    GENERATED_TOKENS,
    MeasurementRequest,
    SendAnswer,
    WorkerCommand,
    answer_commands,
)
from servers.measuring.resources import Resources

MOST_ANSWERS = 4
"""Answers of each cell and round that are judged."""


def serve_generation(request: MeasurementRequest, commands: BinaryIO, answer: SendAnswer) -> None:
    """Load the engine, say that it is ready, and answer the commands."""
    device = resolved_device(request.device)
    model = language_model(request.model, request.weights)
    lengths = [length for length in request.lengths if length is not None]
    needed = max(lengths, default=0) + GENERATED_TOKENS + 1
    settings = GenerationSettings(
        engine=request.engine,
        device=device,
        precision=request.precision,
        slots=max(request.batches),
        max_length=0 if needed <= MAX_LENGTH else min(2 * needed, model.max_length),
        graphs=request.mode != "eager",
        threads=request.threads,
    )
    started = time.perf_counter()
    for library in ("torch", "transformers"):
        import_module(library)
    imported = time.perf_counter()
    with closing(Resources(device)) as resources, closing(make_engine(model, settings)) as engine:
        engine.load()
        engine.warm_up()
        loaded = time.perf_counter()
        effective = engine.settings()
        description = {
            **effective,
            "kind": effective["engine"],
            "version": effective["engine_version"],
            "mode": request.mode,
        }
        answer(
            {
                "ready": {
                    "import_seconds": imported - started,
                    "load_seconds": loaded - imported,
                    "conversions": [],
                    "description": description,
                    "item": "token",
                }
            }
        )
        copied = copy_bytes_per_s(device)
        if device != "cpu":
            import_module("torch").cuda.empty_cache()  # of the copy, which is not the engine's memory
        seeds = count()

        def answer_to(command: WorkerCommand) -> dict[str, object]:
            """One cell, with the fields of the load generator's record `Measured`."""
            seed = next(seeds)
            batch, length = command.batch, command.length or 0
            resources.begin()

            def once() -> Repetition:
                return repeat(engine, model, batch, length, GENERATED_TOKENS, seed)

            first = once()  # warms up
            done, until = [once()], time.perf_counter() + command.seconds
            while time.perf_counter() < until:
                done.append(once())
            memory = resources.memory()
            energy = resources.energy(once) if command.energy else None
            joules, runs, _ = energy or (None, 0, None)
            context = sum(part.context for part in done) / len(done)
            cell = {
                "batch": batch,
                "length": command.length,
                "first_call_ns": first.prompt_ns,
                "calls_ns": [
                    max(1, round(step_ns * batch / tokens))
                    for part in done
                    for step_ns, tokens in zip(part.steps_ns, part.step_tokens, strict=True)
                ],
                **memory,
                "energy_joules": joules,
                "energy_items": runs * batch * GENERATED_TOKENS,
                "generated": {
                    "prompts_ns": [part.prompt_ns for part in done],
                    "context": context,
                    "step_bytes": step_bytes(model, batch, context, request.precision),
                    "copy_bytes_per_s": copied,
                    "answers": [
                        {"prompt": list(given.prompt), "output": list(given.output)}
                        for given in done[-1].answers[:MOST_ANSWERS]
                    ],
                },
            }
            return {"measured": cell}

        answer_commands(commands, answer, answer_to)
