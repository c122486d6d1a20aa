"""Prints abserve/options.py: the options of `abserve compare` as keyword arguments with their types, from the code."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from inspect import signature
from textwrap import wrap
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from loadgen.cli.compare import compare
from loadgen.experiment.options import setting_options

HEAD = '''"""The options of `abserve compare` as keyword arguments. Made from the code by `make reference`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Literal, TypedDict

REPEATED = {repeated}
"""Options that are given once per value; other lists are written with commas."""


class CompareOptions(TypedDict, total=False):
    """None is an option that is not given. Arms B to H have the options of A."""

'''
LEFT_OUT = {"file", "print_experiment", "dry_run", "help_all"}
"""`file` is the first argument; the others run nothing."""


def python_type(field: FieldInfo, repeated: bool, is_mapping: bool) -> str:
    """The type of an option's value in Python."""
    kind: Any = field.annotation
    if get_origin(kind) in {Union, UnionType}:
        kind = next(member for member in get_args(kind) if member is not type(None))
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if is_mapping:
        return "Mapping[str, object]"
    if repeated or get_origin(kind) is tuple:
        items = "str" if repeated else "str | float"
        return f"{items} | Sequence[{items}]"
    if get_origin(kind) is Literal:
        return f"Literal[{', '.join(map(repr, get_args(kind)))}]".replace("'", '"')
    return {bool: "bool", int: "int", float: "float"}.get(kind, "str | PathLike[str]")


def entries() -> Iterator[str]:
    """A key for each option, with its help."""
    settings = {option.parameter: option for option in setting_options()}
    for name, parameter in signature(compare).parameters.items():
        if name in LEFT_OUT or get_origin(parameter.annotation) is not Annotated:
            continue
        option = settings.get(name)
        kind = "bool" if get_args(parameter.annotation)[0] is bool else "str | PathLike[str]"
        if option is not None:
            kind = python_type(option.field, option.repeated, option.is_mapping)
        yield f"    {name}: {kind} | None\n"
        help_text = parameter.annotation.__metadata__[0].help
        if option is None or option.path[0] != "arms" or option.path[1] == "a":
            yield "\n".join(wrap(f'"""{help_text}"""', 120, initial_indent="    ", subsequent_indent="    ")) + "\n"


if __name__ == "__main__":
    names = "".join(f'"{option.parameter}", ' for option in setting_options() if option.repeated)
    sys.stdout.write(HEAD.format(repeated=f"({names.rstrip(' ' if names.count(',') == 1 else ', ')})"))
    sys.stdout.writelines(entries())
