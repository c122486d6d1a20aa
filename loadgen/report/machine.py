"""The machine of a run in words, for every report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from loadgen.records.machine import own_devices, used_gpu
from loadgen.records.run import Environment


def environment_rows(found: Environment) -> list[tuple[str, str]]:
    """Host, GPU and packages as rows of (name, value)."""
    rows = [("started", found.started_at), ("commit", found.git_commit or "–")]
    for name, value in found.host.items():
        title = name.removesuffix("_bytes").replace("_", " ")
        if name.endswith("_bytes") and isinstance(value, int | float):
            rows.append((title, f"{value / 2**30:.1f} GiB"))
        elif value is not None:
            rows.append((name.replace("_", " "), str(value)))
    return [*rows, ("GPU", gpu_text(found.gpu)), *sorted(found.packages.items())]


def gpu_text(document: Mapping[str, Any]) -> str:
    """The GPU that the servers use, and of how many; where no server reports one, the machine's; without any, the
    driver's status."""
    used = used_gpu(document)
    own = own_devices(document, () if used is None else (used,))
    if used is None or [device.get("uuid") for device in own] != [used]:
        names = Counter(str(device.get("name") or "GPU") for device in own_devices(document, ()))
        every = [name if count == 1 else f"{count} × {name}" for name, count in names.items()]
        return ", ".join(every) or str(document.get("status", "unknown")).replace("_", " ")
    return f"{own[0].get('name') or 'GPU'} {used}, 1 of {len(own_devices(document, ()))}"
