"""The engine `auto` on a CPU: measured once in another process, stored, and the same at every start."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import cycle
from math import inf, isfinite
from pathlib import Path
from time import process_time_ns, time
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from servers.commands import doctor, native
from servers.engines import choice
from servers.engines.interface import CHOICES, PLANS_FOLDER, EngineError
from servers.engines.settings import EngineSettings
from servers.export.manifest import FILE_NAME
from servers.measuring import fastest, measurement
from servers.measuring.fastest import chosen_engine, fastest_engine
from servers.measuring.request import MeasurementRequest
from servers.models.registry import DEFAULT_MODEL, get_specification
from servers.models.specification import ModelSpecification
from servers.models.weights import RandomWeights
from servers.options.defaults import usable_cores

SETTINGS = EngineSettings("torch", device="cpu", threads=2, max_batch_size=8)
REQUEST = MeasurementRequest(model=DEFAULT_MODEL, engine="torch", batches=(1, 4), device="cpu", precision="fp32")
MEASURED = {"engine": "onnxruntime", "decided": True, "races": ["onnxruntime takes 1 ms"], "left_out": {}}


@pytest.fixture
def specification() -> ModelSpecification:
    return get_specification(DEFAULT_MODEL)


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Of the choices. Both other engines are installed and have a file in the folder `files`."""
    monkeypatch.setenv(PLANS_FOLDER, str(tmp_path / "plans"))
    monkeypatch.delenv(CHOICES, raising=False)
    here = {"installed": ["torch", *fastest.OTHERS], "elsewhere": [], "missing": []}
    monkeypatch.setattr(fastest, "engines_here", lambda *_: here)
    monkeypatch.chdir(tmp_path)
    for form in ("random-0", "random-0-fused", "random-1", "random-1-fused"):
        (tmp_path / "files" / "openclip_vit_b32" / form).mkdir(parents=True)
        (tmp_path / "files" / "openclip_vit_b32" / form / FILE_NAME).touch()
    return tmp_path / "plans"


class Toy:
    """An engine that answers with a part of what it gets."""

    def __init__(self, name: str, factor: float) -> None:
        self.name, self.factor = name, factor

    def load(self) -> None:
        if not self.factor:
            raise EngineError(f"{self.name} cannot load")

    def infer(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        (pixels,) = inputs.values()
        return {"embedding": pixels.reshape(len(pixels), -1)[:, :512].astype(np.float32) * self.factor}

    def close(self) -> None: ...


def toys(monkeypatch: pytest.MonkeyPatch, factors: Mapping[str, float], time_ms: Callable[[str, int], float]) -> None:
    """Engines with these factors in their answers, whose calls take `time_ms` of their name and their rows."""

    def cpu_ns(call: Any) -> int:
        (inputs,), toy = call.args, call.func.__self__
        return round(time_ms(toy.name, len(next(iter(inputs.values())))) * 1e6)

    monkeypatch.setattr(choice, "cpu_ns", cpu_ns)
    monkeypatch.setattr(choice, "waited_ns", lambda: 0)
    monkeypatch.setattr(fastest, "MOST_SECONDS", inf)
    monkeypatch.setattr(measurement, "artefact", lambda *_: (None, None))
    monkeypatch.setattr(
        fastest, "build_engine", lambda _m, _w, settings, _p: Toy(settings.kind, factors[settings.kind])
    )


def last(answers: Iterable[dict[str, Any]]) -> dict[str, Any]:
    return list(answers)[-1]


ALIKE = {"torch": 1.0, "onnxruntime": 1.0, "openvino": 1.0}


@pytest.mark.parametrize(
    ("times_ms", "engine"),
    [
        ({"torch": (130, 500), "onnxruntime": (110, 480), "openvino": (134, 430)}, "onnxruntime"),
        ({"torch": (100, 400), "onnxruntime": (101, 402), "openvino": (80, 300)}, "openvino"),
        ({"torch": (100, 400), "onnxruntime": (101, 402), "openvino": (102, 399)}, "onnxruntime"),
        ({"torch": (100, 400), "onnxruntime": (120, 480), "openvino": (102, 399)}, "torch"),
        ({"torch": (100, 400), "onnxruntime": (90, 430), "openvino": (108, 200)}, "onnxruntime"),
    ],
)
def test_ten_first_starts_choose_the_same_engine(
    times_ms: dict[str, tuple[float, float]], engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever other programs add to a call, here up to a twentieth."""
    chosen = list[str]()
    for seed in range(10):
        random = np.random.default_rng(seed)

        def time_ms(name: str, rows: int, random: np.random.Generator = random) -> float:
            return times_ms[name][rows > 1] * random.uniform(1, 1.05)

        toys(monkeypatch, ALIKE, time_ms)
        chosen.append(last(chosen_engine(REQUEST, fastest.OTHERS))["engine"])
    assert chosen == [engine] * 10


@pytest.mark.parametrize("factor", [0.0, 1.1])
def test_an_engine_that_fails_or_answers_otherwise_is_left_out(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    times_ms = {"torch": 3.0, "onnxruntime": 1.0, "openvino": 2.0}
    toys(monkeypatch, {**ALIKE, "onnxruntime": factor}, lambda name, _rows: times_ms[name])
    answer = last(chosen_engine(REQUEST, fastest.OTHERS))
    assert answer["engine"] == "openvino"
    assert list(answer["left_out"]) == ["onnxruntime"]


def test_where_the_time_is_too_short_the_exported_file_executes_and_nothing_is_decided(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    toys(monkeypatch, ALIKE, lambda name, _rows: 100.0 if name == "torch" else 50.0)
    answer = last(chosen_engine(REQUEST, fastest.OTHERS, 0))
    left_out = {"torch": fastest.TOO_LATE, "openvino": fastest.TOO_LATE}
    assert answer == {"engine": "onnxruntime", "decided": False, "races": [], "left_out": left_out}


def test_beside_a_program_that_uses_the_cores_no_engine_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """There torch loses CPU time and ONNX Runtime does not: it was chosen for models that it executes more slowly."""
    toys(monkeypatch, ALIKE, lambda name, _rows: 50.0 if name == "torch" else 100.0)
    monkeypatch.setattr(choice, "waited_ns", cycle([0, 10**9]).__next__)
    monkeypatch.setattr(fastest, "RACE_SECONDS", 0.01)
    answer = last(chosen_engine(REQUEST, fastest.OTHERS))
    assert (answer["engine"], answer["decided"], answer["races"]) == ("onnxruntime", False, [])
    monkeypatch.setattr(choice, "waited_ns", cycle([0, 10**9, 0, 0]).__next__)  # in every other round
    assert last(chosen_engine(REQUEST, fastest.OTHERS))["engine"] == "torch"
    monkeypatch.setattr(choice, "waited_ns", cycle([0, 10**9]).__next__)
    more = msgspec.structs.replace(REQUEST, threads=usable_cores() + 1)  # they wait for each other
    assert last(chosen_engine(more, fastest.OTHERS))["engine"] == "torch"


def test_a_race_beside_programs_that_use_every_core_is_not_decided() -> None:
    if not choice.waited_ns():
        pytest.skip("this kernel does not count how long threads wait for a core")

    def work() -> None:
        ends_ns = process_time_ns() + 20_000_000
        while process_time_ns() < ends_ns:
            pass

    hogs = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        assert not choice.race([(work, work)], 0.2, 0.95, 1.05, undisturbed=True).decided
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()


def starts(
    monkeypatch: pytest.MonkeyPatch, answer: Callable[[], object], **options: str
) -> tuple[Callable[[], str], list[str]]:
    """A start whose other process gives this answer, and all that starts said."""
    said = list[str]()

    def run(command: list[str], *, timeout: float, env: Mapping[str, str], **_others: object) -> object:
        assert env["OMP_WAIT_POLICY"] == "PASSIVE", "threads that spin would count what other programs do"
        said.append(f"for {timeout:.0f} s")
        msgspec.json.decode(command[7], type=MeasurementRequest)
        assert isfinite(float(command[8]))
        said.extend(["measured", " ".join(command[9:])])
        return SimpleNamespace(stdout=msgspec.json.encode(answer()))

    monkeypatch.setattr(subprocess, "run", run)
    specification, choices = get_specification(DEFAULT_MODEL), options.get("choices", "stored")
    weights = RandomWeights(int(options.get("seed", 0)))
    return lambda: fastest_engine(specification, weights, SETTINGS, Path("files"), choices, said.append), said


def test_a_second_start_reads_what_the_first_one_measured(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    start, said = starts(monkeypatch, lambda: MEASURED)
    assert [start(), start()] == ["onnxruntime"] * 2
    assert said.count("measured") == 1
    assert str(folder) in said[-1]
    other, said = starts(monkeypatch, lambda: {**MEASURED, "engine": "torch"}, seed="1")
    assert other() == "torch", "other weights are another choice"


def test_fresh_measures_again_and_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = time()
    monkeypatch.setattr(choice, "time", lambda: clock + 60)  # the earlier choice is a minute old
    assert starts(monkeypatch, lambda: MEASURED)[0]() == "onnxruntime"
    fresh, said = starts(monkeypatch, lambda: {**MEASURED, "engine": "openvino"}, choices="fresh")
    assert fresh() == "openvino"
    assert "measured" in said
    assert starts(monkeypatch, dict)[0]() == "openvino"


@pytest.mark.parametrize("content", [b"{", b"[]", None])
def test_a_damaged_choice_of_an_engine_is_a_first_start(
    content: bytes | None, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    start, said = starts(monkeypatch, lambda: MEASURED)
    start()
    (path,) = folder.glob("*.json")
    stored = msgspec.json.decode(path.read_bytes())
    path.write_bytes(msgspec.json.encode({**stored, "choice": {"engine": 3}}) if content is None else content)
    assert start() == "onnxruntime"
    assert said.count("measured") == 2
    assert str(path) in said[-1]
    assert msgspec.json.decode(path.read_bytes()) == stored


def test_a_start_that_cannot_store_chooses_and_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(PLANS_FOLDER, str(tmp_path / "file"))
    start, said = starts(monkeypatch, lambda: MEASURED)
    assert start() == "onnxruntime"
    assert PLANS_FOLDER in said[-1]


def test_two_starts_at_once_measure_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one waits until the first has measured, and reads that."""
    waits = threading.Event()
    monkeypatch.setattr(choice, "sleep", lambda _seconds: waits.set())

    def measured() -> object:
        seconds.append(threads.submit(start))
        assert waits.wait(60)
        return MEASURED

    seconds = list[Future[str]]()
    start, said = starts(monkeypatch, measured)
    with ThreadPoolExecutor(1) as threads:
        assert start() == "onnxruntime"
        assert seconds[0].result() == "onnxruntime"
    assert said.count("measured") == 1


def late(said: bytes = b"") -> object:
    raise subprocess.TimeoutExpired("worker", 1, said)


@pytest.mark.parametrize(
    ("answer", "engine"), [(late, "onnxruntime"), (lambda: {"error": "no memory"}, "torch"), (lambda: 3, "torch")]
)
def test_what_cannot_be_measured_holds_for_minutes(
    answer: Callable[[], object], engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without time the exported file executes, as on a machine that is a bit less busy; after an error torch does."""
    start, said = starts(monkeypatch, answer)
    assert [start(), start()] == [engine] * 2
    assert said.count("measured") == 1
    clock = time()
    monkeypatch.setattr(choice, "time", lambda: clock + choice.UNDECIDED_SECONDS + 1)
    assert starts(monkeypatch, lambda: {**MEASURED, "engine": "openvino"})[0]() == "openvino"


def test_without_time_and_a_file_for_each_engine_torch_executes(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("files/openclip_vit_b32/random-0-fused", FILE_NAME).unlink()
    assert starts(monkeypatch, late, choices="fresh")[0]() == "torch"


def test_what_was_found_until_the_time_was_over_holds_for_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {**MEASURED, "decided": False, "left_out": {"openvino": ""}}
    start, said = starts(monkeypatch, lambda: late(msgspec.json.encode(found) + b'\n{"engine": "open'))
    assert [start(), start()] == ["onnxruntime"] * 2
    assert "openvino left out: not measured within" in said[-1]
    assert "for 10 minutes" in said[-1]
    clock = time()
    monkeypatch.setattr(choice, "time", lambda: clock + choice.UNDECIDED_SECONDS + 1)
    assert starts(monkeypatch, lambda: {**MEASURED, "engine": "openvino"})[0]() == "openvino"


def test_nothing_is_measured_where_only_torch_executes_the_model_as_asked(
    specification: ModelSpecification, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts(monkeypatch, lambda: pytest.fail("measured"))
    start = (RandomWeights(0), SETTINGS, Path("files"))
    of_file = replace(specification, definition_sha256="0")
    assert fastest_engine(of_file, *start, "stored", print) == "torch"
    assert fastest_engine(specification, *start, "off", print) == "torch"
    assert fastest_engine(specification, *start[:2], Path("empty"), "stored", print) == "torch"
    eager = replace(SETTINGS, mode="eager")
    assert fastest_engine(specification, start[0], eager, start[2], "stored", print) == "torch"
    monkeypatch.setattr(fastest, "engines_here", lambda *_: {"installed": ["torch"]})
    assert fastest_engine(specification, *start, "stored", print) == "torch"


def test_only_a_fresh_choice_exports_files_and_takes_longer_than_20_s(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("files/openclip_vit_b32/random-0", FILE_NAME).unlink()  # OpenVINO's
    for choices, engines, limit in (("stored", "onnxruntime", "20"), ("fresh", "onnxruntime openvino", "200")):
        start, said = starts(monkeypatch, lambda: MEASURED, choices=choices)
        start()
        assert engines in said
        assert f"for {limit} s" in said


def test_a_launch_has_the_engine_that_was_chosen_in_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native, "fastest_engine", lambda *_: "onnxruntime")
    monkeypatch.setattr(native, "bind", lambda *_: socket.socket())  # no port is needed
    monkeypatch.setattr(native, "check_free", lambda *_: None)
    settings, models, _ = native.check({"device": "cpu", "choices": "fresh"}, tmp_path)
    plan = native.launch_plan(settings, models, lambda _: (tmp_path / "model.onnx", None))
    assert plan.title == "native onnxruntime fp32"
    assert plan.env == {CHOICES: "fresh"}
    assert native.check({"device": "cpu", "engine": "null"}, tmp_path)[0].engine == "null"


def test_the_doctor_shows_choices_and_clears_them(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    starts(monkeypatch, lambda: MEASURED)[0]()
    (folder / "other.json").write_bytes(b"{")
    detail = doctor._choices().detail
    assert str(folder) in detail
    assert "damaged" in detail
    assert len(choice.stored_choices()) == 2
    assert choice.clear_stored_choices() is None
    assert choice.stored_choices() == {}
    assert starts(monkeypatch, lambda: {**MEASURED, "engine": "torch"})[0]() == "torch"
