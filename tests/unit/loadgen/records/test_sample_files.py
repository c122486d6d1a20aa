"""Sample files: whole, cut off, and on a full disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.records.samples import SAMPLE_DTYPE, SampleWriter, find_samples, part_path, read_samples

LONG = st.integers(0, 2**62)
ROW = st.tuples(
    LONG, LONG, LONG, LONG, LONG, LONG,
    st.integers(1, 2**31 - 1), st.integers(0, 2**31 - 1), st.integers(0, 2**31 - 1),
    st.integers(0, 1016), st.integers(-1, 32767),
)  # fmt: skip


@settings(max_examples=30)
@given(st.lists(ROW, max_size=40))
def test_what_was_added_is_read_back(tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[int, ...]]) -> None:
    path = tmp_path_factory.mktemp("s") / "0000.npy"
    writer = SampleWriter(path)
    for row in rows:
        writer.add(*row)
    writer.close()
    assert np.load(path).tolist() == rows
    assert read_samples(path).tolist() == rows
    assert not part_path(path).exists()


def test_more_samples_than_the_buffer_holds(tmp_path: Path) -> None:
    writer = SampleWriter(tmp_path / "0000.npy")
    for i in range(40_000):
        writer.add(i, i, i, i, 1, 1, 1, 0, 0, 200, -1)
    writer.close()
    assert np.load(tmp_path / "0000.npy")["end_ns"].tolist() == list(range(40_000))


def test_a_file_of_a_killed_run_holds_what_was_flushed(tmp_path: Path) -> None:
    path = tmp_path / "0000.npy"
    writer = SampleWriter(path)
    for i in range(10):
        writer.add(i, i, i, i, 1, 1, 1, 0, 0, 200, -1)
    writer.flush()
    writer.add(99, 99, 99, 99, 1, 1, 1, 0, 0, 200, -1)
    part = part_path(path)
    part.write_bytes(part.read_bytes() + b"half a record")
    for read in (read_samples, lambda path: find_samples(path.parent, path.name).read()):
        assert read(part)["send_ns"].tolist() == list(range(10))
    assert find_samples(tmp_path, path.name).read()["send_ns"].tolist() == list(range(10))
    assert read_samples(path)["send_ns"].tolist() == list(range(10))
    writer.abandon()
    assert not part.exists()


def test_a_file_is_read_once_until_it_changes(tmp_path: Path) -> None:
    def write(first: int) -> None:
        writer = SampleWriter(tmp_path / "0000.npy")
        for i in range(3):
            writer.add(first + i, 0, 0, 0, 1, 1, 1, 0, 0, 200, -1)
        writer.close()

    write(1)
    file = find_samples(tmp_path, "0000.npy")
    samples = file.read()
    assert file.read() is samples
    assert not samples.flags.writeable
    write(5)
    assert file.read()["intended_ns"].tolist() == [5, 6, 7]
    assert file.at_most(2).read()["intended_ns"].tolist() == [5, 6]


def test_without_a_path_samples_are_counted_only() -> None:
    writer = SampleWriter(None)
    writer.add(0, 0, 0, 0, 0, 0, 1, 0, 0, 200, -1)
    writer.flush()
    writer.close()
    assert writer.count == 1


def test_another_layout_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros(3))
    with pytest.raises(ValueError, match="holds no samples"):
        read_samples(tmp_path / "x.npy")


FULL = """
import resource, sys
from pathlib import Path
from loadgen.records.samples import SampleWriter
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
writer = SampleWriter(Path(sys.argv[1]))
for i in range(1000):
    writer.add(i, i, i, i, 1, 1, 1, 0, 0, 200, -1)
for attempt in (writer.flush, writer.close):
    try:
        attempt()
    except OSError as exc:
        print(exc.strerror)
"""


def test_a_full_disk_is_an_error_and_leaves_no_file_that_looks_whole(tmp_path: Path) -> None:
    path = tmp_path / "0000.npy"
    done = subprocess.run([sys.executable, "-c", FULL, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["File too large", "File too large"]
    assert not path.exists()
    assert len(read_samples(path)) == (4096 - 1024) // SAMPLE_DTYPE.itemsize
