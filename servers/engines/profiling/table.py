"""The profile on a terminal: the same categories for every engine, then the kernels that take the most time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from servers.engines.profiling.profile import IDLE_ON_DEVICE, BatchProfile, EngineProfile

TOP = 10
LABEL_WIDTH, CELL_WIDTH = 30, 18
"""Columns of the table of categories; a narrow terminal gets several tables."""


def show_profile(console: Console, profile: EngineProfile) -> None:
    """Print µs per execution by category and batch, and the kernels of the first and the last batch."""
    profiles = profile.batches
    if profile.missing is not None:
        console.print(f"no profile: {profile.missing}", markup=False)
        return
    on_device = profiles[0].categories[-1].name == IDLE_ON_DEVICE
    copies = ", copies from and to the host included" if any(batch.with_copies for batch in profiles) else ""
    console.print(
        f"profile: µs per execution (share of the span), means over {profiles[0].executions} executions under a "
        f"profiler, which slows them{copies}",
        markup=False,
    )
    columns = max(1, (console.width - LABEL_WIDTH) // CELL_WIDTH)
    for start in range(0, len(profiles), columns):
        console.print(_categories(profiles[start : start + columns], "launches" if on_device else "operators"))
    for batch in {batch.batch: batch for batch in (profiles[0], profiles[-1])}.values():
        console.print(_kernels(batch, "kernel" if on_device else "operator"))


def _categories(profiles: Sequence[BatchProfile], unit: str) -> Table:
    table = Table(box=SIMPLE)
    table.add_column("batch", no_wrap=True)
    for profile in profiles:
        table.add_column(str(profile.batch), justify="right", no_wrap=True)
    for row, category in enumerate(profiles[0].categories):
        times = [profile.categories[row] for profile in profiles]
        table.add_row(category.name, *(f"{time.us:,.1f} ({time.share:.0%})" for time in times))
    table.add_section()
    table.add_row("span under the profiler", *(f"{profile.span_us:,.1f}" for profile in profiles))
    table.add_row("measured without it", *(f"{profile.measured_us:,.1f}" for profile in profiles))
    table.add_row(unit, *(f"{profile.launches:g}" for profile in profiles))
    return table


def _kernels(profile: BatchProfile, unit: str) -> Table:
    merged: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for kernel in profile.kernels:
        row = merged[kernel.label, kernel.category]
        for place, value in enumerate((kernel.count, kernel.us, kernel.share)):
            row[place] += value
    ranked = sorted(merged.items(), key=lambda item: -item[1][1])
    table = Table(box=SIMPLE)
    table.add_column(f"batch {profile.batch}: {unit}", overflow="fold")
    table.add_column("category", no_wrap=True)
    for name in ("count", "µs", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    for (label, category), (count, us, share) in ranked[:TOP]:
        table.add_row(label, category, f"{count:g}", f"{us:,.1f}", f"{share:.1%}")
    if rest := ranked[TOP:]:
        count, us, share = (sum(values[place] for _, values in rest) for place in range(3))
        table.add_row(f"{len(rest)} more", "", f"{count:g}", f"{us:,.1f}", f"{share:.1%}")
    return table
