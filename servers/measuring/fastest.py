"""Which engine executes a model fastest on the CPU: torch, or one that executes its exported file.

A start whose engine is `auto` asks, and the answer is stored like every other choice, so that later starts only read
it. The engines are loaded and measured in a process of their own, which ends before the server starts: the server is
the same at a first start and at a later one, and an engine that fails, or takes too long, costs only its own chance.
On a machine whose cores other programs use nothing is decided: the exported file executes, and is measured later.

Imports no library of an engine.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from importlib.metadata import version
from math import inf
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import msgspec

from servers.engines.agreement import disagreement, proof_at_load, proof_batch
from servers.engines.choice import (
    MOST_SECONDS,
    UNDECIDED_SECONDS,
    ChoiceCache,
    choices_folder,
    choices_wanted,
    code_sha256,
    processor,
    race,
)
from servers.engines.factory import build_engine, engines_here
from servers.engines.interface import CHOICES, Engine, EngineError
from servers.engines.processors import thread_count, wait_policy
from servers.engines.settings import EngineSettings
from servers.export.manifest import FILE_NAME, FUSED, FileForm, executed_form, package_versions
from servers.models.specification import ModelSpecification
from servers.models.weights import WeightsError, WeightsSource
from servers.options.defaults import MODE, SPINS, usable_cores
from servers.options.launch import PROGRAM
from servers.options.libraries import installed_versions

if TYPE_CHECKING:
    from servers.measuring.request import MeasurementRequest

OWN = "torch"
OTHERS = ("onnxruntime", "openvino")
"""Engines that are measured beside torch where they are installed."""
EXPORT_SECONDS = 180.0
"""How much longer a fresh choice may take that exports files first."""
RACE_SECONDS = 10.0
"""The most CPU time of one comparison of two engines without a clear lead."""
MARGIN, MOST_LOSS = 0.95, 1.05
"""An engine is taken instead of the one before it if it clearly needs at most this share of the CPU time (the geometric
mean of one item and several), and neither takes more than the second share. The ratio of two engines differs from
process to process: of nine starts with ViT-B-32 that of ONNX Runtime to torch was 0.92 to 1.02."""
SEVERAL = 4
"""Items of the larger batch: most batches on a CPU are small."""

TOO_LATE = "the machine was too busy to measure it in time"

Say = Callable[[str], None]


def fastest_engine(
    specification: ModelSpecification,
    weights: WeightsSource,
    settings: EngineSettings,
    root: Path,
    choices: str,
    say: Say,
) -> str:
    """The engine that `auto` is for these settings, which name torch; exported files lie in `root`.

    `choices` is that of the option: another value than `stored` counts instead of the variable's.

    Torch on a GPU, in a mode or a precision that only it has, for a file of the user, which is imported only by what
    serves it, and where no other engine is installed, has an exported file, or is to be chosen. Only a `fresh` choice
    exports files first: that takes longer than a start.
    """
    from_file = specification.file is not None or specification.definition_sha256 is not None
    wanted = choices_wanted(choices)
    if wanted == "off" or from_file or settings.mode != MODE or settings.device_here() != "cpu":
        return OWN
    installed = engines_here(specification, settings, OTHERS)["installed"]
    others = [
        name
        for name in OTHERS
        if name in installed and (wanted == "fresh" or _has_file(name, specification, weights, settings, root))
    ]
    if not others:
        return OWN
    cache = ChoiceCache(_key(specification, weights, settings, others), wanted)
    with cache.held():
        chosen = cache.read()
        if not _is_whole(chosen, others):
            if chosen:
                cache.reject()
            say(f"choosing an engine for this machine: {', '.join((OWN, *others))}; later starts read the choice")
            exported = all(_has_file(name, specification, weights, settings, root) for name in others)
            chosen = _measured_elsewhere(specification, weights, settings, others, root, wanted, exported=exported)
            cache.write(chosen, decided=bool(chosen["decided"]))
    say(_sentence(chosen))
    if cache.trouble:
        say(cache.trouble)
    return str(chosen["engine"])


def _has_file(
    engine: str, specification: ModelSpecification, weights: WeightsSource, settings: EngineSettings, root: Path
) -> bool:
    from servers.export.artefacts import artefact_folder  # not above: it imports an engine

    form = executed_form(engine, settings.precision)
    if form.operators == FUSED and not specification.fused_tower:
        form = FileForm(settings.precision)
    return (artefact_folder(root, specification, weights, form) / FILE_NAME).is_file()


def _is_whole(chosen: Mapping[str, Any], others: list[str]) -> bool:
    kinds = {"decided": bool, "races": list, "left_out": dict}
    known = chosen.get("engine") in (OWN, *others)
    return known and all(isinstance(chosen.get(name), kind) for name, kind in kinds.items())


def _key(
    specification: ModelSpecification, weights: WeightsSource, settings: EngineSettings, others: list[str]
) -> dict[str, str]:
    engines = Path(__file__).parents[1] / "engines"
    return {
        "choice": "engine",
        "model": specification.label,
        "inputs": str([(tensor.name, tensor.datatype, list(tensor.shape)) for tensor in specification.inputs]),
        "weights": weights.label,
        "precision": settings.precision,
        "threads": str(thread_count(settings.threads)),
        "spinning": str(settings.spinning),
        "rows": str(min(SEVERAL, settings.max_batch_size)),
        "pad_to": str(settings.pad_to),
        "engines": " ".join([OWN, *others]),
        "versions": str(sorted({**package_versions(), **installed_versions(others)}.items())),
        "processor": processor(),
        "abserve": version("abserve"),
        "code": "".join(map(code_sha256, (engines, engines / "torch", Path(__file__).parent))),
    }


def _measured_elsewhere(
    specification: ModelSpecification,
    weights: WeightsSource,
    settings: EngineSettings,
    others: list[str],
    root: Path,
    choices: str,
    *,
    exported: bool,
) -> dict[str, Any]:
    """What `chosen_engine` says in another process, or had said until it failed or took too long. Before it says
    anything it is torch, or, where time was short and all engines have their file, the first other one."""
    most_seconds = MOST_SECONDS + (0.0 if exported else EXPORT_SECONDS)
    request = {
        "model": specification.reference,
        "payload": specification.payload if specification.image is not None else "",
        "weights": weights.text,
        "engine": OWN,
        "precision": settings.precision,
        "device": "cpu",
        "threads": settings.threads,
        "batches": sorted({1, min(SEVERAL, settings.max_batch_size)}),
        "artefacts": str(root),
    }
    text = msgspec.json.encode(request).decode()
    worker = (*PROGRAM, "servers.measuring.worker")
    command = [*worker, "--fastest", text, str(monotonic() + most_seconds), *others]
    said, reason, engine = b"", f"not measured within {most_seconds:.0f} s", others[0] if exported else OWN
    try:
        said = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            timeout=most_seconds,
            env={**os.environ, **wait_policy(spinning=False), CHOICES: choices},
        ).stdout
        reason, engine = "the process that measures engines ended early; its errors are above", OWN
    except subprocess.TimeoutExpired as exc:
        said = exc.stdout or b""
    left_out = {name: reason for name in (OWN, *others) if name != engine}
    answers: list[Any] = [{"engine": engine, "decided": False, "races": [], "left_out": left_out}]
    for line in said.splitlines(keepends=True):
        with suppress(msgspec.DecodeError):  # of a line that is not whole
            answers.append(msgspec.json.decode(line))
    whole = [answer for answer in answers if isinstance(answer, dict) and "engine" in answer]
    if isinstance(answers[-1], dict) and "error" in answers[-1]:
        reason = str(answers[-1]["error"])
    chosen: dict[str, Any] = whole[-1]
    if not chosen["decided"]:
        chosen["left_out"] = {name: why or reason for name, why in chosen["left_out"].items()}
    return chosen


def _sentence(chosen: Mapping[str, Any]) -> str:
    """What was chosen, with what was measured, and where that is stored."""
    facts = "; ".join((*chosen["races"], *(f"{name} left out: {why}" for name, why in chosen["left_out"].items())))
    time = "" if chosen["decided"] else f" for {UNDECIDED_SECONDS // 60} minutes"
    return f"engine {chosen['engine']}: {facts}; stored in {choices_folder()}{time}, --choices fresh chooses again"


def chosen_engine(
    request: MeasurementRequest, others: Sequence[str], deadline: float = inf
) -> Iterator[dict[str, Any]]:
    """Load torch and the other engines in this process, and race them: what is chosen so far, after each of them. An
    engine that fails, or whose answers are not those of torch, is left out. No round begins that would end after the
    `deadline`, in `monotonic` seconds."""
    from servers.measuring.measurement import artefact

    specification = request.specification()
    weights = specification.pinned(request.weights)
    left_out, memory_mib, races = dict.fromkeys(others, ""), dict[str, int](), list[str]()
    proof = proof_at_load(specification, max(request.batches))
    batches = [proof_batch(specification, rows, 0).inputs for rows in request.batches]
    with ExitStack() as loaded:

        def load(name: str) -> tuple[Engine, Mapping[str, Any]]:
            spinning = False if name in SPINS else None
            settings = msgspec.structs.replace(request, engine=name, spinning=spinning).settings()
            path, _ = artefact(specification, weights, settings, Path(request.artefacts))
            before = _resident_mib()
            engine = build_engine(specification, weights, settings, path)
            loaded.callback(engine.close)
            engine.load()
            answers = proof.without_padding(engine.infer(proof.inputs))
            memory_mib[name] = _resident_mib() - before
            return engine, answers

        engines, decided = dict[str, Engine](), True
        (engines[OWN], expected), leading = load(OWN), OWN
        for name in others:
            try:
                engines[name], answers = load(name)
            except (EngineError, WeightsError) as exc:
                left_out[name] = str(exc)
                continue
            if fault := disagreement(specification, expected, answers, request.precision).fault:
                left_out[name] = f"its answers are not torch's: {fault}"
                continue
            # Torch has to win the first race: of engines that are as fast the other one starts sooner, in less memory.
            leading, second = (leading, name) if races else (name, leading)
            rest = {other: why for other, why in left_out.items() if other != leading}
            yield {"engine": leading, "decided": False, "races": races, "left_out": rest}
            pairs = [
                (partial(engines[leading].infer, inputs), partial(engines[second].infer, inputs)) for inputs in batches
            ]
            has_cores = thread_count(request.threads) <= usable_cores()  # else they wait for each other
            result = race(pairs, RACE_SECONDS, MARGIN, MOST_LOSS, deadline, undisturbed=has_cores)
            if not result.decided:  # so would the next ones be
                left_out, decided = {other: why or TOO_LATE for other, why in {second: "", **rest}.items()}, False
                break
            races.append(
                f"{second} takes {_listed(result.other_ms)} ms of CPU time for {_listed(request.batches)} items and "
                f"{memory_mib[second]} MiB, {leading} {_listed(result.own_ms)} ms and {memory_mib[leading]} MiB"
            )
            del left_out[name]
            leading = second if result.won else leading
            yield {"engine": leading, "decided": False, "races": races, "left_out": left_out}
    yield {"engine": leading, "decided": decided, "races": races, "left_out": left_out}


def _listed(numbers: Iterable[float]) -> str:
    return " and ".join(f"{number:.4g}" for number in numbers)


def _resident_mib() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 // 2**20
