"""What `abserve tune` refuses before it measures or writes anything: one sentence and exit status 2."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from loadgen.engines import worker_process
from loadgen.entry import load_command
from loadgen.experiment.tuning import TuneSettings
from loadgen.measure.machine import read_environment
from loadgen.records.run import Environment
from loadgen.records.store import running, write_record
from loadgen.records.tuning import Tuning, TuningRun
from loadgen.tune.files import read_tuning

Refused = Callable[..., str]
COMMAND = EntryPoint("tune", "loadgen.cli.tune:tune", "abserve.commands")


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """Runs the command, which must refuse its arguments, and returns what it says."""
    command: Any = load_command(COMMAND)

    def run(*arguments: str) -> str:
        with pytest.raises(SystemExit) as ended:
            command(list(arguments), prog_name="abserve tune")
        said = capsys.readouterr().err
        assert ended.value.code == 2, said
        return " ".join(said.split())

    return run


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--limit", "p98=5ms"), "is no limit; write it as in p50=50ms"),
        (("--rate", "5", "--concurrency", "6"), "are two loads; give one of them"),
        (("--arms", "native,foo"), "unknown value foo; choose from native, triton"),
        (("--arms", "native,native"), "give each server once"),
        (("--arms", ""), "give at least one value"),
        (("--minutes", "0"), "must be greater than 0"),
        (("--minutes", "nan"), "finite"),
        (("--at-once", "8"), "less than or equal to 7"),
        (("--tune", "fronts"), "write it as KEY=VALUE"),
        (("--goal", "cost"), "needs --price"),
        (("--goal", "speed"), "unknown value speed"),
        (("--out", "x", "--resume", "y"), "two folders; give one of them"),
        (("no-such-file.yaml",), "no-such-file.yaml"),
    ],
)
def test_a_wrong_option_is_one_sentence(refused: Refused, arguments: tuple[str, ...], words: str) -> None:
    assert words in refused(*arguments)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a tuning that was interrupted before its first run."""
    tuning = Tuning(settings=TuneSettings(minutes=5.0).content(), spaces=(), state="interrupted")
    write_record(tmp_path / Tuning.FILE, tuning)
    return tmp_path


def test_a_folder_without_a_tuning_cannot_go_on(refused: Refused, tmp_path: Path) -> None:
    assert "holds no tuning" in refused("--resume", str(tmp_path))


def test_a_finished_tuning_does_not_go_on(refused: Refused, folder: Path) -> None:
    tuning = msgspec.json.decode((folder / Tuning.FILE).read_bytes(), type=Tuning)
    write_record(folder / Tuning.FILE, msgspec.structs.replace(tuning, state="finished"))
    assert "it is finished" in refused("--resume", str(folder))


def test_a_tuning_goes_on_with_its_own_settings_alone(refused: Refused, folder: Path) -> None:
    said = refused("--resume", str(folder), "--concurrency", "3", "--minutes", "9")
    assert "it was begun with concurrency not set instead of 3;" in said


def test_a_tuning_goes_on_with_the_same_gpu_alone(
    refused: Refused, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_gpu(uuid: str) -> dict[str, object]:
        return {"status": "ok", "nvml": {"driver_version": "580.1"}, "devices": [{"name": "NVIDIA H100", "uuid": uuid}]}

    run = TuningRun(folder="01-screening", stage="screening")
    write_record(folder / Tuning.FILE, msgspec.structs.replace(read_tuning(folder), runs=(run,)))
    (folder / run.folder).mkdir()
    write_record(folder / run.folder / Environment.FILE, read_environment(with_gpu("GPU-1"), {}))
    for uuid, words in (("GPU-2", "another machine"), ("GPU-1", "begun with concurrency")):
        monkeypatch.setattr(worker_process, "read_offers", lambda *_, uuid=uuid: SimpleNamespace(gpu=with_gpu(uuid)))
        assert words in refused("--resume", str(folder), "--concurrency", "3")


def test_a_damaged_tuning_does_not_go_on(refused: Refused, folder: Path) -> None:
    for content in ("{", '{"settings": {}, "spaces": 3}'):
        (folder / Tuning.FILE).write_text(content)
        assert "tuning.json cannot be read" in refused("--resume", str(folder))
    damaged = Tuning(settings={"minutes": "soon"}, spaces=())
    write_record(folder / Tuning.FILE, damaged)
    assert "minutes" in refused("--resume", str(folder))


def test_a_tuning_under_way_is_left_alone(refused: Refused, folder: Path) -> None:
    with running(folder):
        assert "a process still runs it" in refused("--resume", str(folder))


def test_a_folder_with_a_tuning_is_not_overwritten(refused: Refused, folder: Path) -> None:
    assert "already holds a tuning" in refused("--out", str(folder))
