"""Where the value of a setting comes from: an option, a variable, an experiment file or the default, strongest first.

`takes_settings` gives a command one option per setting, and `given_options` tells which of them were set.
`effective_settings` reads the file and lays these over it: `--a-option` sets single keys of the file's options and
`--fail-if` adds to the file's conditions; every other option replaces the file's value. `write_settings` writes a file
with the settings in effect.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import typer
import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from loadgen.base.documents import MOST_BYTES, DocumentError, decode_json, one_line
from loadgen.base.headers import HIDDEN, split_header
from loadgen.base.strict_yaml import read_mapping
from loadgen.experiment.plan import PlanError, unknown
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
    gather_arms,
)
from loadgen.records.targets import TARGET_NAMES

_LAST_SHOWN = "c"
"""The last arm in the help, which shows no options for it but says that there are more arms."""
_SET_BY_USER = {"COMMANDLINE", "ENVIRONMENT"}
_PLACEHOLDERS: dict[object, str] = {int: "N", float: "NUMBER", str: "TEXT"}

S = TypeVar("S", bound=Settings)
_MOST_LINES = 20
"""Most errors shown; a file with more usually has a single cause."""


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
        kind = self.field.annotation
        return any(get_origin(member) is dict for member in (kind, *get_args(kind)))

    def as_parameter(self, arms: str, default: Any) -> inspect.Parameter:
        """A parameter in the signature of a command that shows these arms; `default`, if given, replaces the setting's.
        The settings check every value, so that the command line takes text."""
        arm = self.path[1] if len(self.path) > 1 else ""
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
        if self.flag in ("--a", "--a-option", "--b"):
            panel = MAIN
        text = (self.field.description or "").replace("{arm}", arm.upper())
        if self.flag == f"--{_LAST_SHOWN}":
            text += f" --d to --{LETTERS[-1]} add more arms; each has the options of A."
        also = [str(extra["also"])] if isinstance(extra, dict) and "also" in extra else []
        option = typer.Option(
            *also,
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
            kind = next(member for member in get_args(kind) if member is not type(None))
        if get_origin(kind) is Annotated:
            kind = get_args(kind)[0]
        if get_origin(kind) is Literal:
            return "|".join(get_args(kind))
        return "LIST" if get_origin(kind) is tuple else _PLACEHOLDERS.get(kind)


def setting_options() -> tuple[SettingOption, ...]:
    """One option for every setting of an experiment, in order: those of each arm by its letter."""
    arms = [_arm_option(letter, name, field) for letter in LETTERS for name, field in ArmSettings.model_fields.items()]
    return (*arms, *plain_options(ExperimentSettings, "ABSERVE_COMPARE"))


def plain_options(settings: type[Settings], prefix: str) -> tuple[SettingOption, ...]:
    """One option for every setting that is not of an arm, each with a variable PREFIX_NAME."""
    return tuple(
        SettingOption(
            path=(name,),
            flag=f"--{name.replace('_', '-')}",
            variable=None if REPEATED in field.metadata else f"{prefix}_{name.upper()}",
            field=field,
        )
        for name, field in settings.model_fields.items()
        if field.annotation != dict[str, ArmSettings]
    )


def _arm_option(letter: str, name: str, field: FieldInfo) -> SettingOption:
    """--a for the target, --a-option for the options, else --a-NAME."""
    flag = {"target": f"--{letter}", "options": f"--{letter}-option"}.get(name, f"--{letter}-{name}")
    variable = "ABSERVE_COMPARE_" + (letter if name == "target" else f"{letter}_{name}").upper()
    return SettingOption(("arms", letter, name), flag, variable, field)


def takes_settings(
    arms: str = LETTERS, options: Sequence[SettingOption] | None = None, **defaults: object
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace a command's `**options` by these options, or by one for every setting of an experiment. They are sorted
    by the panels of the help, which shows only these arms, and the command's own `defaults`. `--help` shows the main
    options, `--help-all` every one."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        declared = [
            parameter
            for parameter in signature.parameters.values()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        made = [option.as_parameter(arms, defaults.get(option.path[-1])) for option in options or setting_options()]
        parameters = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for parameter in sorted([*made, *declared, _help_all()], key=_place_in_help)
        ]
        command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]  # typer reads it
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


def _help_all() -> inspect.Parameter:
    """The option that shows every option; `loadgen.entry` leaves all groups but this one's out of `--help`."""

    def show(context: typer.Context, value: bool) -> None:
        if value:
            context.meta["help_all"] = True
            typer.echo(context.get_help())
            raise typer.Exit

    option = typer.Option(
        "--help-all", callback=show, is_eager=True, expose_value=False, help="Show all options.", rich_help_panel=MAIN
    )
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter("help_all", kind, annotation=Annotated[bool, option], default=False)


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
        if (source := sources.get(option.parameter)) is not None and source.name in _SET_BY_USER
    }


def effective_settings(path: Path | None, options: Mapping[SettingOption, object]) -> ExperimentSettings:
    """The file, overridden by the options given. Raises `PlanError`."""
    content = gather_arms(read_file(path, "an experiment file", "model: openclip_vit_b32"))
    return checked_settings(ExperimentSettings, content, path, options)


def read_file(path: Path | None, kind: str, example: str) -> dict[str, Any]:
    """The mapping in a file, not validated; empty without a file. `kind` ("an experiment file") and `example` are for
    messages. Raises `PlanError`."""
    try:
        return {} if path is None else read_mapping(path, kind, example)
    except DocumentError as exc:
        raise PlanError(str(exc)) from exc


def checked_settings(
    kind: type[S], content: dict[str, Any], path: Path | None, options: Mapping[SettingOption, object]
) -> S:
    """The settings from a file's content, overridden by the options given. Raises `PlanError` with one line per error,
    each with its place and a remedy."""
    for option, value in options.items():
        _set(content, option, value)
    try:
        return kind.model_validate(content)
    except ValidationError as exc:
        flags = {option.path: option.flag for option in options}
        errors = exc.errors(include_url=False)
        keys = [*kind.model_fields, *(DEFAULT_TARGETS if kind is ExperimentSettings else ())]
        lines = list(dict.fromkeys(one_line(_line(error, path, flags, keys)) for error in errors[:_MOST_LINES]))
        lines += [f"{path}: and {len(errors) - _MOST_LINES} more"] if len(errors) > _MOST_LINES else []
        raise PlanError("\n".join(lines)) from exc


def write_settings(settings: ExperimentSettings) -> str:
    """An experiment file that asks for exactly this, whatever the defaults of a later version are."""
    return write_content(settings.content(), settings.sha256())


def write_content(content: Mapping[str, object], sha256: str) -> str:
    """The experiment file of stored content; a comment names the settings that are not set."""
    body = yaml.safe_dump(dict(content), sort_keys=False, allow_unicode=True, width=120, default_flow_style=None)
    unset = [name for name in ExperimentSettings.model_fields if name not in content]
    note = f"# not set: {', '.join(unset)}\n" if unset else ""
    return f"# abserve compare experiment.yaml\n# sha256 of the content: {sha256}\n{body}{note}"


def parse_options(flag: str, options: list[str]) -> dict[str, str]:
    """Options given as KEY=VALUE; leading dashes of the key are dropped. Raises `PlanError`."""
    parsed: dict[str, str] = {}
    header = flag.endswith("-header")
    for option in options:
        name, separator, value = split_header(option) if header else option.partition("=")
        name = name.strip().lstrip("-")
        if not separator or not name:
            shown, example = (HIDDEN, "X-Team=search") if header else (option, "max-queue-delay-us=0")
            raise PlanError(f"{flag} {shown}: write it as KEY=VALUE, as in {example}")
        parsed[name] = value.strip()
    return parsed


def parse_fields(flag: str, options: list[str]) -> dict[str, Any]:
    """Fields of a request given as KEY=VALUE, where the value is JSON or else a text, or as -KEY for one that is left
    out. Raises `PlanError`."""
    parsed: dict[str, Any] = {}
    for option in options:
        name, separator, value = option.partition("=")
        left_out = name.startswith("-")
        if left_out == bool(separator) or not name.strip("- "):
            raise PlanError(f"{flag} {option}: write it as KEY=VALUE, as in top_k=1, or as -KEY to leave a field out")
        parsed[name := name.strip("- ")] = None if left_out else value
        if not left_out:
            with suppress(DocumentError):
                parsed[name] = decode_json(value.encode(), Any, most_bytes=MOST_BYTES)
    return parsed


def _set(content: dict[str, Any], option: SettingOption, value: object) -> None:
    place = content
    for step in option.path[:-1]:
        inner = place.get(step, {})
        place[step] = dict(inner) if isinstance(inner, dict) else {}
        place = place[step]
    last = option.path[-1]
    before = place.get(last)
    if option.is_mapping and isinstance(value, list):
        parse = parse_fields if last == "body" else parse_options
        value = (before if isinstance(before, dict) else {}) | parse(option.flag, value)
    elif option.repeated and isinstance(value, list):
        value = [*(before if isinstance(before, list) else [] if before is None else [before]), *value]
    place[last] = value


def _line(error: ErrorDetails, path: Path | None, flags: Mapping[tuple[str, ...], str], keys: Sequence[str]) -> str:
    """One error with its place, the value given and the remedy."""
    location, kind = tuple(str(part) for part in error["loc"]), error["type"]
    if kind == "missing":  # only an arm's target has no default
        place = f"--{location[1]}" if path is None else f"{path}: {'.'.join(location)}"
        return f"{place}: give {TARGET_NAMES} or the URL of a server"
    if kind == "extra_forbidden":
        arm = location[0] == "arms"
        place = ": ".join([str(path), *([".".join(location[:-1])] if arm else [])])
        return unknown(place, location[-1], [*ArmSettings.model_fields] if arm else keys, "key")
    place = next((name for at, name in flags.items() if location[: len(at)] == at), f"{path}: {'.'.join(location)}")
    value = None if "header" in location else error["input"]  # never shows the value of a header
    if kind == "literal_error":
        return unknown(place, str(value), re.findall("'([^']*)'", str(error.get("ctx", {}).get("expected"))))
    remedies = {"too_short": "give at least one value", "string_pattern_mismatch": "use letters, digits, and . _ -"}
    what = remedies.get(kind, error["msg"])
    what = what.removeprefix("Value error, ").replace("Input should be", "must be").partition(", unable")[0]
    shown = f" {value}" if isinstance(value, str | int | float) and len(str(value)) <= 80 else ""
    return f"{place}{shown}: {what}"
