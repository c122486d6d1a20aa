"""One thing that was looked at on this machine: what `abserve doctor` shows and tests compare."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """`detail` is what was seen; `remedy` is the exact command or change that helps, None where all is well."""

    name: str
    ok: bool
    detail: str
    remedy: str | None = None
