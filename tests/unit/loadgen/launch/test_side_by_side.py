"""Several comparisons at once on one machine: ports and result folders that no other one gets."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from loadgen.cli.output import default_out
from loadgen.launch import embedded
from loadgen.launch.embedded import PortReservation, port_range


@pytest.fixture(autouse=True)
def locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of these tests alone."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"abserve-ports-{os.getuid()}"


def free_range(count: int) -> range:
    """So many ports in a row that nobody listens on."""
    first = 21_000
    while not all(embedded._is_free(port) for port in range(first, first + count)):
        first += 1
    return range(first, first + count)


def test_what_is_reserved_nobody_else_gets_until_it_is_released(locks: Path) -> None:
    places = free_range(6)
    first, second = PortReservation(3, places), PortReservation(3, places)
    assert sorted((*first.ports, *second.ports)) == list(places)
    with pytest.raises(OSError, match="fewer than 1 of the ports"):
        PortReservation(1, places)
    taken = first.ports
    first.release()
    first.release()
    assert set(PortReservation(3, places).ports) == set(taken)
    second.release()
    assert len(list(locks.iterdir())) == 3  # of the third, which is not released


def test_another_process_is_heeded_and_its_end_too(tmp_path: Path) -> None:
    places = free_range(2)
    code = (
        "import sys, tempfile; tempfile.tempdir = sys.argv[1]\n"
        "from loadgen.launch.embedded import PortReservation\n"
        "print(*PortReservation(1, range(int(sys.argv[2]), int(sys.argv[3]))).ports, flush=True); sys.stdin.read()"
    )
    argv = [sys.executable, "-c", code, str(tmp_path), str(places.start), str(places.stop)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        theirs = int(other.stdout.readline())
        ours = PortReservation(1, places)
        assert {theirs, *ours.ports} == set(places)
        with pytest.raises(OSError, match="fewer than"):
            PortReservation(1, places)
        other.kill()
    assert PortReservation(1, places).ports == (theirs,)


def test_many_at_once_get_different_ports() -> None:
    places = free_range(40)
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: PortReservation(3, places), range(12)))
    assert len({port for reservation in made for port in reservation.ports}) == 36


def test_a_port_that_somebody_listens_on_is_passed_over() -> None:
    places = free_range(2)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", places[0]))
        listener.listen()
        assert PortReservation(1, places).ports == (places[1],)


def test_a_folder_that_cannot_be_made_costs_only_the_lock(locks: Path) -> None:
    locks.write_text("a file")
    places = free_range(1)
    assert PortReservation(1, places).ports == tuple(places)


def test_outgoing_connections_take_none_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = tmp_path / "range"
    monkeypatch.setattr(embedded, "EPHEMERAL", told)
    assert port_range() == range(20_000, 32_768)
    told.write_text("28000\t60999\n")
    assert port_range() == range(20_000, 28_000)
    told.write_text("1024\t65535\n")
    assert port_range() == range(20_000, 60_000)


def test_runs_of_one_second_have_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: default_out("m"), range(20)))
    assert len(set(folders)) == 20
    assert all(folder.is_dir() for folder in folders)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    Path("results").write_text("a file")
    assert not default_out("m").exists()
