"""Experiment files: YAML read safely, options over it, validated; and written again as what is in effect.

What sets a value, strongest first: the option on the command line, the variable ABSERVE_COMPARE_…, the file, the
default. `--a-option` and `--b-option` set single keys of the file's options, `--fail-if` adds to the file's thresholds;
every other option takes the place of the file's value.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from loadgen.experiment.options import SettingOption
from loadgen.experiment.plan import PlanError
from loadgen.experiment.settings import ExperimentSettings

MAX_BYTES = 1 << 20
OPTION_FORM = "write it as KEY=VALUE, as in max-queue-delay-us=0"


class ExperimentFileError(PlanError):
    """A file or an option says something that cannot be; one line for each, with the place and what would do."""


class _UniqueKeyLoader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML ships no types
    """YAML takes the last of two equal keys without a word; here it is an error, and so is an alias."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.constructor.ConstructorError(None, None, "aliases are not taken", self.peek_event().start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value} is given twice", key.start_mark)
            seen.add(str(key.value))
        return dict(super().construct_mapping(node, deep))


def read_file(path: Path) -> dict[str, Any]:
    """The mapping in a file, not validated. Raises `ExperimentFileError`."""
    try:
        content = path.read_bytes()
    except OSError as exc:
        raise ExperimentFileError(f"{path}: {exc.strerror or exc}; give the path of an experiment file") from exc
    if len(content) > MAX_BYTES:
        raise ExperimentFileError(f"{path} has {len(content)} bytes; an experiment file has at most {MAX_BYTES}")
    try:
        parsed = yaml.load(content, Loader=_UniqueKeyLoader)
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as exc:
        mark, problem = getattr(exc, "problem_mark", None), getattr(exc, "problem", None)
        where = f":{mark.line + 1}" if mark is not None else ""
        raise ExperimentFileError(f"{path}{where}: {problem or exc}") from exc
    if parsed is None:
        return {}
    if not isinstance(parsed, dict) or not all(isinstance(key, str) for key in parsed):
        raise ExperimentFileError(f"{path}: write keys with values, as in: model: openclip_vit_b32")
    return parsed


def effective_settings(path: Path | None, given: Mapping[SettingOption, object]) -> ExperimentSettings:
    """The file with what was given over it. Raises `ExperimentFileError`."""
    content: dict[str, Any] = {} if path is None else read_file(path)
    for option, value in given.items():
        _set(content, option, value)
    try:
        return ExperimentSettings.model_validate(content)
    except ValidationError as exc:
        flags = {option.path: option.flag for option in given}
        lines = dict.fromkeys(_line(error, path, flags) for error in exc.errors(include_url=False))
        raise ExperimentFileError("\n".join(lines)) from exc


def write_settings(settings: ExperimentSettings) -> str:
    """An experiment file that asks for exactly this, whatever the defaults of a later version are."""
    return write_content(settings.content(), settings.sha256())


def write_content(content: Mapping[str, object], sha256: str) -> str:
    """The same from the stored content. What is not set is named in a comment."""
    body = yaml.safe_dump(dict(content), sort_keys=False, allow_unicode=True, width=120, default_flow_style=None)
    unset = [name for name in ExperimentSettings.model_fields if name not in content]
    note = f"# not set: {', '.join(unset)}\n" if unset else ""
    return f"# abserve compare experiment.yaml\n# sha256 of the content: {sha256}\n{body}{note}"


def parse_options(flag: str, options: list[str]) -> dict[str, str]:
    """KEY=VALUE, each; leading dashes of the key are dropped. Raises `ExperimentFileError`."""
    parsed: dict[str, str] = {}
    for option in options:
        name, separator, value = option.partition("=")
        name = name.strip().lstrip("-")
        if not separator or not name:
            raise ExperimentFileError(f"{flag} {option}: {OPTION_FORM}")
        parsed[name] = value.strip()
    return parsed


def _set(content: dict[str, Any], option: SettingOption, value: object) -> None:
    place = content
    for step in option.path[:-1]:
        inner = place.get(step, {})
        place[step] = {"target": inner} if isinstance(inner, str) else dict(inner) if isinstance(inner, dict) else {}
        place = place[step]
    last = option.path[-1]
    before = place.get(last)
    if option.is_mapping and isinstance(value, list):
        value = (before if isinstance(before, dict) else {}) | parse_options(option.flag, value)
    elif option.repeated and isinstance(value, list):
        value = [*([before] if isinstance(before, str) else before or []), *value]
    place[last] = value


def _line(error: ErrorDetails, path: Path | None, flags: Mapping[tuple[str, ...], str]) -> str:
    location = tuple(str(part) for part in error["loc"])
    flag = next((name for place, name in flags.items() if location[: len(place)] == place), None)
    where = flag or f"{path}: {'.'.join(location)}"
    if error["type"] == "extra_forbidden":
        known = _keys_at(location[:-1])
        close = get_close_matches(location[-1].replace("-", "_"), known, n=1)
        return f"{where}: no such key; " + (f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}")
    given = error["input"]
    shown = f" {given}" if isinstance(given, str | int | float) and len(str(given)) <= 80 else ""
    what = error["msg"].replace("Input should be", "must be")
    return f"{where}{shown}: {what}" if flag else f"{where}:{shown}{',' if shown else ''} {what}"


def _keys_at(location: tuple[str, ...]) -> list[str]:
    model: type[BaseModel] = ExperimentSettings
    for step in location:
        inner = model.model_fields[step].annotation if step in model.model_fields else None
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return []
        model = inner
    return list(model.model_fields)
