"""A stored run as Python objects: its verdict, its comparisons, its samples and its report."""

from __future__ import annotations

import os
import shlex
import sys
import webbrowser
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from abserve.errors import AbserveError
from abserve.packages import own_packages

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

    from loadgen.findings.best import BestFound
    from loadgen.records.store import StoredBlock
    from loadgen.verdict.result import Result

_HEIGHT_PX = 800


class Columns:
    """Columns of equal length by their names, in order; a missing number is NaN, a missing text None."""

    def __init__(self, columns: Mapping[str, np.ndarray[Any, Any]]) -> None:
        self._columns = dict(columns)

    def keys(self) -> tuple[str, ...]:
        """The names of the columns. With `[]`, this makes `dict(columns)` work."""
        return tuple(self._columns)

    def __getitem__(self, name: str) -> np.ndarray[Any, Any]:
        """One column. Raises `KeyError`."""
        return self._columns[name]

    def __len__(self) -> int:
        """The number of rows."""
        return len(next(iter(self._columns.values()), ()))

    def __repr__(self) -> str:
        return f"<{len(self):,} rows of {', '.join(self._columns)}>"

    def to_dicts(self) -> list[dict[str, Any]]:
        """One dictionary of plain Python values per row; what is missing is None."""
        columns = [column.tolist() for column in self._columns.values()]
        return [
            {name: None if value != value else value for name, value in zip(self._columns, row, strict=True)}
            for row in zip(*columns, strict=True)
        ]

    def to_pandas(self) -> pd.DataFrame:
        """A data frame with these columns. Raises `ImportError` if pandas is not installed."""
        try:
            import pandas
        except ImportError as exc:
            raise ImportError("to_pandas() needs pandas, which is not installed; run: pip install pandas") from exc
        return pandas.DataFrame(self._columns)


class Run:
    """A run in its folder, also an invalid or an interrupted one. Everything is read when it is first asked for; what
    cannot be read raises `AbserveError`.

    In a notebook its value shows the verdict; `show` shows the whole report.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder).absolute()

    @cached_property
    def runs(self) -> dict[str, Run]:
        """The runs of a matrix of transports and payloads by the names of their folders; empty for one comparison."""
        with _records(self.folder):
            from loadgen.base.documents import kind_of

            if kind_of(self.folder) is not None:
                return {}
        return {path.parent.name: Run(path.parent) for path in sorted(self.folder.glob("*/experiment.json"))}

    @cached_property
    def result(self) -> Result:
        """All that result.json has (docs/result-format.md), as one record."""
        with _records(self.folder):
            from loadgen.base.documents import stored_path
            from loadgen.records.store import StoredRunError
            from loadgen.verdict.result import FILE_NAME, read_result, stored_result

            if stored_path(self.folder / FILE_NAME).exists():
                with suppress(StoredRunError):  # of an older version: analyse the records again
                    return read_result(self.folder / FILE_NAME)
            return stored_result(self.folder)

    @property
    def valid(self) -> bool:
        """Whether the verdict stands; of a matrix, whether all do."""
        return all(run.valid for run in self.runs.values()) if self.runs else self.result.valid

    @property
    def rough(self) -> bool:
        """Whether the verdict stands for a machine that others used, so that its figures are not to be cited; of a
        matrix, whether that is so of one and none is invalid."""
        if self.runs:
            stands = all(run.valid or run.rough for run in self.runs.values())
            return stands and any(run.rough for run in self.runs.values())
        return self.result.rough

    @property
    def verdict(self) -> str:
        """The verdict as a sentence; `result.verdict` has its parts."""
        return "\n".join(f"{name}: {run.verdict}" for name, run in self.runs.items()) or self.result.verdict.sentence

    @cached_property
    def comparisons(self) -> Columns:
        """A row per metric, workload and pair of arms, with the fields of `result.comparisons`: both values in `unit`,
        `ratio` (the arm's over the baseline's) with its 95 % interval, the verdict and the winning arm."""
        import numpy as np

        with own_packages():
            from msgspec.structs import fields

            from loadgen.metrics.comparisons import Comparison

            texts = {"winner", *(field.name for field in fields(Comparison) if str in get_args(field.type))}
        rows: list[dict[str, Any]] = []
        for comparison in self.result.comparisons:
            row: dict[str, Any] = {}
            for name in comparison.__struct_fields__:
                value = getattr(comparison, name)
                if name.endswith("ci95"):
                    low, high = value or (None, None)
                    row |= {f"{name}_low": low, f"{name}_high": high}
                elif name == "lost":  # of a rough run: a share for each of the two
                    row |= zip(("baseline_lost", "arm_lost"), value or (None, None), strict=True)
                elif name != "ratios":
                    row[name] = value
            rows.append(row | {"winner": comparison.winner})

        def column(name: str, values: Sequence[Any]) -> np.ndarray[Any, Any]:
            numbers = [value for value in values if value is not None]
            if name not in texts and all(isinstance(value, float) for value in numbers):
                return np.array([np.nan if value is None else value for value in values], np.float64)
            return np.array(values, object if len(numbers) < len(values) or isinstance(numbers[0], str) else None)

        return Columns({name: column(name, [row[name] for row in rows]) for name in (rows[0] if rows else ())})

    @property
    def best(self) -> BestFound:
        """Of a comparison with `best=True`: each server at its best for each load (`at_best`), with one configuration
        for all loads (`compromises`, `mean_loss`), and what was tried (`servers`). Empty for other runs."""
        result = self.result
        with _records(self.folder):
            from loadgen.findings.best import BestFound

            return result.of(BestFound)

    def samples(self, workload: str) -> Columns:
        """Every request of a workload, such as "concurrent(16)", in the order of its blocks.

        `arm`, `round`, `restart` and `block` say where it belongs, and `complete` whether its block was compared. Times
        are nanoseconds of the load generator's clock, and `latency_ns` counts from the intended start. `error` is the
        reason of a failure, and None for a good answer. The other columns are those of the sample files
        (docs/result-format.md). Of a language model there are also `output_tokens`, `chunks`, `ttft_ms`, `tpot_ms`
        and `worst_gap_ms`. Raises `AbserveError` for an unknown workload, and for a run without samples.
        """
        import numpy as np

        names = [named.name for named in self.result.experiment.workloads if named.has_blocks]
        with _records(self.folder):
            from loadgen.experiment.plan import unknown
            from loadgen.records.store import read_run

            if workload not in names:
                raise AbserveError(unknown("samples", workload, names))
            stored = read_run(self.folder).blocks if (self.folder / "experiment.json").exists() else ()
            blocks = [columns for block in stored if block.record.workload == workload for columns in _requests(block)]
        if not blocks:
            raise AbserveError(
                f"{self.folder} has no samples of {workload}: the run did not get that far, or its result was "
                "published without them"
            )
        return Columns({name: np.concatenate([columns[name] for columns in blocks]) for name in blocks[0]})

    def show(self) -> None:
        """Show the report: in a notebook below the cell, elsewhere print its path, and open it in the web browser if
        there is a display. Raises `AbserveError` for a run without one."""
        path = self.folder / ("index.html" if self.runs else "report.html")
        if _in_notebook():
            from IPython.display import HTML, display

            page = escape(self._report(path))
            frame = f'<iframe srcdoc="{page}" style="width: 100%; height: {_HEIGHT_PX}px; border: 0"></iframe>'
            display(HTML(f"<div>{frame}</div>"))
            return
        if not path.exists():
            raise AbserveError(f"{self.folder} has no {path.name}; run: abserve report {shlex.quote(str(self.folder))}")
        sys.stdout.write(f"report: {path}\n")
        if os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
            webbrowser.open(path.as_uri())

    def _report(self, path: Path) -> str:
        """The page that was written with the run, or one that is made from the result."""
        if path.exists():
            return path.read_text(encoding="utf-8")
        result = self.result
        with _records(self.folder):
            from loadgen.report.contents import result_document
            from loadgen.report.renderers.html import render_html

            return render_html(result_document(result))

    def __repr__(self) -> str:
        return f"<Run {self.folder}: {self._word}. {self.verdict}>"

    @property
    def _word(self) -> str:
        return "VALID" if self.valid else "ROUGH" if self.rough else "INVALID"

    def _repr_html_(self) -> str:
        """For notebooks: the verdict, and a row per workload."""
        if self.runs:
            return "".join(f"<h4>{escape(name)}</h4>{run._repr_html_()}" for name, run in self.runs.items())
        verdict = self.result.verdict
        rows = "".join(
            f'<tr><td style="text-align: left">{escape(row.workload)}</td>'
            f'<td style="text-align: left">{escape(row.sentence)}</td></tr>'
            for row in verdict.scenarios
        )
        colour = {"VALID": "#1a7f37", "ROUGH": "#9a6700", "INVALID": "#b3261e"}[self._word]
        caveats = "".join(f"<li>{escape(caveat)}</li>" for caveat in (*verdict.failed, *verdict.caveats))
        return (
            f'<p><b style="color: {colour}">{self._word}</b> {escape(verdict.sentence)}</p>'
            f"<table>{rows}</table><ul>{caveats}</ul><p><small>{escape(str(self.folder))}</small></p>"
        )


def load(folder: str | os.PathLike[str]) -> Run:
    """The finished, interrupted or published run in a folder; of a tuning its final. Raises `AbserveError` if it holds
    none."""
    run = Run(folder)
    with _records(run.folder):
        from loadgen.base.documents import FINAL, kind_of

        if kind_of(run.folder) == "tuning" and kind_of(run.folder / FINAL) is not None:
            run = Run(run.folder / FINAL)
    if not run.runs:
        _ = run.result
    return run


def _requests(block: StoredBlock) -> Iterator[dict[str, np.ndarray[Any, Any]]]:
    """The columns of the requests of a block, if it has any."""
    import numpy as np

    from loadgen.metrics.tokens import samples_of

    record, samples = block.record, samples_of(block)
    if samples is None or not len(samples):
        return
    assert samples.dtype.names is not None
    messages = [*record.error_messages, None]  # -1, the number of a good answer, is the last
    place = {
        "arm": record.label,
        "round": record.round,
        "restart": record.restart,
        "block": record.index,
        "complete": record.complete,
    }
    columns = {
        name: np.full(len(samples), value, object if isinstance(value, str) else None) for name, value in place.items()
    }
    columns |= {name: samples[name] for name in samples.dtype.names if name not in ("due", "gaps_ms")}
    columns["error"] = np.array([messages[number] for number in samples["error"]], object)
    columns["latency_ns"] = samples["end_ns"] - samples["intended_ns"]
    yield columns


def _in_notebook() -> bool:
    """Whether a kernel runs this code; IPython in a terminal shows no pages."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


@contextmanager
def _records(folder: Path) -> Iterator[None]:
    """Work on stored records with our packages. Raises `AbserveError` for records that cannot be read."""
    with own_packages():
        from loadgen.records.store import StoredRunError
        from loadgen.verdict.result import readable

        try:
            with readable(folder):
                yield
        except StoredRunError as exc:
            raise AbserveError(str(exc)) from exc
