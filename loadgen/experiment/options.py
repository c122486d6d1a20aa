"""The command line made from the settings: an option with its help, limits and variable for every field."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from loadgen.experiment.settings import (
    DEFAULT_TARGETS,
    LETTERS,
    MAIN,
    PANELS,
    REPEATED,
    TARGET,
    ArmSettings,
    ExperimentSettings,
    Settings,
)

_LAST_SHOWN = "c"
"""The last arm in the help, which shows no options for it but says that there are more arms."""
_GIVEN = {"COMMANDLINE", "ENVIRONMENT"}
_PLACEHOLDERS: dict[object, str] = {int: "N", float: "NUMBER", str: "TEXT"}


@dataclass(frozen=True, slots=True, eq=False)
class SettingOption:
    """One option and the place of its value in the settings. Equal to itself only, so that it can be a key."""

    path: tuple[str, ...]
    """Its place in the settings: ("rounds",) or ("arms", "a", "payload")."""
    flag: str
    variable: str | None
    field: FieldInfo

    @property
    def parameter(self) -> str:
        """The name of the command's argument."""
        return self.flag[2:].replace("-", "_")

    @property
    def repeated(self) -> bool:
        """Whether the option is given once per value."""
        return REPEATED in self.field.metadata

    @property
    def is_mapping(self) -> bool:
        """Whether the option takes KEY=VALUE."""
        return get_origin(self.field.annotation) is dict

    def as_parameter(self, arms: str, default: Any) -> inspect.Parameter:
        """A parameter in the signature of a command that shows these arms; `default`, if given, replaces the setting's.
        The settings check every value, so that the command line takes text."""
        arm = self.path[1] if self.path[0] == "arms" else ""
        default = self.field.get_default() if default is None else default
        if arm and self.path[-1] == "target":
            default = DEFAULT_TARGETS.get(arm)
        if isinstance(default, tuple):
            default = ",".join(map(str, default)) or None
        placeholder = self._placeholder()
        kind: Any = bool if placeholder is None else str
        if self.repeated or self.is_mapping:
            kind, default = list[str], None
        elif kind is str and default is not None:
            default = str(default)
        extra = self.field.json_schema_extra
        panel = str(extra["panel"]) if isinstance(extra, dict) else TARGET
        if arm in DEFAULT_TARGETS and self.path[-1] in ("target", "options"):
            panel = MAIN
        text = (self.field.description or "").replace("{arm}", arm.upper())
        if self.flag == f"--{_LAST_SHOWN}":
            text += f" --d to --{LETTERS[-1]} add more arms; each has the options of A."
        option = typer.Option(
            f"{self.flag}/--no-{self.flag[2:]}" if kind is bool else self.flag,
            envvar=self.variable,
            show_envvar=False,
            help=text,
            hidden=arm not in arms or arm > _LAST_SHOWN or (arm == _LAST_SHOWN and self.flag != f"--{arm}"),
            metavar=placeholder,
            rich_help_panel=panel,
        )
        kind = kind | None if default is None else kind
        return inspect.Parameter(
            self.parameter, inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[kind, option], default=default
        )

    def _placeholder(self) -> str | None:
        """The placeholder of the value in the help; None for a switch."""
        if self.repeated or self.is_mapping:
            return "KEY=VALUE" if self.is_mapping else "CONDITION"
        kind = self.field.annotation
        if get_origin(kind) in {Union, UnionType}:
            kind = next(one for one in get_args(kind) if one is not type(None))
        if get_origin(kind) is Annotated:
            kind = get_args(kind)[0]
        if get_origin(kind) is Literal:
            return "|".join(get_args(kind))
        return "LIST" if get_origin(kind) is tuple else _PLACEHOLDERS.get(kind)


def setting_options() -> tuple[SettingOption, ...]:
    """One option for every field, in order."""
    options: list[SettingOption] = []
    for name, field in ExperimentSettings.model_fields.items():
        if name == "arms":
            fields = ArmSettings.model_fields.items()
            options += [_arm_option(letter, inner, one) for letter in LETTERS for inner, one in fields]
        else:
            options.append(_plain_option(name, field, "ABSERVE_COMPARE"))
    return tuple(options)


def plain_options(settings: type[Settings], prefix: str) -> tuple[SettingOption, ...]:
    """One option for every field of settings without arms, each with a variable PREFIX_NAME."""
    return tuple(_plain_option(name, field, prefix) for name, field in settings.model_fields.items())


def _plain_option(name: str, field: FieldInfo, prefix: str) -> SettingOption:
    variable = None if REPEATED in field.metadata else f"{prefix}_{name.upper()}"
    return SettingOption((name,), f"--{name.replace('_', '-')}", variable, field)


def _arm_option(letter: str, name: str, field: FieldInfo) -> SettingOption:
    """--a for the target, --a-option for the options, else --a-NAME."""
    flag = {"target": f"--{letter}", "options": f"--{letter}-option"}.get(name, f"--{letter}-{name}")
    variable = "ABSERVE_COMPARE_" + (letter if name == "target" else f"{letter}_{name}").upper()
    return SettingOption(("arms", letter, name), flag, variable, field)


def takes_settings(
    arms: str = LETTERS, given: Sequence[SettingOption] | None = None, **defaults: object
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace a command's `**options` by the `given` ones, or one for every setting of an experiment, sorted by the
    panels of the help, which shows only these arms, and the command's own `defaults`."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        own = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
        options = [option.as_parameter(arms, defaults.get(option.path[-1])) for option in given or setting_options()]
        parameters = [
            one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in sorted([*options, *own], key=_place_in_help)
        ]
        command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]  # typer reads it
        command.__annotations__ = {one.name: one.annotation for one in parameters}
        return command

    return decorate


def _place_in_help(parameter: inspect.Parameter) -> int:
    declared = next(iter(getattr(parameter.annotation, "__metadata__", ())), None)
    panel = getattr(declared, "rich_help_panel", None)
    return PANELS.index(panel) if panel in PANELS else -1


def given_options(
    context: typer.Context, values: Mapping[str, object], options: Sequence[SettingOption] | None = None
) -> dict[SettingOption, object]:
    """The options that the command line or a variable sets; the others come from the file and the defaults."""
    sources = {name: context.get_parameter_source(name) for name in values}
    return {
        option: values[option.parameter]
        for option in options or setting_options()
        if (source := sources.get(option.parameter)) is not None and source.name in _GIVEN
    }
