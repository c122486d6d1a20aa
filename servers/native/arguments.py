"""The server process's command line: one option for each setting, and back."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from servers.native.settings import NativeSettings


def to_argv(settings: NativeSettings) -> tuple[str, ...]:
    """Every setting that has a value, as `--name value`, so that nothing depends on the environment any more."""
    argv: list[str] = []
    for name in NativeSettings.model_fields:
        value = getattr(settings, name)
        if value is not None:
            text = str(value.absolute()) if isinstance(value, Path) else str(value)
            argv += [f"--{name.replace('_', '-')}", text]
    return tuple(argv)


def from_argv(argv: Sequence[str]) -> NativeSettings:
    """Settings from options, then the environment, then defaults. Raises `pydantic.ValidationError`."""
    parser = argparse.ArgumentParser("servers.native", description="The native server process.", allow_abbrev=False)
    for name, field in NativeSettings.model_fields.items():
        parser.add_argument(f"--{name.replace('_', '-')}", dest=name, help=field.description)
    given = {name: value for name, value in vars(parser.parse_args(argv)).items() if value is not None}
    return NativeSettings(**given)


def validation_sentence(error: ValidationError) -> str:
    """The first contradiction: which option, what is wrong with it, and what came."""
    first = error.errors()[0]
    return f"--{str(first['loc'][0]).replace('_', '-')}: {first['msg']}, got {first['input']!r}"
