"""`abserve serve native`: checks the options, finds the artefact, and becomes the server process or prints its plan."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
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
from servers.language.specification import LanguageModel, is_language_model, language_model
from servers.language.weights import FileWeights, pin_language_weights
from servers.measuring.fastest import OWN, fastest_engine
from servers.models.images import DecodingSettings
from servers.models.registry import get_variants
from servers.models.sources import module_file
from servers.models.specification import ModelSpecification
from servers.models.weights import WeightsSource, parse_weights, pin
from servers.native.shared.keys import Keys
from servers.native.shared.recording import check_recording
from servers.native.shared.settings import (
    NO_BATCHES,
    TENSORS_ONLY,
    TOKENS_ONLY,
    NativeSettings,
    artefact_field,
    of_other_kind,
    watched_files,
)
from servers.native.shared.tls import Certificate
from servers.options.command_line import given_options, takes_settings, to_argument, tuning_of, with_tuning
from servers.options.defaults import ARTEFACTS, OptionError, usable_cores
from servers.options.launch import LaunchPlan, bind, check_free, host_in_url
from servers.options.search import space_json
from servers.protocol.examples import completion_commands, infer_commands

CAUSES = (r"the model cannot be served.* reason=(?P<quote>['\"])(?P<cause>.+)(?P=quote)",)
"""How this server's log says why it ended."""
Artefact = tuple[Path, dict[str, object] | None]
"""An exported file and its manifest."""


echo = partial(typer.echo, err=True)

Models = tuple[ModelSpecification, ...] | LanguageModel
"""The variants of one model of tensors, or a language model."""


@dataclass(frozen=True, slots=True)
class NativeLaunch:
    """Checked options: the settings are valid and the ports were free a moment ago."""

    settings: NativeSettings
    models: Models
    weights: WeightsSource | FileWeights
    tuning: Mapping[str, str] = field(default_factory=dict)

    @property
    def needs_artefacts(self) -> tuple[ModelSpecification, ...]:
        """The models whose exported file the engine executes; JPEG and UINT8 share theirs."""
        if isinstance(self.models, LanguageModel) or engine_kind(self.settings.engine).executes is None:
            return ()
        return tuple({s.executed.name: s.executed for s in self.models}.values())

    def plan(self, artefacts: Mapping[str, Artefact]) -> LaunchPlan:
        """How to start the process; `artefacts` has one entry for each name in `needs_artefacts`."""
        paths = {artefact_field(s): artefacts[s.name][0] for s in self.needs_artefacts}
        settings = self.settings.model_copy(update=paths)
        name, most, artefact = "", None, None
        cannot_pad: str | None = "a language model has no batches to pad"
        host = host_in_url(settings.host)
        secure = "s" if settings.tls_certificate else ""
        url = f"http{secure}://{host}:{settings.http_port}"
        if isinstance(self.models, LanguageModel):
            name = self.models.name
            examples = completion_commands(url, name)
        else:
            first, most = self.models[0], settings.max_batch_size
            name, cannot_pad = first.name, first.cannot_pad
            artefact = artefacts[first.executed.name][1] if artefacts else None
            examples = infer_commands(url, name, first.inputs)
        return LaunchPlan(
            argv=(sys.executable, "-P", "-m", "abserve", "-m", "servers.native", to_argument(settings)),
            env={} if settings.choices == "stored" else {CHOICES: settings.choices},
            http_url=url,
            grpc_address=f"{'grpcs://' if secure else ''}{host}:{settings.grpc_port}" if settings.grpc_port else None,
            metrics_url=f"{url}/metrics",
            model=name,
            title=f"native {settings.engine} {settings.precision}",
            max_batch_size=most,
            cannot_pad=cannot_pad,
            artefact=artefact,
            tuning=dict(self.tuning),
            examples=examples,
            causes=CAUSES,
        )


def _requested(options: Mapping[str, Any]) -> NativeSettings:
    return NativeSettings(**{name: value for name, value in options.items() if value is not None})


def _resolved(requested: NativeSettings) -> tuple[NativeSettings, Models]:
    """The settings in effect. Raises for an option that the server cannot honour."""
    if is_language_model(requested.model):
        if requested.max_batch_size != NativeSettings.model_fields["max_batch_size"].default:
            raise OptionError(NO_BATCHES)
        model = language_model(requested.model, requested.weights)
        return requested.resolved_for(model), model
    requested.check_for_tensors()
    specifications = get_variants(requested.model, requested.payloads)
    first = specifications[0]
    settings = requested.resolved(first)
    for engine in settings.of_engines():
        engine.engine_settings().check_here()
    check_engine(first.executed, settings.engine_settings())
    padding_of(first, settings.pad_sizes)
    return settings, specifications


def check(options: Mapping[str, Any], artefacts: Path = Path(ARTEFACTS)) -> NativeLaunch:
    """Choose the engine if that is `auto`, among those whose files lie in `artefacts`.

    Raises an error whose message is one sentence, at the first option that the server cannot honour.
    """
    requested = _requested(options)
    requested = with_tuning(requested, requested.tuning)
    settings, models = _resolved(requested)
    language = isinstance(models, LanguageModel)
    enter(generating_environment(settings.engine) if language else environment_of(settings.engine))
    Keys.of(settings)
    Certificate.of(settings)
    check_recording(settings)
    bind(settings.host, settings.http_port).close()
    check_free(settings.host, settings.grpc_port, "--grpc-port")
    weights: WeightsSource | FileWeights
    if isinstance(models, LanguageModel):
        weights, reference = pin_language_weights(models.weights, models.fields), models.reference
    else:
        first = models[0]
        if settings.reload != "off" and "@sha256:" in (settings.weights or ""):
            raise OptionError(
                "--reload with a pinned --weights would never load another file: leave out @sha256: and the hash"
            )
        weights = pin(parse_weights(settings.weights, first.default_weights), first.find_pretrained)
        watched_files(settings, models, weights)
        # A user's own module is tried in no other engine.
        if requested.engine == "auto" and settings.engine == OWN and not module_file.takes(first.reference):
            engine = settings.of_engines()[0].engine_settings()
            chosen = fastest_engine(first.executed, weights, engine, artefacts, settings.choices, echo)
            settings = settings.model_copy(update={"engine": chosen})
        # A path is absolute: a supervisor may start the server from another folder.
        reference = first.reference if first.reference.startswith("/") else settings.model
    record = settings.record and settings.record.absolute()
    settings = settings.model_copy(update={"weights": weights.text, "model": reference, "record": record})
    return NativeLaunch(settings, models, weights, tuning_of(requested))


def space(options: Mapping[str, Any], given: Collection[str]) -> bytes:
    """What can be tuned, as `--print-space` prints it. Raises as `check` does; ports do not matter."""
    requested = _requested(options)
    in_effect: dict[str, object]
    settings, models = _resolved(requested)
    if isinstance(models, LanguageModel):
        here = language_context(settings.language_engine(), usable_cores(), generating_engines())
        not_searched: list[str] = []
        in_effect = {"slots": settings.slots or SLOTS[here.device]}
    else:
        first, engine = models[0], settings.engine_settings()
        pin(parse_weights(settings.weights, first.default_weights), first.find_pretrained)
        cores = usable_cores() // len(settings.devices)
        here, not_searched = tensor_context(first, engine, max(1, cores))
        in_effect = {"decode_threads": DecodingSettings(settings.decode_threads).thread_count}
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
        language = is_language_model(str(options.get("model")))
        # With the default's value, too; a variable may have it for servers of both kinds.
        for name in sorted(given_options(context, options, variables=False)):
            if language and name == "max_batch_size":
                raise OptionError(NO_BATCHES)
            if name in (TENSORS_ONLY if language else TOKENS_ONLY):
                raise OptionError(of_other_kind(name))
        launch = check(options, artefacts)
        return launch.plan({model.name: _artefact(launch, model, artefacts) for model in launch.needs_artefacts})

    serve(
        plan,
        lambda: space(options, given_options(context, options)),
        print_launch=print_launch,
        print_space=print_space,
    )


def _artefact(launch: NativeLaunch, specification: ModelSpecification, root: Path) -> Artefact:
    """The exported file, made first when it is missing, and its manifest."""
    from servers.export.artefacts import executed_file  # not above: it imports an engine

    assert not isinstance(launch.weights, FileWeights)  # those of a language model, which no file is made of
    path, manifest = executed_file(
        launch.settings.engine,
        launch.settings.precision,
        specification,
        launch.weights,
        root,
        progress=echo,
        max_batch_size=launch.settings.max_batch_size,
    )
    return path.absolute(), None if manifest is None else manifest.to_dict()
