"""A study is a folder and its name in the registry: it is measured, analysed, stored in the result and shown."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from loadgen.bench.bench import Bench
from loadgen.probes import registry
from loadgen.records.run import Experiment
from loadgen.report.contents import result_document
from loadgen.report.renderers.markdown import render_markdown
from loadgen.storage.store import RunStore
from loadgen.verdict.result import ResultError, analyse, encode_result, read_result
from tests.golden.synthetic_run import Plan, write_run
from tests.unit.loadgen.probes.toy.records import TemperatureFound

TOY = "tests.unit.loadgen.probes.toy"


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "STUDIES", (*registry.STUDIES, TOY))


def measured(directory: Path) -> Path:
    """A run in which the toy took part, as far as its own part is concerned."""
    entered: list[str] = []
    store = RunStore(directory)
    write_run(directory, Plan(pairs=2))
    experiment = msgspec.json.decode((directory / "experiment.json").read_bytes(), type=Experiment)
    bench = cast("Bench", SimpleNamespace(enter=entered.append, store=store))
    own = [one for one in registry.measurements(experiment) if one.__module__.startswith(TOY)]
    for measure in own:
        measure(bench)
    assert entered == ["reading the thermometer"] * len(own)
    return directory


def test_a_study_is_measured_analysed_stored_and_shown(toy: None, tmp_path: Path) -> None:
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


def test_a_study_that_is_not_wanted_does_not_measure_and_finds_nothing(toy: None, tmp_path: Path) -> None:
    wanted: Any = msgspec.structs.replace(analyse(write_run(tmp_path, Plan(pairs=2))).experiment, preset="full")
    assert not any(one.__module__.startswith(TOY) for one in registry.measurements(wanted))
    assert "temperature" not in analyse(tmp_path).studies


def test_a_result_with_a_study_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    result = analyse(write_run(tmp_path, Plan(pairs=2)))
    path = tmp_path / "result.json"
    path.write_bytes(encode_result(msgspec.structs.replace(result, studies={"temperature": TemperatureFound()})))
    with pytest.raises(ResultError, match="there is no study 'temperature'"):
        read_result(path)


def test_every_study_of_the_registry_has_a_folder_with_parts() -> None:
    names = {path.parent.name for path in Path(registry.__file__).parent.glob("*/__init__.py")}
    names.remove("engines")  # `abserve engines` measures it without servers
    assert {study.rpartition(".")[2] for study in registry.STUDIES} == names
    assert len(list(registry.parts("measure", "measure"))) == len(list(registry.parts("measure", "wanted")))
    assert all(chapter for sections in registry.parts("sections", "SECTIONS") for chapter in sections)
