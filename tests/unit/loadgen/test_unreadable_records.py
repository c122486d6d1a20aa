"""Files and names whose bytes are no text at all are told like any other that cannot be used."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from loadgen.findings.gpu.records import read_readings
from loadgen.measure.machine import MachineRecordError, read_calibration, read_environment
from loadgen.measure.noise_floor import read_floors
from loadgen.records.samples import load_samples
from loadgen.records.store import RunStore, StorageError, StoredRunError, read_run
from loadgen.verdict.result import read_result


@pytest.mark.parametrize(
    ("name", "read", "error"),
    [
        ("experiment.json", lambda path: read_run(path.parent), StoredRunError),
        ("result.json", read_result, StoredRunError),
        ("calibration.json", read_calibration, MachineRecordError),
        ("floors.json", read_floors, MachineRecordError),
        ("gpu.jsonl", lambda path: read_readings(path.parent, [path.name]), StoredRunError),
    ],
)
def test_a_record_that_is_no_utf8_is_named(
    tmp_path: Path, name: str, read: Callable[[Path], object], error: type[Exception]
) -> None:
    path = tmp_path / name
    path.write_bytes(b'{"model": "\xd5"}\n')
    with pytest.raises(error, match=name):
        read(path)


def test_a_sample_file_whose_header_is_cut_in_the_middle_of_a_bracket_is_named() -> None:
    written = io.BytesIO()
    np.save(written, np.zeros(3))
    content = bytearray(written.getvalue())
    content[10:12] = b"((("[:2]
    with pytest.raises(ValueError, match=r"0013\.npy"):
        load_samples(io.BytesIO(bytes(content)), "0013.npy")


def test_a_folder_whose_name_is_no_utf8_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"udcff' is not UTF-8; choose another folder with --out"):
        RunStore(tmp_path / os.fsdecode(b"odd\xff"))
    assert list(tmp_path.iterdir()) == []


def test_a_command_whose_words_are_no_utf8_can_be_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["abserve", "compare", "--csv", os.fsdecode(b"odd\xff.csv")])
    assert "odd\\udcff.csv" in read_environment({}, {}).command
