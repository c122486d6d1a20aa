"""What a killed writer leaves behind, and that only that is removed."""

from __future__ import annotations

import errno
import hashlib
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from servers.models import files
from servers.models.files import atomic_folder, file_sha256, keep_file, known_sha256, remove_abandoned

WRITER = """
import sys
from pathlib import Path
from servers.models.files import atomic_folder
with atomic_folder(Path(sys.argv[1])) as fresh:
    (fresh / "model.onnx").write_bytes(bytes(1000))
    print("written", flush=True)
    sys.stdin.read()
"""


def killed_writer(final: Path) -> None:
    """A process that dies of SIGKILL while it writes."""
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(final)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"written\n"
        writer.kill()


def test_what_a_killed_writer_left_goes_and_nothing_else(tmp_path: Path) -> None:
    final, other = tmp_path / "file-x.pt", tmp_path / "file-x.pt-fused"
    with atomic_folder(final) as fresh:
        (fresh / "model.onnx").write_bytes(b"kept")
    killed_writer(final)
    killed_writer(other)
    (tmp_path / ".file-x.pt.lock").touch()
    assert len(list(tmp_path.glob(".*.part"))) == 2
    remove_abandoned(final)
    (left,) = tmp_path.glob(".*.part")
    assert left.name.startswith(".file-x.pt-fused.")
    assert (final / "model.onnx").read_bytes() == b"kept"
    assert (tmp_path / ".file-x.pt.lock").exists()


def test_a_file_that_does_not_fit_keeps_the_old_one_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "choice.json"
    assert keep_file(path, b"old") is None
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4, hard))  # the kernel refuses a larger file, as it does on a full disk
    try:
        failure = keep_file(path, b"too long")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert failure is not None
    assert failure.errno == errno.EFBIG
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_large_file_is_read_again_only_when_it_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    read: list[Path] = []

    def hashed(*paths: Path) -> str:
        read.extend(paths)
        return file_sha256(*paths)

    monkeypatch.setattr(files, "file_sha256", hashed)
    large = tmp_path / "model.onnx"
    large.write_bytes(b"old")
    assert known_sha256(large) == known_sha256(large) == file_sha256(large)
    assert len(read) == 2, "it may be written again within the same tick"
    monkeypatch.setattr(files, "SETTLED_NS", -(10**18))
    assert known_sha256(large) == known_sha256(large) == file_sha256(large)
    assert len(read) == 3
    large.write_bytes(b"another")
    assert known_sha256(large) == file_sha256(large)
    monkeypatch.setattr(files, "_known", {})  # in another process
    assert known_sha256(large) == file_sha256(large)
    assert len(read) == 4
    (kept,) = (tmp_path / "cache/abserve/hashes").iterdir()
    kept.write_bytes(b"\xff damaged")
    monkeypatch.setattr(files, "_known", {})
    assert known_sha256(large) == file_sha256(large)
    assert len(read) == 5
    data = tmp_path / "model.onnx.data"
    data.write_bytes(b"weights")
    assert known_sha256(large, data) == known_sha256(large, data) == hashlib.sha256(b"anotherweights").hexdigest()
    assert len(read) == 7
    data.write_bytes(b"WEIGHTS")
    assert known_sha256(large, data) == hashlib.sha256(b"anotherWEIGHTS").hexdigest()


def test_without_a_cache_a_process_reads_a_large_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)
    monkeypatch.setattr(files, "SETTLED_NS", -(10**18))
    large = tmp_path / "model.onnx"
    large.write_bytes(b"old")
    sha256 = known_sha256(large)
    monkeypatch.setattr(files, "file_sha256", None)
    assert known_sha256(large) == sha256
