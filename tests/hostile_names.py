"""A name that would mark up every format of a report, and the check that it has marked up none."""

from __future__ import annotations

import io
import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

from loadgen.report.contents import result_document
from loadgen.report.files import published
from loadgen.report.renderers.terminal import make_console, print_document
from loadgen.verdict.result import Result

HOSTILE = "=1+1\x1b[31m\x07\r\n\r\n# VALID\n<script>alert(1)</script> [x](javascript:1) ]]> \u202e[bold red]:bomb: |**`"


def check_reports(out: Path, result: Result) -> None:
    """Every format of a result, on whose arm B stands HOSTILE."""
    published(result).write(out)
    printed = io.StringIO()
    print_document(result_document(result), make_console(printed))
    texts = {name: render() for name, render in published(result).printable.items()}
    texts |= {"terminal": printed.getvalue(), "page": (out / "report.html").read_text()}
    harmful: dict[str, Callable[[str], object]] = {
        "markdown": _marked_up,
        "page": re.compile(r"<script>alert").search,
        "csv": re.compile(r"(?:^|,)\"?[=+@]", re.MULTILINE).search,
        "csv-blocks": re.compile(r"(?:^|,)\"?[=+@]", re.MULTILINE).search,
        "junit": lambda text: ET.fromstring(text) is None,
        "json": lambda text: not json.loads(text),
    }
    for name, text in texts.items():
        body = text[text.index("</head>") :] if name == "page" else text
        body = re.sub(r"<script>[^<].*?</script>", "", body, flags=re.DOTALL) if name == "page" else body
        odd = {character for character in body if not character.isprintable() and character != "\n"}
        assert odd == set(), name
        assert name == "terminal" or not harmful[name](body), name


def _marked_up(text: str) -> bool:
    """Outside the fences of the two commands, in which Markdown takes nothing for markup."""
    outside, fences = re.subn(r"^(`{3,})\n.*?\n\1$", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^# .*$", outside, re.MULTILINE)
    return fences != 2 or len(headings) != 1 or re.search(r"(?<!\\)(?:<script|\[x\])", outside) is not None
