"""One engine process of `abserve engines`: a request in, then measurements on demand, as lines of JSON.

    python -m servers.engines.worker REQUEST      then on standard input {"batch": …, "length": …, "seconds": …}, or
                                                  {"profile": [[batch, length], …]} once all of them are measured
    python -m servers.engines.worker --prepare REQUEST   makes the exported file and the model's own answers, and ends
    python -m servers.engines.worker --check      requests on standard input, a JSON list; answers with one as long
    python -m servers.engines.worker --offers DEVICE

Standard output has only answers, one per line: what libraries print goes to standard error. The end of standard input
ends the process with exit status 0. An answer with `error` says why there is none.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib import import_module
from itertools import cycle, product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from servers.engines.environment import enter_environment_of
from servers.engines.request import Request, checked, offers

if TYPE_CHECKING:
    from servers.engines.interface import Engine
    from servers.engines.measurement import BatchMeasurement, Reference
    from servers.engines.resources import Resources
    from servers.models.specification import ModelSpecification
    from servers.models.weights import WeightsSource
    from servers.protocol.tensors import Array

TOP_KERNELS = 10
WARM_UP_SHARE = 0.25
"""Of the seconds of a cell: a GPU needs a while to raise its clocks."""
LEAST_CALLS = 3
SLOW_SECONDS = 1.0
"""A batch that takes longer than this gets one timed call per visit: the rounds repeat it."""
Shape = tuple[int, int | None]
"""A batch size and a length; the length is None for a model without an axis of variable size."""


class Command(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A line on standard input: a cell to measure, or cells to profile, after which nothing can be measured."""

    batch: int = 0
    length: int | None = None
    seconds: float = 1.0
    energy: bool = True
    profile: tuple[Shape, ...] = ()


def main(arguments: Sequence[str]) -> int:
    """Run one of the four forms; the exit status is 1 when the last answer was an error."""
    faulthandler.enable()  # a crash in a library writes the Python stack to the log
    request: Request | Exception | None
    try:
        request = _request(arguments)
    except Exception as exc:  # noqa: BLE001  answered below, like every other failure
        request = exc
    with own_output() as output:

        def answer(value: object) -> None:
            output.write(msgspec.json.encode(value, enc_hook=str) + b"\n")
            output.flush()

        try:
            return _run(arguments, request, answer)
        except BrokenPipeError:  # the caller has gone
            return 1
        except Exception as exc:  # noqa: BLE001  the caller hears of every failure, whichever library it came from
            traceback.print_exc()
            answer({"error": _sentence(exc)})
            return 1


def _run(arguments: Sequence[str], request: Request | Exception | None, answer: Callable[[object], None]) -> int:
    match arguments, request:
        case _, Exception():
            raise request
        case ["--check"], _:
            requests = msgspec.json.decode(sys.stdin.buffer.read(), type=list[Request])
            answer([checked(one) for one in requests])
        case ["--offers", device], _:
            answer(offers(device))
        case ["--prepare", _], Request():
            answer(_prepare(request))
        case [_], Request():
            with _own_compilations():
                _serve(request, sys.stdin.buffer, answer)
        case _:
            answer({"error": "give one request as JSON, --prepare REQUEST, --check or --offers DEVICE"})
            return 2
    return 0


@contextmanager
def own_output() -> Iterator[BinaryIO]:
    """Standard output for answers alone: all else that this process or a library writes there goes to standard
    error."""
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "wb") as output:
        os.dup2(2, 1)
        yield output


@contextmanager
def _own_compilations() -> Iterator[None]:
    """An empty cache for what torch.compile makes: a process that finds another one's would start sooner than a first
    one. A cache that the user chose is kept."""
    with TemporaryDirectory(prefix="abserve-compiled-") as folder:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", folder)
        yield


def _request(arguments: Sequence[str]) -> Request | None:
    """The request among the arguments; None in a form without one.

    Continues in another interpreter where the engine's libraries are there: standard input is unread, standard output
    is untouched, and the request comes along.
    """
    match arguments:
        case ["--check"] | ["--offers", _]:
            return None
        case [text] | ["--prepare", text]:
            request = msgspec.json.decode(text, type=Request)
            enter_environment_of(request.engine)
        case _:
            return None
    if request.profile and request.on_cpu:
        # torch reads it when it is imported; otherwise its profiler reports a missing GPU as an error.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    return request


def _prepare(request: Request) -> dict[str, object]:
    """Make the model's own answers and the file that the engine executes: whether it executes one, and its steps."""
    specification = request.specification()
    weights = request.weights_source(specification)
    _references(request, specification, weights)
    conversions, path = _converted(request, specification, weights)
    return {"file": path is not None, "conversions": conversions}


def _references(request: Request, specification: ModelSpecification, weights: WeightsSource) -> list[Reference]:
    from servers.engines.command import photographs
    from servers.engines.references import references

    sizes = [specification.along(length) for length in request.lengths]
    path = Path(request.references) if request.references else None
    return references(specification, weights, sizes, lambda: photographs(specification), path)


def _converted(
    request: Request, specification: ModelSpecification, weights: WeightsSource, began: float | None = None
) -> tuple[list[dict[str, Any]], Path | None]:
    """The steps from the model to the file that the engine executes, and the file; the steps of a TensorRT plan have
    no manifest, so they are known only when it is made."""
    from servers.engines.command import artefact

    began, started_ns = began or time.time(), time.perf_counter_ns()
    executed = artefact(specification, weights, request.settings(), Path(request.artefacts))
    seconds = (time.perf_counter_ns() - started_ns) / 1e9
    if executed is None or executed.path == specification.file:
        return [], None if executed is None else executed.path
    status, manifest = executed.path.stat(), executed.manifest
    made_now = status.st_mtime >= began
    if manifest is None and not made_now:
        return [], executed.path
    name, source = "build" if manifest is None else "export", list[dict[str, Any]]()
    if manifest is not None and manifest.quantisation is not None:
        plain = msgspec.structs.replace(request, engine="openvino", precision="fp32")  # the file that INT8 is made from
        name, (source, _) = "quantise", _converted(plain, specification, weights, began)
    step = {
        "step": name,
        "seconds": seconds if manifest is None else manifest.seconds,
        "made_now": made_now,
        "file": executed.path.name,
        "file_bytes": status.st_size,
        "sha256": None if manifest is None else manifest.sha256,
    }
    return [*source, step], executed.path


def _serve(request: Request, commands: BinaryIO, answer: Callable[[object], None]) -> None:
    from servers.engines.batches import random_inputs
    from servers.engines.factory import build_engine
    from servers.engines.measurement import rotation_rows
    from servers.engines.resources import Resources
    from servers.engines.settings import engine_kind
    from servers.models.registry import SOURCES

    specification = request.specification()
    weights = request.weights_source(specification)
    settings = request.settings()
    references = dict(zip(request.lengths, _references(request, specification, weights), strict=True))
    conversions, path = _converted(request, specification, weights)
    resources = Resources(settings.device)
    started_ns = time.perf_counter_ns()
    source = specification.reference.partition(":")[0]
    for library in (*engine_kind(request.engine).libraries, *([source] if source in SOURCES and path is None else [])):
        import_module(library)
    import_seconds = _seconds_since(started_ns)
    engine = build_engine(specification, weights, settings, path)
    try:
        started_ns = time.perf_counter_ns()
        engine.load()
        ready = {
            "import_seconds": import_seconds,
            "load_seconds": _seconds_since(started_ns) - engine.check_seconds,
            "conversions": conversions,
            "description": asdict(engine.describe()),
            "item": specification.item,
        }
        first_ns = _first_calls(engine, references, request.batches) if request.first_calls else {}
        answer({"ready": ready})
        measured: dict[Shape, BatchMeasurement] = {}
        pools: dict[int | None, Mapping[str, Array]] = {}
        for line in commands:
            try:
                command = msgspec.json.decode(line, type=Command)
                if command.profile:
                    answer({"profiled": _profiled(engine, specification, [measured[one] for one in command.profile])})
                    continue
                shape = (command.batch, command.length)
                reference = references[command.length]
                if command.length not in pools:
                    rows = rotation_rows(max(request.batches))
                    pools[command.length] = random_inputs(specification, rows, 0, reference.sizes)
                cell = _measured(engine, specification, reference, pools[command.length], command, resources)
                cell["first_call_ns"] = first_ns.pop(shape, cell["first_call_ns"])
                measured[shape] = _as_batch(cell, reference)
                answer({"measured": cell})
            except BrokenPipeError:
                raise
            except Exception as exc:  # noqa: BLE001  the other cells may still be measured, such as smaller ones
                traceback.print_exc()
                answer({"error": _sentence(exc)})
    finally:
        engine.close()
        resources.close()


def _first_calls(
    engine: Engine, references: Mapping[int | None, Reference], batches: Sequence[int]
) -> dict[Shape, int]:
    """The nanoseconds of every shape's first call that succeeds; one that fails will say so when it is measured."""
    import numpy as np

    from servers.engines.measurement import rows_of

    found: dict[Shape, int] = {}
    for (length, reference), batch in product(references.items(), batches):
        given = {name: array[np.arange(batch) % rows_of(reference)] for name, array in reference.inputs.items()}
        started_ns = time.perf_counter_ns()
        try:
            engine.infer(given)
        except Exception:  # noqa: BLE001  every library has errors of its own
            traceback.print_exc()
        else:
            found[batch, length] = time.perf_counter_ns() - started_ns
    return found


def _measured(
    engine: Engine,
    specification: ModelSpecification,
    reference: Reference,
    pool: Mapping[str, Array],
    command: Command,
    resources: Resources,
) -> dict[str, Any]:
    """One cell with the fields of the load generator's record `Measured`; its inputs are rows of the pool."""
    from servers.engines.measurement import MAX_EXECUTIONS, MIN_REPEATS, call_times_ns, compared, rotations, rows_of

    batch, inputs = command.batch, rotations(pool, command.batch)
    resources.begin()
    first_ns: list[int] = []

    def timed(given: Mapping[str, Array]) -> Mapping[str, Array]:
        started_ns = time.perf_counter_ns()
        answers = engine.infer(given)
        first_ns.append(time.perf_counter_ns() - started_ns)
        return answers

    in_effect = engine.describe()
    found = compared(timed, specification, batch, reference, in_effect.precision, command.seconds)
    null = in_effect.kind == "null"
    # The first call may have compiled, so this one tells whether the batch is slow.
    calls_ns = call_times_ns(engine, inputs, 0.0, 1)
    if calls_ns[0] <= SLOW_SECONDS * 1e9:
        if len(first_ns) == 1 and batch < rows_of(reference):  # compiling took the time for the other rows
            found = compared(engine.infer, specification, batch, reference, in_effect.precision, command.seconds)
        _warm_up(engine, inputs, WARM_UP_SHARE * command.seconds)
        calls_ns = call_times_ns(engine, inputs, command.seconds, LEAST_CALLS)
    executions_ns = engine.execution_ns(batch, min(max(MIN_REPEATS, len(calls_ns)), MAX_EXECUTIONS))
    energy = resources.energy(lambda: engine.run_only(batch) or engine.infer(inputs[0])) if command.energy else None
    return {
        "batch": batch,
        "length": command.length,
        "first_call_ns": first_ns[0],
        "calls_ns": calls_ns,
        "executions_ns": executions_ns or None,
        "cosine_min": None if found is None or null else found.cosine_min,
        "top1": None if found is None or null else found.top1,
        "relative_error": None if found is None or null else found.relative_error,
        "fault": "the null engine computes no model" if null else None if found is None else found.fault,
        "flops_per_item": reference.flops_per_item,
        **resources.memory(),
        "energy_joules": None if energy is None else energy.joules,
        "energy_items": 0 if energy is None else energy.runs * batch,
        "sustained_ns": None if energy is None else round(energy.seconds_per_run * 1e9),
    }


def _warm_up(engine: Engine, inputs: Sequence[Mapping[str, Array]], seconds: float) -> None:
    """Execute the inputs in turn until the time is up; the engine has answered at least one batch of this shape."""
    deadline = time.perf_counter() + seconds
    for given in cycle(inputs):
        engine.infer(given)
        if time.perf_counter() >= deadline:
            return


def _as_batch(cell: Mapping[str, Any], reference: Reference) -> BatchMeasurement:
    """A cell as the profiler takes it."""
    from servers.engines.measurement import BatchMeasurement

    executions, call_ns = cell["executions_ns"], round(median(cell["calls_ns"]))
    best_ns = round(median(executions)) if executions else call_ns
    return BatchMeasurement(
        batch=cell["batch"],
        repeats=len(cell["calls_ns"]),
        execution_ns=best_ns if executions else None,
        call_ns=call_ns,
        call_p99_ns=None,
        items_per_second=cell["batch"] / best_ns * 1e9,
        tflops=None,
        share_of_matrix_product=None,
        cosine_to_fp32=None,
        sizes=reference.sizes,
    )


def _profiled(
    engine: Engine, specification: ModelSpecification, measured: Sequence[BatchMeasurement]
) -> list[list[dict[str, Any]]]:
    """The longest kernels of each cell; none where the engine cannot be profiled."""
    from servers.engines.profiling.profile import profile_engine

    profile = profile_engine(engine, specification, measured)
    if profile.missing is not None:
        print(f"no profile: {profile.missing}", file=sys.stderr)  # noqa: T201  the log of this process
        return [[] for _ in measured]
    return [
        [
            {"name": kernel.label, "count": kernel.count, "seconds": kernel.us / 1e6, "share": kernel.share}
            for kernel in batch.kernels[:TOP_KERNELS]
        ]
        for batch in profile.batches
    ]


def _seconds_since(started_ns: int) -> float:
    return (time.perf_counter_ns() - started_ns) / 1e9


def _sentence(exc: Exception) -> str:
    """The first line of an error's message, with its kind where it is not abserve's own."""
    from servers.engines.interface import first_line

    own = type(exc).__module__.startswith("servers.")
    return first_line(exc) if own else f"{type(exc).__name__}: {first_line(exc)}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
