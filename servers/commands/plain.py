"""`abserve serve fastapi` and `abserve serve litserve`: check the options and become the server process."""

from __future__ import annotations

from collections.abc import Collection
from importlib.util import find_spec
from typing import Any

import typer

from servers.commands.serving import PrintLaunch, PrintSpace, serve
from servers.commands.spaces import language_context, plain_context
from servers.engines.settings import EngineSettings, resolved_device
from servers.language.engine import GenerationSettings, generation_precision
from servers.language.specification import LanguageModel, is_language_model, language_model
from servers.models.specification import ModelSpecification
from servers.native.shared.tls import Certificate
from servers.options.command_line import (
    checked,
    fail,
    flag_of,
    given_options,
    is_chosen,
    takes_settings,
    to_argument,
    tuning_of,
    with_tuning,
)
from servers.options.defaults import OptionError, usable_cores
from servers.options.launch import PROGRAM, LaunchPlan, bind, check_exposure, host_in_url
from servers.options.search import space_json
from servers.plain.settings import PlainSettings
from servers.protocol.examples import infer_commands


@takes_settings(PlainSettings)
def serve_fastapi(
    context: typer.Context, print_launch: PrintLaunch = False, print_space: PrintSpace = False, **options: object
) -> None:
    """Serve a model with FastAPI, uvicorn and torch, as most people write it."""
    _serve("fastapi", "FastAPI", context, options, print_launch=print_launch, print_space=print_space)


@takes_settings(PlainSettings)
def serve_litserve(
    context: typer.Context, print_launch: PrintLaunch = False, print_space: PrintSpace = False, **options: object
) -> None:
    """Serve a model with LitServe and torch; needs the extra litserve."""
    if find_spec("litserve") is None:
        fail("LitServe is not installed; run: pip install 'abserve[servers,litserve]'")
    _serve("litserve", "LitServe", context, options, print_launch=print_launch, print_space=print_space)


def _serve(
    kind: str, title: str, context: typer.Context, options: dict[str, object], *, print_launch: bool, print_space: bool
) -> None:
    requested = checked(PlainSettings, options)
    given = given_options(context, options)
    serve(
        lambda: _plan(kind, title, requested),
        lambda: _space(kind, requested, given),
        print_launch=print_launch,
        print_space=print_space,
    )


def _chosen(kind: str, requested: PlainSettings) -> tuple[ModelSpecification | LanguageModel, dict[str, Any]]:
    """The model, and the settings that `auto` leaves to it and to the machine. Raises for what is wrong."""
    if not is_language_model(requested.model):
        if kind != "fastapi" and requested.workers > 1:
            raise OptionError(f"--workers is for FastAPI; abserve serve {kind} has one process for the model")
        requested.check_for_tensors()
        specification = requested.specification()
        largest = specification.max_batch_size
        engine = EngineSettings("torch", requested.precision, "eager", requested.device, requested.threads, largest)
        engine.check_here()
        return specification, {"device": engine.device_here(), "precision": engine.precision, "max_batch_size": largest}
    if kind != "fastapi":
        raise OptionError(f"abserve serve {kind} serves no language models; use fastapi, native, triton or vllm")
    for option in ("max_batch_size", "payloads", "max_queue_delay_us", "workers"):
        if is_chosen(requested, option):
            raise OptionError(
                f"{flag_of(option)} has no effect on a language model: generate() serves one request each"
            )
    model = language_model(requested.model, requested.weights)
    GenerationSettings(precision=requested.precision).check()
    requested.check_length(model)
    device = resolved_device(requested.device)
    return model, {"device": device, "precision": generation_precision(requested.precision, device)}


def _plan(kind: str, title: str, requested: PlainSettings) -> LaunchPlan:
    """How to start the server. Raises for what is wrong."""
    requested = with_tuning(requested, requested.tuning)
    model, chosen = _chosen(kind, requested)
    check_exposure(requested.host, anyone=requested.anyone)
    Certificate.check(requested.tls_certificate)
    bind(requested.host, requested.http_port).close()
    named = model.for_process(requested.model, requested.weights)
    settings = requested.model_copy(update={**chosen, **named})
    scheme = "http" if settings.tls_certificate is None else "https"
    url = f"{scheme}://{host_in_url(settings.host)}:{settings.http_port}"
    program, runs, cannot_pad = "generate", "generate()", "generate() runs one request at a time"
    examples = model.examples(url)
    if isinstance(model, ModelSpecification):
        program, runs, cannot_pad = kind, "torch", f"the {title} server does not pad"
        examples = infer_commands(url, model.name, model.inputs, takes_json=False)
    return LaunchPlan(
        argv=(*PROGRAM, f"servers.plain.{program}_server", to_argument(settings)),
        env={},
        http_url=url,
        grpc_address=None,
        model=model.name,
        title=f"{title} {runs} {settings.precision}",
        max_batch_size=settings.max_batch_size,
        tuning=tuning_of(requested),
        examples=examples,
        cannot_pad=cannot_pad,
    )


def _space(kind: str, requested: PlainSettings, given: Collection[str]) -> bytes:
    """What can be tuned, as `--print-space` prints it. Raises for what is wrong; ports do not matter."""
    cores = usable_cores()
    model, chosen = _chosen(kind, requested)
    if isinstance(model, LanguageModel):
        here = language_context(GenerationSettings(device=chosen["device"], precision=chosen["precision"]), cores)
    else:
        model.pinned(requested.weights)
        here = plain_context(EngineSettings("torch", device=chosen["device"]), cores)
    if kind != "fastapi" or here.language:
        given = {*given, "workers"}  # it has one
    import torch  # not above: it takes seconds

    in_effect = {**chosen, "threads": requested.threads or torch.get_num_threads()}
    return space_json(kind, requested, here, in_effect, given)
