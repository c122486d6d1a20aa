"""The command line made from the settings: an option with its help, limits and variable for every field."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import annotated_types
import typer
from pydantic.fields import FieldInfo

from loadgen.experiment.settings import DEFAULT_TARGETS, LETTERS, ArmSettings, ExperimentSettings, Flag

SHOWN_ARMS = "abc"
GIVEN = {"COMMANDLINE", "ENVIRONMENT"}


@dataclass(frozen=True, slots=True, eq=False)
class SettingOption:
    """One option and the place of its value in the settings. Equal to itself only, so that it can be a key."""

    path: tuple[str, ...]
    """("rounds",) or ("arms", "a", "payload")."""
    parameter: str
    flag: str
    variable: str | None
    field: FieldInfo
    repeated: bool
    default: Any = None
    hidden: bool = False
    """From the help, which shows three arms and says that there are more."""

    @property
    def help(self) -> str | None:
        """The last arm that is shown tells of those that are not."""
        more = " More arms likewise: --d to --h." if self.path == ("arms", SHOWN_ARMS[-1], "target") else ""
        return f"{self.field.description}{more}"

    @property
    def is_mapping(self) -> bool:
        """Whether its values are KEY=VALUE."""
        return get_origin(self.field.annotation) is dict

    def as_parameter(self) -> inspect.Parameter:
        """For the signature of the command."""
        limits = {
            name: getattr(limit, attribute)
            for limit in self.field.metadata
            for kind, attribute, name in ((annotated_types.Ge, "ge", "min"), (annotated_types.Le, "le", "max"))
            if isinstance(limit, kind)
        }
        kind, default = _command_line_type(self)
        names = [f"{self.flag}/--no-{self.flag[2:]}" if kind in (bool, bool | None) else self.flag]
        option = typer.Option(
            *names, envvar=self.variable, show_envvar=False, help=self.help, hidden=self.hidden, **limits
        )
        return inspect.Parameter(
            self.parameter, inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[kind, option], default=default
        )


def setting_options() -> tuple[SettingOption, ...]:
    """Of every field, in order."""
    options: list[SettingOption] = []
    for name, field in ExperimentSettings.model_fields.items():
        if name == "arms":
            fields = ArmSettings.model_fields.items()
            options += [_option(("arms", letter, inner), one, letter) for letter in LETTERS for inner, one in fields]
        else:
            options.append(_option((name,), field, None))
    return tuple(options)


def takes_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Put an option for every setting in the place of the command's `**options`."""
    signature = inspect.signature(command, eval_str=True)
    own = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    parameters = [*own, *(option.as_parameter() for option in setting_options())]
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]  # typer reads it
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    return command


def given_options(context: typer.Context, values: Mapping[str, object]) -> dict[SettingOption, object]:
    """Those that the command line or a variable sets; the others leave the word to the file and the defaults."""
    sources = {name: context.get_parameter_source(name) for name in values}
    return {
        option: values[option.parameter]
        for option in setting_options()
        if (source := sources.get(option.parameter)) is not None and source.name in GIVEN
    }


def _option(path: tuple[str, ...], field: FieldInfo, arm: str | None) -> SettingOption:
    flag = next((item for item in field.metadata if isinstance(item, Flag)), Flag(""))
    own = flag.name if arm else (flag.name or path[-1])
    if arm and not flag.name and path[-1] != "target":
        own = path[-1]
    parameter = "_".join(part for part in (arm, own) if part)
    variable = flag.variable if flag.variable is not None else own.upper()
    full = "_".join(part for part in ((arm or "").upper(), variable) if part)
    return SettingOption(
        path=path,
        parameter=parameter,
        flag="--" + parameter.replace("_", "-"),
        variable=None if flag.repeated else f"ABSERVE_COMPARE_{full}",
        field=field,
        repeated=flag.repeated,
        default=field.get_default() if arm is None or path[-1] != "target" else DEFAULT_TARGETS.get(arm),
        hidden=arm is not None and arm > SHOWN_ARMS[-1],
    )


def _command_line_type(option: SettingOption) -> tuple[Any, Any]:
    """What click parses a field's value as, and the default that its help shows."""
    field, default = option.field, option.default
    if option.repeated or option.is_mapping:
        return list[str] | None, None
    kind: Any = field.annotation
    optional = default is None
    if get_origin(kind) in {Union, UnionType}:
        kind = next(one for one in get_args(kind) if one is not type(None))
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if get_origin(kind) is tuple:
        kind = str
        default = None if default is None else ",".join(str(one) for one in default)
    return (kind | None if optional else kind), default
