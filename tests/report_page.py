"""A report as a reader without JavaScript sees it, and whether its charts can be drawn."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import Any

import plotly.graph_objects as go

TOKEN = re.compile(r"--[a-z][a-z0-9-]*")


class Page(HTMLParser):
    """What a reader without JavaScript sees, and what the page would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.seen: list[str] = []
        self.loads: list[str] = []
        self.figures: dict[str, dict[str, Any]] = {}
        self._script: dict[str, str | None] = {}
        self.feed(text)
        self.text = " ".join(" ".join(self.seen).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        targets = [value or "" for name, value in attrs if name in ("src", "href", "data", "action")]
        # A place in the page itself, or the icon, which is in it.
        self.loads += [target for target in targets if not target.startswith(("#", "data:image/svg+xml,"))]
        if tag in ("script", "style", "title"):
            self.stack.append(tag)
            self._script = dict(attrs)

    def handle_endtag(self, tag: str) -> None:
        if self.stack and self.stack[-1] == tag:
            self.stack.pop()

    def handle_data(self, data: str) -> None:
        if not self.stack:
            self.seen.append(data)
        elif self._script.get("type") == "application/json":
            self.figures[str(self._script["id"])] = json.loads(data)


def check_figures(text: str) -> None:
    """Whether Plotly takes every figure and every view of a page, with colours of the light and of the dark scheme."""
    style = text.split("<style>")[1].split("</style>")[0]
    light, dark = style.split("@media screen and (prefers-color-scheme: dark)")[:2]
    for figure in Page(text).figures.values():
        raw = json.dumps(figure)
        for token in set(TOKEN.findall(raw)):
            assert f"{token}:" in light
            assert f"{token}:" in dark
        drawn = json.loads(TOKEN.sub("#123456", raw))
        go.Figure(data=drawn["data"], layout=drawn["layout"])
        for view in drawn["views"]:
            go.Figure(data=[drawn["data"][place] for place in view["traces"]], layout=view["layout"])
