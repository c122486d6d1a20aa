"""Shared-memory objects: made, named, given back."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from loadgen.client.connection import ConnectionRefused
from loadgen.client.shared_memory import FOLDER, named_memory, prefix, sweep


def test_memory_outlives_its_name() -> None:
    with named_memory(1000) as (name, memory):
        status = (FOLDER / name).stat()
    assert (status.st_size, status.st_mode & 0o777) == (1000, 0o600)
    assert not (FOLDER / name).exists()
    memory[0:4] = b"stil"
    assert memory[0:4] == b"stil"
    memory.close()


def test_two_objects_have_two_names_and_leave_none() -> None:
    with named_memory(1) as (first, _), named_memory(1) as (second, _):
        assert first != second
    assert not list(FOLDER.glob(f"{prefix(os.getpid())}*"))


def test_without_room_the_error_says_what_to_do_and_nothing_is_left() -> None:
    with pytest.raises(ConnectionRefused, match="enlarge it"), named_memory(2**50):
        pass
    assert not list(FOLDER.glob(f"{prefix(os.getpid())}*"))


def test_only_the_objects_of_the_killed_process_are_swept() -> None:
    program = (
        "import os, signal; from loadgen.client.shared_memory import named_memory;"
        "region = named_memory(10); region.__enter__(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.Popen([sys.executable, "-P", "-c", program])
    killed.wait(60)
    with named_memory(10) as (name, _):
        assert len(sweep(killed.pid)) == 1
        assert not list(FOLDER.glob(f"{prefix(killed.pid)}*"))
        assert (FOLDER / name).exists()
