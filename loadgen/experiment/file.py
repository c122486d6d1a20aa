"""Experiment files: read safely from YAML, overridden by options, validated, and written with the settings in effect.

What sets a value, strongest first: the option on the command line, the variable ABSERVE_COMPARE_…, the file, the
default. `--a-option` sets single keys of the file's options and `--fail-if` adds to the file's conditions; every other
option replaces the file's value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from loadgen.documents import one_line
from loadgen.experiment.options import SettingOption
from loadgen.experiment.plan import PlanError, unknown
from loadgen.experiment.settings import DEFAULT_TARGETS, ArmSettings, ExperimentSettings, gather_arms
from loadgen.headers import HIDDEN

_MOST_BYTES = 1 << 16
_MOST_NODES = 2000
_MOST_DEPTH = 20
_MOST_DIGITS = 20
_MOST_LINES = 20
"""Most errors shown; a file with more usually has a single cause."""
TARGET_REMEDY = "give native, triton, fastapi, litserve or the URL of a server"


class ExperimentFileError(PlanError):
    """A file or an option holds a value that cannot be used; one line per error, with the place and the remedy."""


class _StrictLoader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML ships no types
    """Refuses what YAML accepts silently: equal keys, of which it takes the last; aliases; keys that are not text;
    numbers with colons, which YAML 1.1 reads to the base 60; and files with an implausible number of values."""

    nodes = depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self.nodes += 1
        self.depth += 1
        if self.check_event(yaml.AliasEvent):
            raise self._error("aliases are not supported", self.peek_event())
        if self.nodes > _MOST_NODES:
            raise self._error(f"an experiment file has at most {_MOST_NODES} values", self.peek_event())
        if self.depth > _MOST_DEPTH:
            raise self._error(f"an experiment file is nested at most {_MOST_DEPTH} deep", self.peek_event())
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise self._error("a key must be text", key)
            if key.value in seen:
                raise self._error(f"{one_line(key.value, 80)} is given twice", key)
            seen.add(key.value)
        return dict(super().construct_mapping(node, deep))

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        """Raises `ConstructorError` for a number with a colon or with too many digits."""
        if ":" in node.value or len(node.value) > _MOST_DIGITS + 4:
            raise self._error(f"{one_line(node.value, 40)} is not a number; put text in quotes", node)
        is_float = node.tag.endswith(":float")
        return self.construct_yaml_float(node) if is_float else self.construct_yaml_int(node)  # type: ignore[no-any-return]

    @staticmethod
    def _error(problem: str, place: yaml.Node | yaml.Event) -> yaml.constructor.ConstructorError:
        return yaml.constructor.ConstructorError(None, None, problem, place.start_mark)


for _kind in ("int", "float"):
    _StrictLoader.add_constructor(f"tag:yaml.org,2002:{_kind}", _StrictLoader.construct_number)


def _read_file(path: Path) -> dict[str, Any]:
    """The mapping in a file, not validated. Raises `ExperimentFileError`."""
    try:
        content = path.read_bytes()
    except OSError as exc:
        raise ExperimentFileError(f"{path}: {exc.strerror or exc}; give the path of an experiment file") from exc
    if len(content) > _MOST_BYTES:
        raise ExperimentFileError(f"{path} has {len(content)} bytes; an experiment file has at most {_MOST_BYTES}")
    try:
        parsed = yaml.load(content, Loader=_StrictLoader)
    except yaml.YAMLError as exc:
        mark, problem = getattr(exc, "problem_mark", None), getattr(exc, "problem", None)
        where = f":{mark.line + 1}" if mark is not None else ""
        raise ExperimentFileError(f"{path}{where}: {one_line(str(problem or exc))}") from exc
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as exc:
        # raised by PyYAML for a value that does not fit the tag before it, or for bytes that are not text.
        raise ExperimentFileError(f"{path}: a value cannot be read: {one_line(str(exc))}") from exc
    if parsed is None:
        return {}
    if not isinstance(parsed, dict) or not all(isinstance(key, str) for key in parsed):
        raise ExperimentFileError(f"{path}: write keys with values, as in: model: openclip_vit_b32")
    return parsed


def effective_settings(path: Path | None, given: Mapping[SettingOption, object]) -> ExperimentSettings:
    """The file, overridden by the options given. Raises `ExperimentFileError`."""
    content = gather_arms({} if path is None else _read_file(path))
    for option, value in given.items():
        _set(content, option, value)
    try:
        return ExperimentSettings.model_validate(content)
    except ValidationError as exc:
        flags = {option.path: option.flag for option in given}
        errors = exc.errors(include_url=False)
        lines = list(dict.fromkeys(one_line(_line(error, path, flags)) for error in errors[:_MOST_LINES]))
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


def _line(error: ErrorDetails, path: Path | None, flags: Mapping[tuple[str, ...], str]) -> str:
    """One error with its place, the value given and the remedy."""
    location, kind = tuple(str(part) for part in error["loc"]), error["type"]
    if kind == "missing":  # only an arm's target has no default
        place = f"--{location[1]}" if path is None else f"{path}: {'.'.join(location)}"
        return f"{place}: {TARGET_REMEDY}"
    if kind == "extra_forbidden":
        arm = location[0] == "arms"
        known = [*ArmSettings.model_fields] if arm else [*ExperimentSettings.model_fields, *DEFAULT_TARGETS]
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
