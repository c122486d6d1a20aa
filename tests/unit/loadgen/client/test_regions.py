"""Shared-memory objects: made, named, given back."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from loadgen.client.connection import ConnectionRefused
from loadgen.client.shared_memory import FOLDER, ClientRegion, prefix, sweep


def test_memory_outlives_its_name() -> None:
    region = ClientRegion("in", 1000)
    path = FOLDER / region.name
    assert path.stat().st_size == 1000
    assert path.stat().st_mode & 0o777 == 0o600
    region.unlink()
    assert not path.exists()
    region.memory[0:4] = b"still"[:4]
    assert region.memory[0:4] == b"stil"
    region.close()
    region.close()


def test_two_regions_have_two_names() -> None:
    first, second = ClientRegion("in", 1), ClientRegion("in", 1)
    assert first.name != second.name
    first.close()
    second.close()
    assert not list(FOLDER.glob(f"{prefix(os.getpid())}*"))


def test_without_room_the_error_says_what_to_do_and_nothing_is_left() -> None:
    with pytest.raises(ConnectionRefused, match="enlarge it"):
        ClientRegion("in", 2**50)
    assert not list(FOLDER.glob(f"{prefix(os.getpid())}*"))


def test_only_the_objects_of_the_killed_process_are_swept() -> None:
    program = (
        "import os, signal; from loadgen.client.shared_memory import ClientRegion;"
        "ClientRegion('in', 10); os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.Popen([sys.executable, "-P", "-c", program])
    killed.wait(30)
    ours = ClientRegion("in", 10)
    assert len(sweep(killed.pid)) == 1
    assert not list(FOLDER.glob(f"{prefix(killed.pid)}*"))
    assert (FOLDER / ours.name).exists()
    ours.close()
