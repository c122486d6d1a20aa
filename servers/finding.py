"""One condition of this machine, as `abserve doctor` shows it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """`detail` is the observation; `remedy` is the exact command or change that helps, None if all is well."""

    name: str
    ok: bool
    detail: str
    remedy: str | None = None


def finding(name: str, ok: bool, detail: str, remedy: str) -> Finding:
    """A finding with its remedy, which counts only if the condition is not met."""
    return Finding(name, ok, detail, None if ok else remedy)
