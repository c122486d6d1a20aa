"""A command that measures waits for a quiet machine, and gives up with the names of what disturbs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from loadgen.cli import compare, engines, quiet
from loadgen.entry import build
from loadgen.measure import machine_watch
from loadgen.measure.machine_watch import OtherPrograms
from loadgen.records.run import ArmRequest

BUSY = OtherPrograms(0.49, 2, ("PID 812 python3 train.py, 0.98 cores",))
CALM = OtherPrograms(0.10, 2, ())


class Machine:
    """What is seen at each look; the last stays."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *looks: OtherPrograms | None) -> None:
        self.looks, self.servers = list(looks), []  # type: tuple[list[OtherPrograms | None], list[Sequence[int]]]
        monkeypatch.setattr(machine_watch, "read_others", self.read)

    def read(self, _: float, servers: Sequence[int]) -> OtherPrograms | None:
        self.servers.append(servers)
        return self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]


@pytest.mark.parametrize("seen", [CALM, None])
def test_on_a_quiet_machine_nothing_is_said(
    seen: OtherPrograms | None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    machine = Machine(monkeypatch, seen)
    quiet.await_quiet(wait=True)
    assert len(machine.servers) == 1
    assert capfd.readouterr() == ("", "")


def test_it_waits_until_the_others_are_done(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    machine = Machine(monkeypatch, BUSY, BUSY, CALM)
    quiet.await_quiet(wait=True)
    assert len(machine.servers) == 3
    first, last = capfd.readouterr().err.splitlines()
    assert first == (
        "note: waiting up to 60 s for a quiet machine: other programs use 49 % of 2 cores "
        "(PID 812 python3 train.py, 0.98 cores)"
    )
    assert last.startswith("note: quiet after ")


def test_it_gives_up_with_their_names(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(quiet, "WAIT_SECONDS", 0.05)
    Machine(monkeypatch, BUSY)
    with pytest.raises(typer.Exit) as ended:
        quiet.await_quiet(wait=True)
    assert ended.value.exit_code == 1
    last = capfd.readouterr().err.splitlines()[-1]
    assert last.startswith("error: busy machine: other programs use 49 % of 2 cores (PID 812 python3 train.py, 0.98 ")
    assert last.endswith("leave --strict out")


def test_it_looks_once_and_goes_on(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    machine = Machine(monkeypatch, BUSY)
    quiet.await_quiet(wait=False)
    assert len(machine.servers) == 1
    assert "PID 812 python3 train.py, 0.98 cores" in capfd.readouterr().err


def test_programs_that_cannot_be_seen_are_not_named() -> None:
    assert "belong to another container or user" in str(OtherPrograms(0.5, 2, ()))


def test_nothing_starts_and_nothing_is_written_on_a_busy_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ABSERVE_ANYWAY")
    monkeypatch.setattr(quiet, "WAIT_SECONDS", 0.05)
    monkeypatch.setattr(compare, "check_run", lambda plan, *_: plan)
    monkeypatch.setattr(compare, "run_and_report", lambda *_: pytest.fail("it ran"))
    Machine(monkeypatch, BUSY)
    done = CliRunner().invoke(build(), ["compare", "--strict", "--out", str(tmp_path / "run")])
    assert done.exit_code == 1, done.output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("out", [True, False])
def test_the_engines_have_no_folder_on_a_busy_machine(
    out: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ABSERVE_ANYWAY")
    monkeypatch.setattr(quiet, "WAIT_SECONDS", 0.05)
    monkeypatch.setattr(engines, "_new", lambda *_: (SimpleNamespace(settings={"strict": True}), None))
    monkeypatch.setattr(engines, "_run", lambda *_, **__: pytest.fail("it ran"))
    monkeypatch.chdir(tmp_path)
    Machine(monkeypatch, BUSY)
    done = CliRunner().invoke(build(), ["engines", *(["--out", "matrix"] if out else [])])
    assert done.exit_code == 1, done.output
    assert "busy machine" in done.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options", [[], ["--strict", "--anyway"]])
def test_a_busy_machine_is_measured(options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ABSERVE_ANYWAY")
    monkeypatch.setattr(compare, "check_run", lambda plan, *_: plan)
    monkeypatch.setattr(compare, "run_and_report", lambda *_: (0, None))
    Machine(monkeypatch, BUSY)
    done = CliRunner().invoke(build(), ["compare", *options, "--out", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output


def test_the_servers_of_the_arms_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """One by URL runs already, one that is started does not."""
    machine = Machine(monkeypatch, CALM)
    with subprocess.Popen(
        [sys.executable, "-m", "http.server", "0", "--bind", "127.0.0.1"], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as server:  # fmt: skip
        assert server.stdout is not None
        port = re.search(r"port (\d+)", server.stdout.readline())
        assert port is not None
        arms = [ArmRequest(label="a", target="native"), ArmRequest(label="b", target=f"http://127.0.0.1:{port[1]}")]
        quiet.await_quiet(wait=True, arms=arms)
        server.terminate()
    assert machine.servers == [[server.pid]]
