"""Experiment files: read safely from YAML, overridden by options, validated, and written with the settings in effect.

What sets a value, strongest first: the option on the command line, the variable ABSERVE_COMPARE_…, the file, the
default. `--a-option` sets single keys of the file's options and `--fail-if` adds to the file's conditions; every other
option replaces the file's value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from loadgen.documents import one_line
from loadgen.experiment.options import SettingOption
from loadgen.experiment.plan import PlanError, unknown
from loadgen.experiment.settings import DEFAULT_TARGETS, ArmSettings, ExperimentSettings, Settings, gather_arms
from loadgen.headers import HIDDEN
from loadgen.strict_yaml import YamlError, read_mapping

S = TypeVar("S", bound=Settings)
_MOST_LINES = 20
"""Most errors shown; a file with more usually has a single cause."""
TARGET_REMEDY = "give native, triton, fastapi, litserve or the URL of a server"


class ExperimentFileError(PlanError):
    """A file or an option holds a value that cannot be used; one line per error, with the place and the remedy."""


def effective_settings(path: Path | None, given: Mapping[SettingOption, object]) -> ExperimentSettings:
    """The file, overridden by the options given. Raises `ExperimentFileError`."""
    content = gather_arms(read_file(path, "an experiment file", "model: openclip_vit_b32"))
    return checked_settings(ExperimentSettings, content, path, given)


def read_file(path: Path | None, kind: str, example: str) -> dict[str, Any]:
    """The mapping in a file, not validated; empty without a file. `kind` ("an experiment file") and `example` are for
    messages. Raises `ExperimentFileError`."""
    try:
        return {} if path is None else read_mapping(path, kind, example)
    except YamlError as exc:
        raise ExperimentFileError(str(exc)) from exc


def checked_settings(
    kind: type[S], content: dict[str, Any], path: Path | None, given: Mapping[SettingOption, object]
) -> S:
    """The settings from a file's content, overridden by the options given. Raises `ExperimentFileError`."""
    for option, value in given.items():
        _set(content, option, value)
    try:
        return kind.model_validate(content)
    except ValidationError as exc:
        flags = {option.path: option.flag for option in given}
        errors = exc.errors(include_url=False)
        known = [*kind.model_fields, *(DEFAULT_TARGETS if kind is ExperimentSettings else ())]
        lines = list(dict.fromkeys(one_line(_line(error, path, flags, known)) for error in errors[:_MOST_LINES]))
        lines += [f"{path}: and {len(errors) - _MOST_LINES} more"] if len(errors) > _MOST_LINES else []
        raise ExperimentFileError("\n".join(lines)) from exc


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
    """Options given as KEY=VALUE; leading dashes of the key are dropped. Raises `ExperimentFileError`."""
    parsed: dict[str, str] = {}
    for option in options:
        name, separator, value = option.partition("=")
        name = name.strip().lstrip("-")
        if not separator or not name:
            header = flag.endswith("-header")
            shown, example = (HIDDEN, "X-Team=search") if header else (option, "max-queue-delay-us=0")
            raise ExperimentFileError(f"{flag} {shown}: write it as KEY=VALUE, as in {example}")
        parsed[name] = value.strip()
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
        value = (before if isinstance(before, dict) else {}) | parse_options(option.flag, value)
    elif option.repeated and isinstance(value, list):
        value = [*(before if isinstance(before, list) else [] if before is None else [before]), *value]
    place[last] = value


def _line(error: ErrorDetails, path: Path | None, flags: Mapping[tuple[str, ...], str], settings: Sequence[str]) -> str:
    """One error with its place, the value given and the remedy."""
    location, kind = tuple(str(part) for part in error["loc"]), error["type"]
    if kind == "missing":  # only an arm's target has no default
        place = f"--{location[1]}" if path is None else f"{path}: {'.'.join(location)}"
        return f"{place}: {TARGET_REMEDY}"
    if kind == "extra_forbidden":
        arm = location[0] == "arms"
        known = [*ArmSettings.model_fields] if arm else settings
        place = ": ".join([str(path), *([".".join(location[:-1])] if arm else [])])
        return unknown(place, location[-1], known, "key")
    place = next((name for at, name in flags.items() if location[: len(at)] == at), f"{path}: {'.'.join(location)}")
    given = None if "header" in location else error["input"]  # never shows the value of a header
    if kind == "literal_error":
        return unknown(place, str(given), re.findall("'([^']*)'", str(error.get("ctx", {}).get("expected"))))
    remedies = {"too_short": "give at least one value", "string_pattern_mismatch": "use letters, digits, and . _ -"}
    what = remedies.get(kind, error["msg"])
    what = what.removeprefix("Value error, ").replace("Input should be", "must be").partition(", unable")[0]
    shown = f" {given}" if isinstance(given, str | int | float) and len(str(given)) <= 80 else ""
    return f"{place}{shown}: {what}"
