"""`abserve doctor` on this machine, and with things missing."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import typer
from typer.testing import CliRunner

from loadgen.entry import build
from servers.commands import doctor
from servers.engines.settings import KINDS, EngineError
from servers.options.launch import MachineCheck, is_loopback


def test_json_lists_every_finding_with_a_remedy_where_it_fails() -> None:
    result = CliRunner().invoke(build(), ["doctor", "--json"])
    found = json.loads(result.stdout)
    assert {"python", "torch", "triton-wheel", "gpu", "disk", "exposure"} <= {finding["name"] for finding in found}
    assert all(finding["ok"] or finding["remedy"] for finding in found)
    optional = [finding for finding in found if finding["needed_for"]]
    assert {"docker compose"} < {finding["needed_for"] for finding in optional}
    if all(finding["ok"] for finding in found if finding["name"].startswith("triton-")):
        (triton,) = (finding for finding in found if finding["name"] == "tritonserver")
        assert triton["detail"].endswith("answered: python"), "that of the wheel"
    assert result.exit_code == (0 if all(finding["ok"] for finding in found if not finding["needed_for"]) else 1)


@pytest.mark.parametrize(
    ("says", "told"),
    [
        ("error: creating server: Internal - no luck", "tritonserver ended with status 1: no luck"),
        ("Error: lost", "tritonserver ended with status 1: Error: lost"),
    ],
)
def test_the_installation_that_is_asked_for_is_the_one_that_is_tried(tmp_path: Path, says: str, told: str) -> None:
    binary = tmp_path / "bin" / "tritonserver"
    binary.parent.mkdir()
    binary.write_text(f"#!/bin/sh\necho '{says}'; exit 1\n")
    binary.chmod(0o755)
    result = CliRunner().invoke(build(), ["doctor", "--json", "--tritonserver", str(tmp_path)])
    (triton,) = (one for one in json.loads(result.stdout) if one["name"] == "tritonserver")
    assert (triton["ok"], result.exit_code) == (False, 1)
    assert triton["detail"].endswith(f"does not start: {told}")
    result = CliRunner().invoke(build(), ["doctor", "--tritonserver", str(tmp_path / "nowhere")])
    assert result.exit_code == 2
    assert "it has no executable bin/tritonserver" in result.output


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
        ("127.0.0.1", True),
        ("127.0.0.2", True),
        ("0.0.0.0", False),
        ("10.0.0.1", False),
        ("::1", True),
        ("::ffff:127.0.0.1", True),  # as gRPC listens on 127.0.0.1
        ("::ffff:10.0.0.1", False),
        ("::", False),
    ],
)
def test_which_addresses_other_machines_can_reach(address: str, loopback: bool) -> None:
    assert is_loopback(address) is loopback


def test_a_full_disk_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "MIN_FREE_BYTES", 2**70)
    assert not doctor._disk().ok
    assert doctor._disk().remedy


def test_sockets_that_only_root_may_list_are_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_kind: str) -> None:
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil, "net_connections", refuse)
    finding = doctor._exposure()
    assert finding.ok
    assert "not available" in finding.detail


def test_an_ipv6_port_open_to_everybody_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("::", 0), family=socket.AF_INET6) as public:
        monkeypatch.setattr(doctor, "PORTS", {public.getsockname()[1]: "Triton gRPC"})
        assert not doctor._exposure().ok


@pytest.mark.parametrize(("status", "ok"), [("no_library", True), ("no_device", True), ("gpu_lost", False)])
def test_a_machine_without_a_gpu_is_fine_and_a_broken_gpu_is_not(status: str, ok: bool) -> None:
    finding = doctor._gpu({"status": status, "message": "A sentence.", "devices": []})
    assert (finding.ok, finding.remedy is None) == (ok, ok)


@pytest.mark.parametrize(
    ("toolkit", "command"),
    [(True, "docker compose up --detach --wait && "), (False, "abserve compare (with the python")],
)
def test_the_next_command_uses_docker_only_where_containers_get_the_gpu(
    toolkit: bool, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = {"status": "ok", "devices": [{"name": "H200"}]}
    engine = MachineCheck("container toolkit", toolkit, "", None if toolkit else "install it")
    monkeypatch.setattr(doctor, "gpu_info", lambda _server: gpu)
    monkeypatch.setattr(doctor, "docker_checks", lambda _gpu: [engine])
    monkeypatch.setattr(doctor, "find_folder", lambda _requested: None)
    *_, last = doctor.machine_checks()
    assert last.name == "next"
    assert last.detail.startswith(command)


def test_an_optional_engine_names_its_place_or_its_command_and_never_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = tmp_path / "bin" / "python"
    places = {"here": None, "there": other, "nowhere": EngineError("the nowhere engine needs x; run: make engines")}

    def environment_of(name: str) -> Path | None:
        place = places[name]
        if isinstance(place, EngineError):
            raise place
        return place

    monkeypatch.setattr(doctor, "engine_names", lambda: ("torch", *places))
    kind = KINDS["torch"]
    monkeypatch.setattr(
        doctor, "engine_kind", lambda name: kind if name == "torch" else replace(kind, install="make engines")
    )
    monkeypatch.setattr(doctor, "environment_of", environment_of)
    found = doctor._engines()
    assert not any(check.fails for check in found)
    assert found == [
        MachineCheck("engine here", True, "installed"),
        MachineCheck("engine there", True, f"installed in {tmp_path}, which its processes enter"),
        MachineCheck(
            "engine nowhere",
            False,
            "not installed",
            "the nowhere engine needs x; run: make engines",
            "--engine nowhere",
        ),
    ]


@pytest.mark.parametrize(("needed_for", "mark", "status"), [(None, "✗", 1), ("docker compose", "○", 0)])
def test_only_a_required_thing_fails(
    needed_for: str | None, mark: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = [MachineCheck("python", True, "Python 3"), MachineCheck("it", False, "missing", "install it", needed_for)]
    monkeypatch.setattr(doctor, "machine_checks", lambda _folder: iter(checks))
    result = CliRunner().invoke(build(), ["doctor"], env={"COLUMNS": "80"})
    assert result.exit_code == status
    assert [line.split()[:2] for line in result.output.splitlines()[1:3]] == [["✓", "python"], [mark, "it"]]
    assert ("only needed for docker compose" in result.output) == bool(needed_for)
    assert ("1 of 2 checks needs attention" in result.output) == (status == 1)


def test_a_check_is_shown_before_the_next_is_made(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = []

    def checks(_folder: object) -> Iterator[MachineCheck]:
        yield MachineCheck("first", True, "here")
        seen.append(capsys.readouterr().out)
        yield MachineCheck("second", True, "here")

    monkeypatch.setattr(doctor, "machine_checks", checks)
    with pytest.raises(typer.Exit):
        doctor.doctor(None, False)
    assert "✓ first" in " ".join(seen[0].split())
