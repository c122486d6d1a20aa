"""Folders that their process removes, and those that a killed process has left to the next one."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from loadgen.launch.work_folder import OWNER, work_folder

HOLD = """
import sys
from loadgen.launch.work_folder import work_folder
with work_folder("run") as folder:
    (folder / "samples").mkdir()
    (folder / "samples" / "pixel_values.fp32.npy").write_bytes(b"1")
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def holder() -> tuple[subprocess.Popen[bytes], Path]:
    process = subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().decode().strip())


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()


def test_a_folder_is_gone_with_its_context(temporary: Path) -> None:
    with work_folder("run") as folder:
        (folder / "triton-b" / "model").mkdir(parents=True)
        assert folder.parent == temporary
    assert list(temporary.iterdir()) == []


def test_a_folder_in_use_is_left_alone_and_that_of_a_killed_process_is_removed(temporary: Path) -> None:
    process, theirs = holder()
    try:
        with work_folder("run"):
            assert (theirs / "samples" / "pixel_values.fp32.npy").exists()
    finally:
        end(process)
    assert theirs.exists(), "nobody could remove it"
    with work_folder("run") as folder:
        assert [path.name for path in temporary.iterdir()] == [folder.name]


def test_what_holds_no_owner_or_only_links_to_one_is_never_touched(temporary: Path) -> None:
    of_a_user = temporary / "abserve-notes"
    of_a_user.mkdir()
    outside = temporary / "other"
    outside.mkdir()
    (outside / "precious").touch()
    linked = temporary / "abserve-linked"
    linked.mkdir()
    (linked / OWNER).symlink_to(outside / "precious")
    with work_folder("run"):
        pass
    assert sorted(path.name for path in temporary.iterdir()) == ["abserve-linked", "abserve-notes", "other"]
    assert (outside / "precious").exists()


def test_a_folder_that_cannot_be_locked_is_still_a_folder(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_descriptor: int, _operation: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("loadgen.launch.work_folder.fcntl.flock", refuse)
    with work_folder("run") as folder:
        assert not (folder / OWNER).exists()
    assert list(temporary.iterdir()) == []
