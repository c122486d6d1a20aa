"""The queries of the dashboards, as Grafana sends them when "All" is chosen for every variable."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / "docker/grafana/dashboards"


def dashboards() -> dict[str, dict[str, Any]]:
    """Every dashboard by its file name."""
    return {path.name: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}


def variables() -> dict[str, str]:
    """The query of each template variable."""
    return {one["name"]: one["query"]["query"] for d in dashboards().values() for one in d["templating"]["list"]}


def dashboard_queries() -> Iterator[tuple[str, str]]:
    """A name and the PromQL of each panel query and annotation. Fails for a variable that its dashboard lacks."""
    for file, dashboard in dashboards().items():
        every = {one["name"]: one["allValue"] for one in dashboard["templating"]["list"]}
        found = [(panel["title"], one) for panel in dashboard["panels"] for one in panel["targets"]]
        found += [(one["name"], {"refId": "", **one}) for one in dashboard["annotations"]["list"]]
        for name, one in found:
            parts = re.split(r"\$(\w+)", one["expr"])  # every second part is the name of a variable
            parts[1::2] = [every[variable] for variable in parts[1::2]]
            yield f"{file}: {name} {one['refId']}".rstrip(), "".join(parts)
