"""The summary of a step in GitHub Actions: Markdown in the file that GITHUB_STEP_SUMMARY names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "GITHUB_STEP_SUMMARY"
MOST_BYTES = 1 << 20
"""GitHub's limit per step; it shows nothing of a longer summary."""
CUT = "\n\nThe summary was cut here: GitHub shows at most 1 MiB per step. The files of the run hold all of it.\n"


def append_job_summary(markdown: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """Append to the step's summary, if there is one, within its limit. A file that cannot be written is never an error:
    the return value is then a warning to show."""
    name = environment.get(VARIABLE)
    if not name:
        return None
    path = Path(name)
    try:
        used = path.stat().st_size if path.exists() else 0
        content = markdown.encode() + b"\n"
        room = MOST_BYTES - used
        if len(content) > room:
            content = _shortened(content, room - len(CUT.encode()))
        if content:
            with path.open("ab") as file:
                file.write(content)
    except OSError as exc:
        return f"no job summary: {path} ({VARIABLE}) cannot be written: {exc.strerror or exc}"
    return None


def _shortened(content: bytes, room: int) -> bytes:
    """Whole lines that fit, and the sentence that says so; nothing where not even that fits."""
    if room < 0:
        return b""
    return content[: content.rfind(b"\n", 0, room + 1) + 1] + CUT.encode()
