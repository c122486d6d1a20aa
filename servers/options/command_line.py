"""Command-line options from a settings class: each field's name, type, limits, default, group and help exist once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NoReturn, TypeVar, get_args, get_origin

from pydantic import Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, SettingsConfigDict

from servers.options import search
from servers.options.defaults import ALL, NONE, chosen_tuning

S = TypeVar("S", bound=BaseSettings)


Tuning = Annotated[
    str,
    Field(
        title="Output",
        description="Which of the settings that only affect speed apply: all, none (the server's own defaults), or a "
        "list of their names. abserve compare uses it to find a setting that makes a server slow.",
    ),
]


@dataclass(frozen=True, slots=True)
class OptionTraits:
    """Annotates a field of a settings class that is not an ordinary option of the command."""

    offered: bool = True
    """False: the command sets the value itself."""
    hidden: bool = False
    """True: the help does not show it."""
    of_model: bool = False
    """True: without it the model decides, and the command passes None on."""
    tunes: bool = False
    """True: it only affects the speed, and the server is meant to be fast without it."""


def settings_of(prefix: str) -> SettingsConfigDict:
    """The configuration of a settings class whose environment variables begin with `prefix`."""
    return SettingsConfigDict(env_prefix=prefix, extra="forbid", frozen=True)


def takes_settings(kind: type[BaseSettings]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace the command's `**options` by one option for each field of `kind`. The settings class itself checks the
    values, so a wrong one gets the same sentence from every entry point."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        named = [
            parameter
            for parameter in signature.parameters.values()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        prefix = kind.model_config.get("env_prefix", "")
        options = [
            _parameter(name, field, prefix) for name, field in kind.model_fields.items() if _option(field).offered
        ]
        parameters = [*options, *(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in named)]
        command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]  # typer reads it
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


def checked(kind: type[S], options: Mapping[str, Any]) -> S:
    """The settings of a command's options. A wrong value ends the command with one sentence and exit status 2."""
    try:
        return kind(**options)
    except ValidationError as exc:
        fail(validation_sentence(exc), exc, status=2)


def given_options(context: Any, options: Mapping[str, object], *, variables: bool = True) -> frozenset[str]:
    """Those of a command's options that the command line sets, or with `variables` a variable; `context` is typer's."""
    given = ("COMMANDLINE", "ENVIRONMENT") if variables else ("COMMANDLINE",)
    return frozenset(name for name in options if context.get_parameter_source(name).name in given)


def is_chosen(settings: BaseSettings, name: str) -> bool:
    """Whether an option has another value than its default; an empty text may also be spelled none."""
    value, default = getattr(settings, name), type(settings).model_fields[name].default
    return bool(value != default and (value, default) != (NONE, ""))


def tuning_of(settings: BaseSettings) -> dict[str, str]:
    """The options that tune the server and differ from its defaults, with their values."""
    return {
        flag_of(name)[2:]: str(getattr(settings, name))
        for name, field in type(settings).model_fields.items()
        if _option(field).tunes and is_chosen(settings, name)
    }


def with_tuning(settings: S, tuning: str) -> S:
    """The settings with the chosen tuning only; `tuning_of` names its options. Raises `OptionError`."""
    have = tuning_of(settings)
    left_out = [name.replace("-", "_") for name in have.keys() - chosen_tuning(tuning, have)]
    fields = type(settings).model_fields
    return settings.model_copy(update={"tuning": ALL, **{name: fields[name].default for name in left_out}})


def to_argument(settings: BaseSettings) -> str:
    """The settings as the one argument of a child process, which reads them with `from_argument`."""
    return settings.model_dump_json()


def from_argument(kind: type[S], arguments: Sequence[str]) -> S:
    """The settings from a process's arguments: a JSON object, before the environment and the defaults; or nothing.
    Raises `ValidationError`."""
    return kind.model_validate_json(arguments[0] if arguments else "{}")


def validation_sentence(error: ValidationError) -> str:
    """The first error: the option, the value and the problem."""
    first = error.errors()[0]
    problem = first["msg"].removeprefix("Value error, ").replace("Input should be", "must be").partition(", unable")[0]
    option = flag_of(str(first["loc"][0])) if first["loc"] else "settings"  # what is not an object of JSON has no place
    return f"{option} {first['input']}: {problem}"


def flag_of(name: str) -> str:
    """The option of a field."""
    return f"--{search.option_name(name)}"


def counted(count: int, noun: str) -> str:
    """ "1 check", "4 checks" """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def fail(message: str, cause: Exception | None = None, status: int = 1) -> NoReturn:
    """End the command with one sentence on standard error; exit status 2 is a mistake on the command line."""
    import typer
    from rich.console import Console

    Console(stderr=True).print(
        f"error: {message}", style="bold red", highlight=False, soft_wrap=True, markup=False, emoji=False
    )
    raise typer.Exit(status) from cause


def _option(field: FieldInfo) -> OptionTraits:
    return next((item for item in field.metadata if isinstance(item, OptionTraits)), OptionTraits())


def _parameter(name: str, field: FieldInfo, prefix: str) -> inspect.Parameter:
    import typer  # not above: a server process reads its settings without typer, and so listens sooner

    kind: Any = field.annotation
    flag, metavar = flag_of(name), None
    if get_origin(kind) is Literal:
        kind, metavar = str, f"[{'|'.join(get_args(kind))}]"
    option = typer.Option(
        ...,
        f"{flag}/--no-{flag[2:]}" if kind is bool else flag,
        envvar=f"{prefix}{name.upper()}",
        help=field.description,
        metavar=metavar,
        hidden=_option(field).hidden,
        rich_help_panel=field.title,
    )
    default = field.default
    if _option(field).of_model:
        kind, default = kind | None, None
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[kind, option], default=default)
