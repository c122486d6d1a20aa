"""Headers that a user adds to requests to a server: their values are sent, and never stored or shown."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence

HIDDEN = "…"
"""Stands for a value in records and messages."""
_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_REFERENCE = re.compile(r"(?:(?P<scheme>[A-Za-z]{1,20}) )?(?:\$|env:)(?P<variable>[A-Za-z_][A-Za-z0-9_]*)")
_REFUSED = {
    "accept-encoding", "connection", "content-encoding", "content-length", "content-type", "expect",
    "inference-header-content-length", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding",
    "upgrade",
}  # fmt: skip
"""Headers that follow from the request and the connection."""
_LEAST = 6
_OPTION = re.compile(r"--(?:[a-z]-)?header")


class HeaderValue(str):
    """The value of a header. As text it is what may be stored: a reference such as $TOKEN, or `HIDDEN`."""

    secret: str
    """What is sent."""

    __slots__ = ("secret",)


def split_header(text: str) -> tuple[str, str, str]:
    """A header written as NAME=VALUE or NAME: VALUE, at the first of the two characters, which no name has. Without
    either both are empty."""
    name, mark, value = [*re.split("([=:])", text, maxsplit=1), "", ""][:3]
    return name.strip(), mark, value.strip()


def secret_of(value: object) -> str:
    """What is sent for a header's value."""
    return value.secret if isinstance(value, HeaderValue) else str(value)


def read_headers(values: Mapping[str, object]) -> dict[str, HeaderValue]:
    """The headers by their names, with the values of the variables that they refer to: $NAME or env:NAME, with or
    without one word before it, as in "Bearer $TOKEN". Raises `ValueError`."""
    headers: dict[str, HeaderValue] = {}
    for written, value in values.items():
        name = "Host" if written.lower() == "host" else written
        if not _NAME.fullmatch(name):
            raise ValueError("a header has a name with characters that HTTP does not allow; write NAME=VALUE")
        if name.lower() in _REFUSED or name.lower().startswith("grpc-"):
            raise ValueError(f"the header {name} follows from the request and cannot be set; leave it out")
        if name.lower() in {other.lower() for other in headers}:
            raise ValueError(f"the header {name} is given twice; give it once")
        headers[name] = _read_value(name, value)
    return headers


def _read_value(name: str, content: object) -> HeaderValue:
    if isinstance(content, HeaderValue):
        return content
    text = content if isinstance(content, str) else ""
    if text == HIDDEN:
        raise ValueError(f"the value of the header {name} was not stored; give it again, best as $VARIABLE")
    reference = _REFERENCE.fullmatch(text)
    secret, source = text, f"the value of the header {name}"
    if reference is not None:
        variable = reference["variable"]
        secret, source = os.environ.get(variable, ""), f"the variable {variable} for the header {name}"
        if not secret:
            raise ValueError(f"{source} is not set or empty; set it, or give the value itself")
        secret = f"{reference['scheme']} {secret}" if reference["scheme"] else secret
    if not secret:
        raise ValueError(f"{source} is empty; write NAME=VALUE or NAME=$VARIABLE")
    if not secret.isascii() or not secret.isprintable():
        raise ValueError(f"{source} holds a line break, a control character or a letter outside ASCII; remove it")
    value = HeaderValue(text if reference is not None else HIDDEN)
    value.secret = secret
    return value


def secrets_in(headers: Iterable[object]) -> tuple[str, ...]:
    """What must not be stored, even where a server repeats it: values and their last words, unless they are so short
    that they may stand for something else."""
    secrets = [secret_of(value) for value in headers if isinstance(value, HeaderValue)]
    parts = {part for secret in secrets for part in (secret, secret.rpartition(" ")[2]) if len(part) >= _LEAST}
    return tuple(sorted(parts, key=len, reverse=True))


def without_secrets(arguments: Sequence[str]) -> list[str]:
    """Arguments of a command, with the values of headers replaced."""
    shown: list[str] = []
    for argument in arguments:
        option, joined, value = argument.partition("=")
        if shown and _OPTION.fullmatch(shown[-1]):
            argument = _shown(argument)
        elif joined and _OPTION.fullmatch(option):
            argument = f"{option}={_shown(value)}"
        shown.append(argument)
    return shown


def _shown(header: str) -> str:
    name, joined, value = split_header(header)
    if not joined:
        return HIDDEN
    return header if _REFERENCE.fullmatch(value) else f"{name}{joined}{HIDDEN}"
