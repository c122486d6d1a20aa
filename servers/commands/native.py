"""`abserve serve native`: checks the options, finds the artefact, and becomes the server process or prints its plan."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from servers.commands.serving import PrintLaunch, PrintSpace, serve
from servers.commands.spaces import generating_engines, language_context, tensor_context
from servers.engines.factory import check_engine, enter, environment_of
from servers.engines.interface import CHOICES
from servers.engines.padding import pad_to_text, padding_of
from servers.engines.settings import engine_kind
from servers.language.engine import SLOTS, generating_environment
from servers.language.options import TOKENS_ONLY, of_other_kind
from servers.language.specification import LanguageModel, is_language_model, language_model
from servers.measuring.fastest import OWN, fastest_engine
from servers.models.images import DecodingSettings
from servers.models.registry import get_variants
from servers.models.sources import module_file
from servers.models.specification import ModelSpecification
from servers.models.weights import parse_weights
from servers.native.shared.keys import Keys
from servers.native.shared.recording import check_recording
from servers.native.shared.settings import (
    NO_BATCHES,
    TENSORS_ONLY,
    NativeSettings,
    artefact_field,
    watched_files,
)
from servers.native.shared.tls import Certificate
from servers.options.command_line import given_options, is_chosen, takes_settings, to_argument, tuning_of, with_tuning
from servers.options.defaults import ARTEFACTS, OptionError, usable_cores
from servers.options.launch import PROGRAM, LaunchPlan, bind, check_free, host_in_url
from servers.options.search import space_json

CAUSES = (r"the model cannot be served.* reason=(?P<quote>['\"])(?P<cause>.+)(?P=quote)",)
"""How this server's log says why it ended."""
Artefact = tuple[Path, dict[str, object] | None]
"""An exported file and its manifest."""


echo = partial(typer.echo, err=True)

Models = tuple[ModelSpecification, ...] | tuple[LanguageModel]
"""The variants of one model of tensors, or a language model."""


def launch_plan(
    settings: NativeSettings,
    models: Models,
    file_of: Callable[[ModelSpecification], Artefact],
    tuning: Mapping[str, str] | None = None,
) -> LaunchPlan:
    """How to start the process with checked settings. `file_of` is the exported file of a model that an engine
    executes; JPEG and UINT8 share theirs."""
    first, files = models[0], dict[str, Artefact]()
    for model in models:
        if isinstance(model, ModelSpecification) and engine_kind(settings.engine).executes is not None:
            field = artefact_field(model.executed)
            files[field] = files.get(field) or file_of(model.executed)
    settings = settings.model_copy(update={field: path for field, (path, _) in files.items()})
    host = host_in_url(settings.host)
    secure = "s" if settings.tls_certificate else ""
    url = f"http{secure}://{host}:{settings.http_port}"
    return LaunchPlan(
        argv=(*PROGRAM, "servers.native", to_argument(settings)),
        env={} if settings.choices == "stored" else {CHOICES: settings.choices},
        http_url=url,
        grpc_address=f"{'grpcs://' if secure else ''}{host}:{settings.grpc_port}" if settings.grpc_port else None,
        metrics_url=f"{url}/metrics",
        model=first.name,
        title=f"native {settings.engine} {settings.precision}",
        max_batch_size=first.max_batch_size and settings.max_batch_size,
        cannot_pad=first.cannot_pad,
        artefact=next((manifest for _, manifest in files.values()), None),
        tuning=dict(tuning or {}),
        examples=first.examples(url),
        causes=CAUSES,
    )


def _requested(options: Mapping[str, Any]) -> NativeSettings:
    return NativeSettings(**{name: value for name, value in options.items() if value is not None})


def _resolved(requested: NativeSettings) -> tuple[NativeSettings, Models]:
    """The settings in effect. Raises for an option that the server cannot honour."""
    if is_language_model(requested.model):
        if is_chosen(requested, "max_batch_size"):
            raise OptionError(NO_BATCHES)
        model = language_model(requested.model, requested.weights)
        return requested.resolved_for(model), (model,)
    requested.check_for_tensors()
    specifications = get_variants(requested.model, requested.payloads)
    first = specifications[0]
    settings = requested.resolved(first)
    for engine in settings.of_engines():
        engine.engine_settings().check_here()
    check_engine(first.executed, settings.engine_settings())
    padding_of(first, settings.pad_sizes)
    return settings, specifications


def check(
    options: Mapping[str, Any], artefacts: Path = Path(ARTEFACTS)
) -> tuple[NativeSettings, Models, Mapping[str, str]]:
    """The settings of the process, its models, and the tuning in effect; the ports were free a moment ago. Chooses the
    engine if that is `auto`, among those whose files lie in `artefacts`.

    Raises an error whose message is one sentence, at the first option that the server cannot honour.
    """
    requested = _requested(options)
    requested = with_tuning(requested, requested.tuning)
    settings, models = _resolved(requested)
    first = models[0]
    elsewhere = environment_of if isinstance(first, ModelSpecification) else generating_environment
    enter(elsewhere(settings.engine))
    Keys.of(settings)
    Certificate.of(settings)
    check_recording(settings)
    bind(settings.host, settings.http_port).close()
    check_free(settings.host, settings.grpc_port, "--grpc-port")
    if settings.reload != "off" and "@sha256:" in (settings.weights or ""):
        raise OptionError(
            "--reload with a pinned --weights would never load another file: leave out @sha256: and the hash"
        )
    named = first.for_process(settings.model, settings.weights)
    if isinstance(first, ModelSpecification):
        weights = parse_weights(named["weights"])
        watched_files(settings, [first], weights)
        # A user's own module is tried in no other engine.
        if requested.engine == "auto" and settings.engine == OWN and not module_file.takes(first.reference):
            engine = settings.of_engines()[0].engine_settings()
            chosen = fastest_engine(first.executed, weights, engine, artefacts, settings.choices, echo)
            settings = settings.model_copy(update={"engine": chosen})
    record = settings.record and settings.record.absolute()
    return settings.model_copy(update={**named, "record": record}), models, tuning_of(requested)


def space(options: Mapping[str, Any], given: Collection[str]) -> bytes:
    """What can be tuned, as `--print-space` prints it. Raises as `check` does; ports do not matter."""
    requested = _requested(options)
    in_effect: dict[str, object]
    settings, models = _resolved(requested)
    first = models[0]
    if isinstance(first, ModelSpecification):
        first.pinned(settings.weights)
        cores = usable_cores() // len(settings.devices)
        here, not_searched = tensor_context(first, settings.engine_settings(), max(1, cores))
        in_effect = {"decode_threads": DecodingSettings(settings.decode_threads).thread_count}
    else:
        here, not_searched = language_context(settings.language_engine(), usable_cores(), generating_engines()), []
        in_effect = {"slots": settings.slots or SLOTS[here.device]}
    in_effect = {
        "threads": settings.of_engines()[0].threads or here.cores,
        "spinning": "on" if settings.spinning == "auto" else settings.spinning,
        "pad_to": pad_to_text(settings.pad_sizes),
        **in_effect,
    }
    # Each contender names its engine, which `auto` chooses on a CPU.
    stated = ["engine"] if requested.engine == "auto" and here.device == "cpu" and not here.language else []
    return space_json("native", settings, here, in_effect, given, not_searched, stated)


@takes_settings(NativeSettings)
def serve_native(
    context: typer.Context,
    artefacts: Annotated[
        Path, typer.Option(envvar="ABSERVE_NATIVE_ARTEFACTS", help="Folder of exported files; created if missing.")
    ] = Path(ARTEFACTS),
    print_launch: PrintLaunch = False,
    print_space: PrintSpace = False,
    **options: object,
) -> None:
    """Serve a model over the Open Inference Protocol, with PyTorch, ONNX Runtime or TensorRT inside."""

    def plan() -> LaunchPlan:
        refused = {name: of_other_kind(name) for name in TOKENS_ONLY}
        if is_language_model(str(options.get("model"))):
            refused = {name: of_other_kind(name) for name in TENSORS_ONLY} | {"max_batch_size": NO_BATCHES}
        # With the default's value, too; a variable may have it for servers of both kinds.
        if wrong := given_options(context, options, variables=False) & refused.keys():
            raise OptionError(refused[min(wrong)])
        settings, models, tuning = check(options, artefacts)
        return launch_plan(settings, models, partial(_artefact, settings, artefacts), tuning)

    serve(
        plan,
        lambda: space(options, given_options(context, options)),
        print_launch=print_launch,
        print_space=print_space,
    )


def _artefact(settings: NativeSettings, root: Path, specification: ModelSpecification) -> Artefact:
    """The exported file, made first when it is missing, and its manifest."""
    from servers.export.artefacts import executed_file  # not above: it imports an engine

    path, manifest = executed_file(
        settings.engine,
        settings.precision,
        specification,
        parse_weights(settings.weights),
        root,
        progress=echo,
        max_batch_size=settings.max_batch_size,
    )
    return path.absolute(), None if manifest is None else manifest.to_dict()
