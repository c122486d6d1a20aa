"""What a killed tritonserver leaves in /tmp goes with a later launch, what may be somebody's stays."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from servers.triton import leftovers
from servers.triton.leftovers import remove_abandoned_folders, remove_folders

HOLD = (
    "import mmap, sys; file = open(sys.argv[1]); mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ); "
    "print(1, flush=True); sys.stdin.read()"
)


def make(folder: Path, name: str, *, old: bool = True) -> Path:
    path = folder / name
    path.mkdir()
    if old:
        then = time.time() - 2 * leftovers.YOUNG_FOLDER_SECONDS
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
        remove_abandoned_folders(tmp_path, library.name.encode())
        assert abandoned.exists(), "a server lives whose it may be"
        server.communicate(b"")
    remove_abandoned_folders(tmp_path, library.name.encode())
    assert not abandoned.exists()
    assert all(path.exists() for path in kept)
    remove_folders(young.stat().st_mtime + 1, time.time(), tmp_path, library.name.encode())
    assert young.exists(), "another server's"
    remove_folders(min(began_s, young.stat().st_mtime), time.time(), tmp_path, library.name.encode())
    assert [path.exists() for path in kept] == [True, False, True]
