"""Real servers and a real machine that are not as they should be: what records and reports say of it."""

from __future__ import annotations

import io
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from rich.console import Console

from loadgen.launch.deployment import RemoteDeployment
from loadgen.measure.arms import Arm
from loadgen.measure.machine_watch import machine_load, read_processors, server_processes
from loadgen.measure.progress import RunProgress
from loadgen.measure.runner import run_experiment
from loadgen.records.run import ArmRequest, Experiment, MachineLoad, RunState, Workload
from loadgen.report.contents import result_document
from loadgen.report.renderers.html import render_html
from loadgen.report.renderers.markdown import render_markdown
from loadgen.report.renderers.terminal import print_document
from loadgen.verdict.result import analyse
from tests.integration.loadgen.conftest import FAKE_ABSERVE, blocks, make_experiment

pytestmark = pytest.mark.usefixtures("no_process_left")


def run(experiment: Experiment, out: Path) -> RunState:
    return run_experiment(experiment, out, RunProgress(), abserve=FAKE_ABSERVE)


def test_a_server_that_closes_every_connection_is_named_and_pays_for_it(tmp_path: Path) -> None:
    """The attacker's case: nothing said so, and the time to connect again was in no latency."""
    out = tmp_path / "run"
    workload = Workload(
        scenario="single", batch_size=1, concurrency=1, requests=30, seconds=0.1, max_seconds=5.0, rounds=2
    )
    state = run(make_experiment(b_settings={"close": "true"}, workloads=(workload,)), out)
    assert (state.state, state.error) == ("finished", None)
    for record in blocks(out):
        assert record.reconnects == (0 if record.label == "a" else record.requests)
    result = analyse(out)
    assert {s.label: s.reconnect_share for s in result.summaries} == {"a": 0.0, "b": 1.0}
    said = f"100 % of the requests to {result.names['b']} had to reconnect"
    stream = io.StringIO()
    print_document(result_document(result), Console(file=stream, width=100, color_system=None))
    for shown in (stream.getvalue(), render_markdown(result_document(result)), render_html(result_document(result))):
        assert said in " ".join(shown.split())
        assert "A server closed its connections" in shown


@pytest.fixture
def busy_cores(tmp_path: Path) -> Iterator[None]:
    """A busy loop on every core, by processes that are no descendants of this one; nice, so that servers start soon."""
    program = tmp_path / "busy-neighbour"
    program.symlink_to("/bin/sh")
    loops = " ".join(
        f"nice timeout 60 {program} -c 'while :; do :; done' >/dev/null 2>&1 & echo $!;"
        for _ in os.sched_getaffinity(0)
    )
    started = subprocess.run(
        ["/bin/sh", "-c", loops], capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL
    )
    yield
    for number in started.stdout.split():
        with suppress(ProcessLookupError):
            os.kill(int(number), signal.SIGTERM)


@pytest.mark.usefixtures("busy_cores", "watched_machine")
def test_other_processes_that_keep_the_cores_busy_make_the_run_rough(tmp_path: Path) -> None:
    """The attacker's case: the machine was looked at once, before the load, and 100 % busy passed as VALID."""
    out = tmp_path / "run"
    workload = Workload(
        scenario="single", batch_size=1, concurrency=1, requests=5, seconds=0.5, max_seconds=5.0, rounds=2
    )
    state = run(make_experiment(workloads=(workload,)), out)
    assert (state.state, state.error) == ("finished", None)
    loads = [record.machine for record in blocks(out)]
    for load in loads:
        assert load is not None
        assert load.known_ns is not None
        assert load.steal_ns is not None
        assert any("busy-neighbour, " in program for program in load.others)
    result = analyse(out)
    check = next(c for c in result.checks if c.name == "other_processes")
    assert (check.ok, check.severity) == (False, "roughens"), check.detail
    assert "busy-neighbour, " in check.detail
    assert all(c.lost is not None and min(c.lost) > 0.0 for c in result.comparisons if c.ratios)


@pytest.mark.usefixtures("watched_machine")
def test_the_processes_of_a_server_by_url_are_found_where_it_runs_here(fake_url) -> None:
    """One that is elsewhere uses no core of this machine; of one behind a proxy nothing is known."""

    def watched(url: str) -> MachineLoad | None:
        servers = server_processes([Arm(ArmRequest(label="a", target=url), RemoteDeployment(url), "m")])
        return machine_load(read_processors(), read_processors(), servers)

    here, elsewhere = watched(fake_url()), watched("http://192.0.2.1:80")
    assert here is not None
    assert elsewhere is not None
    assert None not in (here.known_ns, elsewhere.known_ns)
    with socket.create_server(("127.0.0.1", 0)) as unheard:
        port = unheard.getsockname()[1]
    closed = watched(f"http://127.0.0.1:{port}")
    assert closed is not None
    assert closed.known_ns is None
