"""A probe is a module and its name in the registry: it is measured, analysed, stored in the result and shown."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from loadgen.findings import registry
from loadgen.measure import probes
from loadgen.measure.context import RunContext
from loadgen.records.run import Experiment, Record
from loadgen.records.store import RunStore, StoredRunError
from loadgen.report.contents import result_document
from loadgen.report.renderers.markdown import render_markdown
from loadgen.verdict.result import analyse, encode_result, read_result
from tests.golden.synthetic_run import Plan, write_run
from tests.unit.loadgen.measure.probes.toy_probe import TemperatureFound

TOY = "tests.unit.loadgen.measure.probes.toy_probe"


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "MODULES", (*registry.MODULES, TOY))


def wanted_toys(experiment: Experiment) -> list[registry.Probe]:
    return [probe for probe in registry.probes() if probe.finding is TemperatureFound and probe.wanted(experiment)]


def measured(directory: Path) -> Path:
    """A run in which the toy took part, as far as its own part is concerned."""
    entered: list[str] = []
    store = RunStore(directory)
    write_run(directory, Plan(pairs=2))
    experiment = msgspec.json.decode((directory / "experiment.json").read_bytes(), type=Experiment)
    context = cast("RunContext", SimpleNamespace(enter=entered.append, store=store))
    toys = wanted_toys(experiment)
    for probe in toys:
        probe.measure(context)
    assert entered == ["reading the thermometer"] * len(toys)
    return directory


def test_a_probe_is_measured_analysed_stored_and_shown(toy: None, tmp_path: Path) -> None:
    result = analyse(measured(tmp_path / "run"))
    assert result.of(TemperatureFound) == TemperatureFound(celsius=31.0, warm=True)
    path = tmp_path / "result.json"
    path.write_bytes(encode_result(result))
    assert read_result(path) == result
    assert "The room has 31 °C, too warm." in render_markdown(result_document(result))


def test_without_its_name_in_the_registry_there_is_nothing_of_it(tmp_path: Path) -> None:
    result = analyse(measured(tmp_path / "run"))
    assert "temperature" not in result.studies
    assert "The room" not in render_markdown(result_document(result))


def test_a_probe_that_is_not_wanted_does_not_measure_and_finds_nothing(toy: None, tmp_path: Path) -> None:
    experiment: Any = msgspec.structs.replace(analyse(write_run(tmp_path, Plan(pairs=2))).experiment, preset="full")
    assert wanted_toys(experiment) == []
    assert "temperature" not in analyse(tmp_path).studies


def test_a_result_with_a_finding_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    result = analyse(write_run(tmp_path, Plan(pairs=2)))
    path = tmp_path / "result.json"
    path.write_bytes(encode_result(msgspec.structs.replace(result, studies={"temperature": TemperatureFound()})))
    with pytest.raises(StoredRunError, match="there is no study 'temperature'"):
        read_result(path)


def test_every_file_of_records_is_of_one_probe_or_of_the_run_itself() -> None:
    def below(kind: type[Record]) -> Iterator[type[Record]]:
        for inner in kind.__subclasses__():
            yield inner
            yield from below(inner)

    registry.probes()
    rooms = ("loadgen.measure.probes.", "loadgen.findings.", "loadgen.records.probes")
    with_file = {kind for kind in below(Record) if hasattr(kind, "FILE") and kind.__module__.startswith(rooms)}
    assert len({kind.FILE for kind in with_file}) == len(with_file) > 10


def test_every_probe_is_in_the_registry() -> None:
    folder = Path(probes.__file__).parent
    modules = [path.relative_to(folder) for path in folder.rglob("*.py") if "\nPROBE = " in path.read_text()]
    names = {f"loadgen.measure.probes.{path.with_suffix('').as_posix().replace('/', '.')}" for path in modules}
    assert names == set(registry.MODULES)
