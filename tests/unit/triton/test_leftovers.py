"""What a killed tritonserver leaves behind is removed: empty folders in /tmp and shared memory that nobody uses."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from servers.models.registry import get_specification
from servers.models.specification import ModelSpecification
from servers.triton import process
from servers.triton.installation import TritonError
from servers.triton.process import remove_folders

HOLD = (
    "import mmap, sys; file = open(sys.argv[1]); mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ); "
    "print(1, flush=True); sys.stdin.read()"
)


def make(folder: Path, name: str, *, old: bool = True) -> Path:
    path = folder / name
    path.mkdir()
    if old:
        then = time.time() - 2 * process.YOUNG_FOLDER_SECONDS
        os.utime(path, (then, then))
    return path


def test_only_old_empty_folders_of_dead_servers_are_removed(tmp_path: Path) -> None:
    library = tmp_path / f"libbackend{os.getpid()}.so"  # of no other Triton on this machine
    library.write_bytes(bytes(4096))
    abandoned = make(tmp_path, "python_env_aBc123")
    used = make(tmp_path, "python_env_dEf456")
    (used / "lib").touch()
    os.utime(used, (0, 0))
    began_s = time.time()
    young = make(tmp_path, "python_env_gHi789", old=False)
    kept = [used, young, make(tmp_path, "python_env_of_somebody")]

    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(library)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"1\n"
        remove_folders(0, time.time() - process.YOUNG_FOLDER_SECONDS, tmp_path, library.name.encode())
        assert abandoned.exists(), "a server lives whose it may be"
        server.communicate(b"")
    remove_folders(0, time.time() - process.YOUNG_FOLDER_SECONDS, tmp_path, library.name.encode())
    assert not abandoned.exists()
    assert all(path.exists() for path in kept)
    remove_folders(young.stat().st_mtime + 1, time.time(), tmp_path, library.name.encode())
    assert young.exists(), "another server's"
    remove_folders(min(began_s, young.stat().st_mtime), time.time(), tmp_path, library.name.encode())
    assert [path.exists() for path in kept] == [True, False, True]


def test_two_largest_batches_fit(specification: ModelSpecification) -> None:
    item_bytes = 4 * (3 * 224 * 224 + 512)
    size = process.region_bytes(specification, 32)
    assert 2 * 32 * item_bytes < size < 2 * 32 * item_bytes + 18 * 2**20
    assert size % 2**20 == 0
    assert size < 64 * 2**20, "Docker's default /dev/shm has 64 MiB"


def test_an_axis_counts_with_its_largest_size() -> None:
    bert = get_specification("transformers:distilbert-base-uncased")
    assert process.region_bytes(bert, 8) > 2 * 8 * 512 * (2 * 8 + 768 * 4)


def test_too_little_space_is_said_before_a_bus_error_says_it() -> None:
    with pytest.raises(TritonError, match="--shm-size"):
        process.assert_space(1 << 60)
    process.assert_space(1)


@pytest.fixture
def prefix() -> Iterator[str]:
    prefix = process.new_prefix()
    yield prefix
    process.remove_regions(prefix)


def backdate(region: Path) -> None:
    then = time.time() - 2 * process.YOUNG_REGION_SECONDS
    os.utime(region, (then, then))


def test_only_abandoned_regions_are_removed(prefix: str) -> None:
    region = process.SHARED_MEMORY / f"{prefix}01234567-89ab"
    region.write_bytes(b"x")
    command = "import sys; print('up', flush=True); sys.stdin.read()"
    argument = f"--backend-config=python,shm-region-prefix-name={prefix}"
    with subprocess.Popen(
        [sys.executable, "-c", command, argument], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"up\n"
        backdate(region)
        process.remove_abandoned_regions()
        assert region.exists()
        server.communicate(b"")
    region.touch()
    process.remove_abandoned_regions()
    assert region.exists(), "a young one may belong to a server in a container"
    backdate(region)
    process.remove_abandoned_regions()
    assert not region.exists()
