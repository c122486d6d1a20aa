"""`abserve serve fastapi` and `abserve serve litserve`: check the options and become the server process."""

from __future__ import annotations

import sys
from collections.abc import Collection
from importlib.util import find_spec
from typing import Any

import typer

from servers.commands.serving import PrintLaunch, PrintSpace, serve
from servers.commands.spaces import language_context, plain_context
from servers.engines.settings import EngineSettings
from servers.language.engine import GenerationSettings, generation_precision
from servers.language.specification import LanguageModel, is_language_model, language_model
from servers.language.weights import pin_language_weights
from servers.models.specification import ModelSpecification
from servers.models.weights import parse_weights, pin
from servers.options.command_line import (
    checked,
    fail,
    flag_of,
    given_options,
    takes_settings,
    to_argument,
    tuning_of,
    with_tuning,
)
from servers.options.defaults import OptionError, usable_cores
from servers.options.launch import LaunchPlan, bind, host_in_url
from servers.options.search import space_json
from servers.plain.settings import PlainSettings


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


def _plan(kind: str, title: str, requested: PlainSettings) -> LaunchPlan:
    """How to start the server. Raises for what is wrong."""
    if is_language_model(requested.model):
        return _language_plan(kind, title, requested)
    requested = with_tuning(requested, requested.tuning)
    settings, name = _resolved(requested)
    assert settings.max_batch_size is not None
    return _launch(
        f"{kind}_server",
        settings,
        model=name,
        title=f"{title} torch {settings.precision}",
        max_batch_size=settings.max_batch_size,
        tuning=tuning_of(requested),
        cannot_pad=f"the {title} server does not pad",
    )


def _engine(requested: PlainSettings) -> tuple[ModelSpecification, EngineSettings]:
    specification = requested.specification()
    largest = specification.max_batch_size
    engine = EngineSettings("torch", requested.precision, "eager", requested.device, requested.threads, largest)
    engine.check_here()
    return specification, engine


def _resolved(requested: PlainSettings) -> tuple[PlainSettings, str]:
    """The settings with device, weights and largest batch chosen, and the model's name. Raises for what is wrong."""
    specification, engine = _engine(requested)
    largest = engine.max_batch_size
    weights = pin(parse_weights(requested.weights, specification.default_weights), specification.find_pretrained)
    bind(requested.host, requested.http_port).close()
    # A path is absolute: a supervisor may start the server from another folder.
    model = specification.reference if specification.reference.startswith("/") else requested.model
    chosen = {
        "model": model,
        "weights": weights.text,
        "device": engine.device_here(),
        "precision": engine.precision,
        "max_batch_size": largest,
    }
    return requested.model_copy(update=chosen), specification.name


def _language(kind: str, requested: PlainSettings) -> tuple[LanguageModel, str]:
    """The model and the device. Raises for what is wrong."""
    if kind != "fastapi":
        raise OptionError(f"abserve serve {kind} serves no language models; use fastapi, native, triton or vllm")
    for option in ("max_batch_size", "payloads", "max_queue_delay_us"):
        if getattr(requested, option) != PlainSettings.model_fields[option].default:
            raise OptionError(
                f"{flag_of(option)} has no effect on a language model: generate() serves one request each"
            )
    model = language_model(requested.model, requested.weights)
    GenerationSettings(precision=requested.precision).check()
    requested.check_length(model)
    device = EngineSettings("torch", "fp32", "eager", requested.device).device_here()
    return model, device


def _language_plan(kind: str, title: str, requested: PlainSettings) -> LaunchPlan:
    """The launch of a language model with generate(). Raises for what is wrong."""
    model, device = _language(kind, requested)
    bind(requested.host, requested.http_port).close()
    settings = requested.model_copy(
        update={
            "model": model.reference,
            "weights": pin_language_weights(model.weights, model.fields).text,
            "device": device,
            "precision": generation_precision(requested.precision, device),
        }
    )
    return _launch(
        "generate_server",
        settings,
        model=model.name,
        title=f"{title} generate() {settings.precision}",
        max_batch_size=None,
        cannot_pad="generate() runs one request at a time",
    )


def _space(kind: str, requested: PlainSettings, given: Collection[str]) -> bytes:
    """What can be tuned, as `--print-space` prints it. Raises for what is wrong; ports do not matter."""
    cores = usable_cores()
    if is_language_model(requested.model):
        _, device = _language(kind, requested)
        precision = generation_precision(requested.precision, device)
        generation = GenerationSettings(device=device, precision=precision)
        here = language_context(generation, cores)
        in_effect: dict[str, object] = {"precision": precision}
    else:
        specification, engine = _engine(requested)
        pin(parse_weights(requested.weights, specification.default_weights), specification.find_pretrained)
        here = plain_context(engine, cores)
        in_effect = {"precision": engine.precision, "max_batch_size": engine.max_batch_size}
    import torch  # not above: it takes seconds

    in_effect["threads"] = requested.threads or torch.get_num_threads()
    return space_json(kind, requested, here, in_effect, given)


def _launch(module: str, settings: PlainSettings, **of_model: Any) -> LaunchPlan:
    argv = (sys.executable, "-P", "-m", f"servers.plain.{module}", to_argument(settings))
    url = f"http://{host_in_url(settings.host)}:{settings.http_port}"
    return LaunchPlan(argv=argv, env={}, http_url=url, grpc_address=None, **of_model)
