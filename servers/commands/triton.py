"""`abserve serve triton`: prepares the embedded Triton, then prints its command line or runs it in the foreground."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, BinaryIO

import typer
from rich.console import Console

from servers.commands.serving import PRINT_SPACE, serve
from servers.commands.spaces import generating_engines, language_context, tensor_context
from servers.engines.factory import check_engine, environment_of
from servers.engines.interface import EngineError
from servers.engines.padding import pad_to_text, padding_of, parse_pad_to
from servers.engines.settings import EngineSettings, engine_kind, precision_on
from servers.export.manifest import Manifest
from servers.export.tensorrt import library_version
from servers.language.engine import SLOTS
from servers.language.specification import is_language_model, language_model
from servers.models.registry import get_variants
from servers.models.specification import ModelSpecification
from servers.models.weights import WeightsSource
from servers.native.shared.tls import Certificate
from servers.options.command_line import checked, fail, given_options, takes_settings
from servers.options.defaults import OptionError, usable_cores
from servers.options.launch import LaunchPlan, check_exposure, is_loopback
from servers.options.search import empty_space_json, space_json
from servers.triton.config import NATIVE_BACKENDS
from servers.triton.installation import Installation, TritonDiedError, TritonError
from servers.triton.launch import (
    assert_applies,
    assert_here,
    assert_python,
    assert_ready,
    choose_backend,
    does_not_pad,
    find_installation,
    language_backend,
    prepare,
    prepare_language,
    prepare_repository,
)
from servers.triton.process import TritonProcess
from servers.triton.repository import PlacedModel
from servers.triton.settings import TritonSettings

READY_SECONDS = 330.0
HEALTH_SECONDS = 0.5


@takes_settings(TritonSettings)
def serve_triton(
    context: typer.Context,
    print_launch: Annotated[
        bool,
        typer.Option(
            "--print-launch",
            envvar="ABSERVE_TRITON_PRINT_LAUNCH",
            help="Prepare everything, print the command line as JSON for a supervisor, and exit.",
            rich_help_panel="Output",
        ),
    ] = False,
    print_space: Annotated[bool, typer.Option(help=PRINT_SPACE, rich_help_panel="Output")] = False,
    **options: object,
) -> None:
    """Run a real tritonserver: one installed here, as in NVIDIA's images, or that of the wheel nvidia-pytriton."""
    settings = checked(TritonSettings, options)
    console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
    with _stdout_for_results() as results:
        try:
            serve(
                lambda: _plan(settings, console),
                lambda: _space(settings, given_options(context, options), console),
                print_launch=print_launch,
                print_space=print_space,
                out=results,
                start=lambda plan: _run(plan, settings.log_file or settings.folder / "tritonserver.log", console),
            )
        except TritonError as exc:
            if isinstance(exc, TritonDiedError):
                for line in exc.log_lines:
                    console.print(line, style="dim")
            fail(str(exc), exc)


def _plan(settings: TritonSettings, console: Console) -> LaunchPlan:
    """Check the options and the machine, export the model if its file is missing, and lay out the repository."""
    from servers.export.artefacts import executed_file

    check_exposure(settings.host, anyone=settings.anyone)
    Certificate.check(settings.tls_certificate)
    installation = find_installation(settings, announce=console.print)
    if not is_loopback(settings.host) and installation.version == "2.51":
        console.print(
            f"warning: Triton 2.51 is from 2024 and gets no fixes; only trusted clients may reach {settings.host}"
        )
    if settings.triton_repository is not None:
        return prepare_repository(settings, installation)
    if is_language_model(settings.model):
        return prepare_language(settings, installation, console.print)
    specifications = get_variants(settings.model, settings.payloads)
    assert_ready(settings)  # before the export, which takes most of a minute
    weights = specifications[0].pinned(settings.weights)
    backend = _choose_backend(settings, installation, specifications, weights)
    engine = _checked_engine(settings, specifications[0], backend)
    if backend != "python":
        if any(specification.payload == "jpeg" for specification in specifications):
            assert_python(installation, "decoding JPEG", "send another payload")
        if parse_pad_to(settings.pad_to):
            raise OptionError(f"--pad-to: {does_not_pad(backend)}; leave the option out, or use --backend python")
    release = library_version() if backend == "tensorrt" else None  # the python backend's is found with the bindings
    if backend == "tensorrt" and release is None:
        raise OptionError(
            "libnvinfer, which the tensorrt backend loads, was not found, so its version is unknown; add its folder to "
            "LD_LIBRARY_PATH, or use --backend onnxruntime"
        )
    files: dict[str, tuple[Path, Manifest | None]] = {}  # JPEG and UINT8 execute the same file
    models = []
    for specification in specifications:
        executed = specification.executed
        if engine_kind(engine.kind).executes is not None and executed.name not in files:
            files[executed.name] = executed_file(
                engine.kind,
                engine.precision,
                executed,
                weights,
                settings.artefacts,
                console.print,
                max_batch_size=engine.max_batch_size,
                release=release,
            )
        path, manifest = files.get(executed.name, (None, None))
        models.append(PlacedModel(specification, path, None if manifest is None else manifest.to_dict()))
    return prepare(settings, models, weights, installation, backend)


def _choose_backend(
    settings: TritonSettings,
    installation: Installation,
    specifications: Sequence[ModelSpecification],
    weights: WeightsSource,
) -> str:
    from servers.export.artefacts import current_plan

    def has_plan() -> bool:
        precision, release = precision_on("cuda", settings.precision), library_version()
        batch = settings.max_batch_size or specifications[0].max_batch_size
        return all(
            current_plan(precision, specification.executed, weights, settings.artefacts, batch, release)
            for specification in specifications
        )

    return choose_backend(settings, installation, has_plan)


def _checked_engine(settings: TritonSettings, specification: ModelSpecification, backend: str) -> EngineSettings:
    """The engine's settings. Raises `OptionError` for what this machine or this environment cannot do."""

    try:
        engine = settings.resolved_engine(backend)
        first = engine.on_first()
        check_engine(specification.executed, first)
        padding_of(specification, parse_pad_to(settings.pad_to))
        first.check_here()
        assert_applies(settings, backend, engine)
        if backend == "python":
            assert_here(engine.kind, environment_of(engine.kind))
    except EngineError as exc:
        raise OptionError(str(exc)) from exc
    return engine


def _space(settings: TritonSettings, given: Collection[str], console: Console) -> bytes:
    """What can be tuned, as `--print-space` prints it. Raises as `_plan` does; ports and folders do not matter."""

    installation = find_installation(settings, announce=console.print)
    if settings.triton_repository is not None:
        return empty_space_json("triton", "your own model repository is served unchanged")
    cores = usable_cores()
    in_effect: dict[str, object]
    if is_language_model(settings.model):
        backend = language_backend(settings, installation)
        settings.check_length(language_model(settings.model, settings.weights))
        generation = settings.resolved_generation()
        here = language_context(generation, cores, generating_engines())
        not_searched: list[str] = []
        in_effect = {
            "engine": generation.engine,
            "precision": generation.precision,
            "spinning": "off" if settings.spinning == "auto" else settings.spinning,
            "slots": settings.slots or SLOTS[here.device],
            "instances": 1,
        }
    else:
        specifications = get_variants(settings.model, settings.payloads)
        first = specifications[0]
        weights = first.pinned(settings.weights)
        backend = _choose_backend(settings, installation, specifications, weights)
        engine = _checked_engine(settings, first, backend)
        backends = [name for name in ("python", *NATIVE_BACKENDS) if _serves(settings, installation, first, name)]
        usual = settings.resolved_engine("python") if "python" in backends else engine
        here, not_searched = tensor_context(first, replace(usual, mode=settings.mode), cores, backends)
        in_effect = {
            "engine": usual.kind,
            "precision": engine.precision,
            "spinning": "on" if settings.spinning == "auto" else settings.spinning,
            "max_batch_size": engine.max_batch_size,
            "decode_threads": settings.decoding.thread_count,
            "instances": settings.instances_on(engine.device, backend),
        }
        not_searched.append(
            "merge-config with preferred_batch_size: NVIDIA recommends it only for TensorRT plans with several profiles"
        )
    in_effect |= {
        "backend": backend,
        "threads": settings.threads or cores,
        "pad_to": pad_to_text(parse_pad_to(settings.pad_to)),
    }
    # auto chooses the tensorrt backend as soon as there is a plan, which a contender may build.
    stated = ["backend"] if "tensorrt" in here.backends else []
    stated += ["instances"] if len(here.backends) > 1 else []  # each has another number by default
    return space_json("triton", settings, here, in_effect, given, not_searched, stated)


def _serves(
    settings: TritonSettings, installation: Installation, specification: ModelSpecification, backend: str
) -> bool:
    """Whether the installation can serve the model by this backend with the other options."""

    chosen = settings.model_copy(update={"backend": backend})
    try:
        choose_backend(chosen, installation, lambda: False)
        _checked_engine(chosen, specification, backend)
        if specification.payload == "jpeg":
            assert_python(installation, "decoding JPEG", "send another payload")
    except (OptionError, EngineError):
        return False
    return backend == "python" or not (
        parse_pad_to(settings.pad_to) or (backend == "tensorrt" and library_version() is None)
    )


def _run(plan: LaunchPlan, log_file: Path, console: Console) -> None:
    """Run in the foreground until a signal. Raises `TritonDiedError` if the server ends before."""
    asked_to_end = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: asked_to_end.set())
    console.print(f"starting {plan.title}; log: {log_file}")
    with TritonProcess(plan, log_file) as server:
        if not server.wait_ready(READY_SECONDS, asked_to_end):
            return
        console.print(f"ready: {plan.model} at {plan.http_url} (HTTP), {plan.grpc_address} (gRPC), {plan.metrics_url}")
        while not asked_to_end.wait(HEALTH_SECONDS):
            server.assert_alive()
        console.print("stopping")


@contextmanager
def _stdout_for_results() -> Iterator[BinaryIO]:
    """Keep the file descriptor of stdout for the result; other output there, also of C libraries, goes to stderr."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(os.dup(stdout), "wb") as results:
            yield results
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)
