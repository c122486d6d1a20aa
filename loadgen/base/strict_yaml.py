"""Reads YAML that people write: a mapping, within limits, and without what YAML accepts silently."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from loadgen.base.documents import DocumentError, one_line, read_named

_MOST_BYTES = 1 << 16
_MOST_NODES = 2000
_MOST_DEPTH = 20
_MOST_DIGITS = 20


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
            raise self._error(f"a file has at most {_MOST_NODES} values", self.peek_event())
        if self.depth > _MOST_DEPTH:
            raise self._error(f"a file is nested at most {_MOST_DEPTH} deep", self.peek_event())
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


def read_mapping(path: Path, kind: str, example: str) -> dict[str, Any]:
    """The mapping in a file, not validated; `kind` ("an experiment file") and `example` are for messages. Raises
    `DocumentError`, whose message names the file, with the line where that is known."""
    try:
        content = read_named(path, _MOST_BYTES)
    except OSError as exc:
        raise DocumentError(f"{path}: {exc.strerror or exc}; give the path of {kind}") from exc
    except DocumentError as exc:
        raise DocumentError(f"{path}: {exc}; {kind} has at most {_MOST_BYTES} bytes and is a regular file") from exc
    try:
        parsed = yaml.load(content, Loader=_StrictLoader)
    except yaml.YAMLError as exc:
        mark, problem = getattr(exc, "problem_mark", None), getattr(exc, "problem", None)
        where = f":{mark.line + 1}" if mark is not None else ""
        raise DocumentError(f"{path}{where}: {one_line(str(problem or exc))}") from exc
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as exc:
        # raised by PyYAML for a value that does not fit the tag before it, or for bytes that are not text.
        raise DocumentError(f"{path}: a value cannot be read: {one_line(str(exc))}") from exc
    if parsed is None:
        return {}
    if not isinstance(parsed, dict) or not all(isinstance(key, str) for key in parsed):
        raise DocumentError(f"{path}: write keys with values, as in: {example}")
    return parsed
