r"""Why tritonserver ended, by its log.

The reason stands far above the end: tables follow it, then the lines of a shutdown. A line of the log is
`TIME E PID FILE:LINE] "text"`, in older releases without the quotation marks; line breaks in the text are written `\n`.
"""

from __future__ import annotations

import re
from pathlib import Path

LOG_LINES = 12

CODE_OF_ERROR = r"(?:(?:Internal|Invalid argument|Not found|Unavailable|Unsupported|Unknown|Already exists): )?"
_REST = r'(?P<cause>.+?)(?:\\n.*)?"?$'
CAUSES = (
    rf"failed to load '[^']+' version \d+: {CODE_OF_ERROR}{_REST}",
    rf"failed to load model '[^']+': {CODE_OF_ERROR}{_REST}",
    r'(?P<cause>Poll failed for model directory .+?)"?$',
    rf"Failed to (?:pre)?initialize Python stub(?: for auto-complete)?: {_REST}",
    r"(?P<cause>error while loading shared libraries: .+)$",
    r'(?P<cause>failed to start \w+ service: .+?)"?$',
    r"tritonserver: (?P<cause>unrecognized option .+)$",
    rf"^error: creating server: [\w ]+ - (?!failed to load all models){_REST}",
)
"""For `LaunchPlan.causes`. The first failure is the cause: a model that fails takes those down that depend on it."""

_SEVERE = re.compile(r"^\S+ [EF] \d+ |^[EF]\d{4} |^error: |Error\b|^Traceback ")
_HARMLESS = ("CudaDriverHelper has not been initialized", "Failed to initialize NVML")


def relevant_lines(log_file: Path, count: int = LOG_LINES) -> tuple[str, ...]:
    """The last lines of a log that report an error; without any, the last lines outside tables."""
    lines = read_log(log_file).splitlines()
    severe = [line for line in lines if _SEVERE.search(line) and not any(text in line for text in _HARMLESS)]
    return tuple((severe or [line for line in lines if line.strip() and line[0] not in "+|"])[-count:])


def read_log(log_file: Path) -> str:
    """The text of a log; empty if it cannot be read."""
    try:
        return log_file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
