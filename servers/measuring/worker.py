"""One engine process of `abserve engines`: a request in, then measurements on demand, as lines of JSON.

    python -m servers.measuring.worker REQUEST    then on standard input {"batch": …, "length": …, "seconds": …}, or
                                                  {"profile": [[batch, length], …]} once all of them are measured
    python -m servers.measuring.worker --prepare REQUEST   makes the exported file and the model's own answers, and ends
    python -m servers.measuring.worker --fastest REQUEST DEADLINE ENGINE …   the fastest among these and torch
    python -m servers.measuring.worker --check    requests on standard input, a JSON list; answers with one as long
    python -m servers.measuring.worker --offers DEVICE [generation]    the second form: of language models

Standard output has only answers, one per line: what libraries print goes to standard error. The end of standard input
ends the process with exit status 0. An answer with `error` says why there is none.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

import msgspec

from servers.engines.agreement import Disagreement
from servers.engines.factory import enter
from servers.engines.interface import PLANS_FOLDER, Engine
from servers.engines.settings import engine_kind
from servers.measuring.fastest import chosen_engine
from servers.measuring.measurement import (
    EngineTimes,
    MeasuredEngine,
    Reference,
    artefact,
    loaded_engine,
    quiet_profiler,
    stored_references,
)
from servers.measuring.request import (
    MeasurementRequest,
    SendAnswer,
    WorkerCommand,
    answer_commands,
    checked,
    offers,
    sentence_of,
)
from servers.measuring.resources import Resources
from servers.models.registry import SOURCES
from servers.models.specification import ModelSpecification
from servers.models.weights import WeightsSource
from servers.options.libraries import import_library

Shape = tuple[int, int | None]
"""A batch size and a length; the length is None for a model without an axis of variable size."""


def main(arguments: Sequence[str]) -> int:
    """Run one of the five forms; the exit status is 1 when the last answer was an error."""
    faulthandler.enable()  # a crash in a library writes the Python stack to the log
    request: MeasurementRequest | Exception | None
    try:
        request = _request(arguments)
    except Exception as exc:  # noqa: BLE001  answered below, like every other failure
        request = exc
    with answers_only() as output:

        def answer(value: object) -> None:
            output.write(msgspec.json.encode(value, enc_hook=str) + b"\n")
            output.flush()

        try:
            return _run(arguments, request, answer)
        except BrokenPipeError:  # the caller has gone
            return 1
        except Exception as exc:  # noqa: BLE001  the caller hears of every failure, whichever library it came from
            traceback.print_exc()
            answer({"error": sentence_of(exc)})
            return 1


def _run(arguments: Sequence[str], request: MeasurementRequest | Exception | None, answer: SendAnswer) -> int:
    match arguments, request:
        case _, Exception():
            raise request
        case ["--check"], _:
            requests = msgspec.json.decode(sys.stdin.buffer.read(), type=list[MeasurementRequest])
            answer([checked(each) for each in requests])
        case ["--offers", device], _:
            answer(offers(device))
        case ["--offers", device, "generation"], _:
            answer(offers(device, generating=True))
        case ["--prepare", _], MeasurementRequest(generates=True):
            answer({"file": False, "conversions": []})
        case [_], MeasurementRequest(generates=True):
            with private_compile_cache():
                from servers.measuring.generation_cells import serve_generation

                serve_generation(request, sys.stdin.buffer, answer)
        case ["--prepare", _], MeasurementRequest():
            answer(_prepare(request))
        case ["--fastest", _, deadline, *others], MeasurementRequest():
            for chosen in chosen_engine(request, others, float(deadline)):
                answer(chosen)
        case [_], MeasurementRequest():
            with private_compile_cache():
                _serve(request, sys.stdin.buffer, answer)
        case _:
            answer({"error": "give one request as JSON, --prepare REQUEST, --check or --offers DEVICE"})
            return 2
    return 0


@contextmanager
def answers_only() -> Iterator[BinaryIO]:
    """Standard output for answers alone: all else that this process or a library writes there goes to standard
    error."""
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "wb") as output:
        os.dup2(2, 1)
        yield output


@contextmanager
def private_compile_cache() -> Iterator[None]:
    """Give torch.compile and the torch engine's plans an empty cache: a process that finds another one's would start
    sooner than a first one. A cache that the user chose is used."""
    with TemporaryDirectory(prefix="abserve-compiled-") as folder:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", folder)
        os.environ.setdefault(PLANS_FOLDER, str(Path(folder) / "plans"))
        yield


def _request(arguments: Sequence[str]) -> MeasurementRequest | None:
    """The request among the arguments; None in a form without one. Continues in another interpreter where the engine's
    libraries are there: standard input is unread, standard output is untouched, and the request comes along."""
    match arguments:
        case ["--check"] | ["--offers", *_]:
            return None
        case [text] | ["--prepare", text] | ["--fastest", text, *_]:
            request = msgspec.json.decode(text, type=MeasurementRequest)
            enter(request.environment)
        case _:
            return None
    if request.profile and request.on_cpu and not request.generates:
        quiet_profiler()
    return request


def _prepare(request: MeasurementRequest) -> dict[str, object]:
    """Make the model's own answers and the file that the engine executes: whether it executes one, and its steps."""
    specification = request.specification()
    weights = specification.pinned(request.weights)
    _references(request, specification, weights)
    conversions, path = _converted(request, specification, weights)
    return {"file": path is not None, "conversions": conversions}


def _references(
    request: MeasurementRequest, specification: ModelSpecification, weights: WeightsSource
) -> list[Reference]:
    sizes = [specification.along(length) for length in request.lengths]
    path = Path(request.references) if request.references else None
    return stored_references(specification, weights, sizes, path)


def _converted(
    request: MeasurementRequest, specification: ModelSpecification, weights: WeightsSource, began: float | None = None
) -> tuple[list[dict[str, Any]], Path | None]:
    """The steps from the model to the file that the engine executes, and the file; the steps of a TensorRT plan have
    no manifest, so they are known only when it is made."""
    began, started_ns = began or time.time(), time.perf_counter_ns()
    path, manifest = artefact(specification, weights, request.settings(), Path(request.artefacts))
    seconds = _seconds_since(started_ns)
    if path is None or path == specification.file:
        return [], path
    status = path.stat()
    made_now = status.st_mtime >= began
    if manifest is None and not made_now:
        return [], path
    name, source = "build" if manifest is None else "export", list[dict[str, Any]]()
    if manifest is not None and manifest.quantisation is not None:
        plain = msgspec.structs.replace(request, engine="openvino", precision="fp32")  # the file that INT8 is made from
        name, (source, _) = "quantise", _converted(plain, specification, weights, began)
    step = {
        "step": name,
        "seconds": seconds if manifest is None else manifest.seconds,
        "made_now": made_now,
        "file": path.name,
        "file_bytes": status.st_size,
        "sha256": None if manifest is None else manifest.sha256,
    }
    return [*source, step], path


def _serve(request: MeasurementRequest, commands: BinaryIO, answer: SendAnswer) -> None:
    """Load the engine, say that it is ready, and answer the commands."""
    specification = request.specification()
    weights = specification.pinned(request.weights)
    settings = request.settings()
    references = dict(zip(request.lengths, _references(request, specification, weights), strict=True))
    conversions, path = _converted(request, specification, weights)
    with closing(Resources(settings.device)) as resources:
        import_seconds = _import_libraries(request.engine, specification, path)
        with loaded_engine(specification, weights, settings, path, request.batches) as (measured, load_seconds):
            ready = {
                "import_seconds": import_seconds,
                "load_seconds": load_seconds - measured.engine.check_seconds,
                "conversions": conversions,
                "description": asdict(measured.engine.describe()),
                "item": specification.item,
            }
            first_ns = _first_calls(measured, references, request.batches) if request.first_calls else {}
            answer({"ready": ready})
            times: dict[Shape, EngineTimes] = {}

            def answer_to(command: WorkerCommand) -> dict[str, object]:
                if command.profile:
                    shapes = [times[shape] for shape in command.profile]
                    return {"profiled": _profiled(measured.engine, specification, shapes)}
                shape = (command.batch, command.length)
                cell, times[shape] = measured_cell(measured, references[command.length], command, resources)
                cell["first_call_ns"] = first_ns.pop(shape, cell["first_call_ns"])
                return {"measured": cell}

            answer_commands(commands, answer, answer_to)


def _import_libraries(engine: str, specification: ModelSpecification, path: Path | None) -> float:
    """Import the engine's libraries, and the model's if its own module is executed; the seconds that it took."""
    started_ns = time.perf_counter_ns()
    source = specification.reference.partition(":")[0]
    for library in (*engine_kind(engine).libraries, *([source] if source in SOURCES and path is None else [])):
        import_library(library)
    return _seconds_since(started_ns)


def _first_calls(
    measured: MeasuredEngine, references: Mapping[int | None, Reference], batches: Sequence[int]
) -> dict[Shape, int]:
    """The nanoseconds of every shape's first call that succeeds; one that fails will say so when it is measured."""
    first_ns: dict[Shape, int] = {}
    for (length, reference), batch in product(references.items(), batches):
        try:
            first_ns[batch, length] = measured.first_call_ns(batch, reference)
        except Exception:  # noqa: BLE001  every library has errors of its own
            traceback.print_exc()
    return first_ns


def measured_cell(
    measured: MeasuredEngine, reference: Reference, command: WorkerCommand, resources: Resources
) -> tuple[dict[str, Any], EngineTimes]:
    """One cell, with the fields of the load generator's record `Measured`, and its times."""
    batch = command.batch
    resources.begin()
    times = measured.measure(batch, reference, command.seconds, in_rounds=True)
    energy = resources.energy(measured.run(batch, reference)) if command.energy else None
    joules, runs, seconds_per_run = energy or (None, 0, None)
    null = Disagreement({}, "the null engine computes no model")
    comparison = null if measured.engine.describe().kind == "null" else times.comparison
    cell = {
        "batch": batch,
        "length": command.length,
        "first_call_ns": times.first_call_ns,
        "calls_ns": times.calls_ns,
        "executions_ns": times.executions_ns,
        "cosine_min": comparison.cosine_min,
        "top1": comparison.top1,
        "relative_error": comparison.relative_error,
        "fault": comparison.fault,
        "flops_per_item": reference.flops_per_item,
        **resources.memory(),
        "energy_joules": joules,
        "energy_items": runs * batch,
        "sustained_ns": None if seconds_per_run is None else round(seconds_per_run * 1e9),
    }
    return cell, times


def _profiled(
    engine: Engine, specification: ModelSpecification, times: Sequence[EngineTimes]
) -> list[list[dict[str, Any]]]:
    """The longest kernels of each cell; none where the engine cannot be profiled."""
    from servers.measuring.profile import TOP_KERNELS, profile_engine

    profiles = profile_engine(engine, specification, times)
    if isinstance(profiles, str):
        print(f"no profile: {profiles}", file=sys.stderr)  # noqa: T201  the log of this process
        return [[] for _ in times]
    return [
        [
            {
                "name": kernel["label"],
                "count": kernel["count"],
                "seconds": kernel["us"] / 1e6,
                "share": kernel["share"],
            }
            for kernel in batch["kernels"][:TOP_KERNELS]
        ]
        for batch in profiles
    ]


def _seconds_since(started_ns: int) -> float:
    return (time.perf_counter_ns() - started_ns) / 1e9


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
