"""`abserve doctor` on this machine, and with things missing."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from loadgen.entry import build
from servers import doctor


def test_json_lists_every_finding_with_a_remedy_where_it_fails() -> None:
    result = CliRunner().invoke(build(), ["doctor", "--json"])
    found = json.loads(result.stdout)
    assert {"python", "torch", "triton-wheel", "gpu", "disk", "exposure"} <= {finding["name"] for finding in found}
    assert all(finding["ok"] or finding["remedy"] for finding in found)
    assert result.exit_code == (0 if all(finding["ok"] for finding in found) else 1)


def test_a_taken_port_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(doctor, "PORTS", {port: "native HTTP"})
        (finding,) = doctor._ports()
        assert not finding.ok
        assert str(port) in (finding.remedy or "")
        assert doctor._exposure().ok


def test_a_port_open_to_everybody_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as public:
        public.bind(("0.0.0.0", 0))
        public.listen()
        monkeypatch.setattr(doctor, "PORTS", {public.getsockname()[1]: "native HTTP"})
        finding = doctor._exposure()
    assert not finding.ok
    assert "native HTTP" in finding.detail


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("0100007F", True),
        ("0200007F", True),
        ("00000000", False),
        ("0100000A", False),  # 10.0.0.1
        ("00000000000000000000000001000000", True),  # ::1
        ("0000000000000000FFFF00000100007F", True),  # ::ffff:127.0.0.1, as gRPC listens on 127.0.0.1
        ("0000000000000000FFFF00000100000A", False),
        ("00000000000000000000000000000000", False),
    ],
)
def test_which_addresses_are_reachable_from_outside(address: str, loopback: bool) -> None:
    assert doctor._is_loopback(address) is loopback


def test_a_full_disk_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "MIN_FREE_BYTES", 2**70)
    assert not doctor._disk().ok
    assert doctor._disk().remedy


def test_reading_proc_finds_nothing_where_it_is_absent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "Path", lambda _: tmp_path)
    assert doctor._public_listeners() == set()
