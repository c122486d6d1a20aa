"""The processes of a server by URL: found by the port on this machine, and never taken for somebody else's."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from loadgen.base.child_process import ChildProcess
from loadgen.launch.deployment import RemoteDeployment
from tests.integration.loadgen.conftest import await_true

pytestmark = pytest.mark.usefixtures("no_process_left")

LISTEN = """
import os, socket, sys, time
sum(range(5_000_000))
listener = socket.create_server((sys.argv[1], int(sys.argv[2])), family=socket.AF_INET)
for _ in range(int(sys.argv[3])):
    if os.fork() == 0:
        time.sleep(600)
print(listener.getsockname()[1], flush=True)
time.sleep(600)
"""
TREE = """
import os, signal, socket, sys, time
listener = socket.create_server(("127.0.0.1", 0))

def engine():
    while time.process_time() < 0.3:
        pass
    time.sleep(600)

def start():
    child = os.fork()
    if child == 0:
        listener.close()
        os.setsid()
        engine()
    return child

child = start()
print(listener.getsockname()[1], flush=True)
while True:
    ended, _ = os.waitpid(child, 0)
    child = start()
"""
"""A server that listens and computes in a child, which has a session of its own and is restarted when it ends."""
Start = Callable[..., tuple[int, int]]
CpuTime = Callable[[], int | None]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a listener with workers that inherit its socket; returns its PID and port."""
    running: list[subprocess.Popen[bytes]] = []

    def run(host: str = "127.0.0.1", port: int = 0, workers: int = 0, program: str = sys.executable) -> tuple[int, int]:
        command = [program, "-c", LISTEN, host, str(port), str(workers)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
        running.append(process)
        assert process.stdout is not None
        return process.pid, int(process.stdout.readline())

    yield run
    for process in running:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture(params=["started here", "by URL"])
def supervised(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[int, Callable[[], set[int]], CpuTime]]:
    """A `TREE`: its PID, and its processes and CPU time as a deployment sees them."""
    log_path = tmp_path / "server.log"
    server = ChildProcess([sys.executable, "-c", TREE], log_path=log_path)
    await_true(lambda: log_path.read_bytes().endswith(b"\n"), "its port")
    if request.param == "by URL":
        found = remote(int(log_path.read_text()))
        yield server.pid, lambda: set(found.pids()), found.cpu_ns
    else:
        yield server.pid, lambda: {process.pid for process in server.tree()}, server.cpu_ns
    server.stop()


def test_a_child_that_works_and_is_restarted_belongs_to_the_server(
    supervised: tuple[int, Callable[[], set[int]], CpuTime],
) -> None:
    """The driver lists the child's PID, and the CPU time of a child that has ended is not lost."""
    server, pids, cpu_ns = supervised
    await_true(lambda: (cpu_ns() or 0) >= 300_000_000, "the child's work")
    (first,) = pids() - {server}
    before_ns = cpu_ns()
    assert before_ns is not None
    os.kill(first, signal.SIGKILL)
    await_true(lambda: pids() - {server, first}, "another child")
    (second,) = pids() - {server}
    assert second != first
    after_ns = cpu_ns()
    assert after_ns is not None
    assert after_ns >= before_ns
    await_true(lambda: (cpu_ns() or 0) >= before_ns + 250_000_000, "the work of the other child")


def remote(port: int, host: str = "127.0.0.1") -> RemoteDeployment:
    return RemoteDeployment(f"http://{host}:{port}")


@pytest.mark.parametrize(("bound", "asked"), [("127.0.0.1", "localhost"), ("0.0.0.0", "127.0.0.1")])
def test_a_server_here_is_its_listener_with_all_its_workers(start: Start, bound: str, asked: str) -> None:
    """The driver may list any of them, and psutil shows only one of the processes that share a socket."""
    pid, port = start(bound, workers=3)
    server = remote(port, asked)
    tree = {pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))}
    assert len(tree) == 4
    assert set(server.pids()) == tree
    assert server.processes_unknown is None
    cpu_ns = server.cpu_ns()
    assert cpu_ns is not None
    assert cpu_ns > 0


def test_another_address_with_the_same_port_is_another_server(start: Start) -> None:
    first, port = start("127.0.0.1")
    second, _ = start("127.0.0.2", port)
    assert (remote(port).pids(), remote(port, "127.0.0.2").pids()) == ((first,), (second,))
    assert remote(port, "127.0.0.3").pids() == ()


def test_a_restarted_server_is_found_again(start: Start) -> None:
    pid, port = start()
    server = remote(port)
    assert server.pids() == (pid,)
    os.kill(pid, signal.SIGKILL)
    await_true(lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, "its end")
    os.waitpid(pid, 0)
    again, _ = start(port=port)
    assert server.pids() == (again,)


def test_what_only_forwards_is_not_the_server(start: Start, tmp_path: Path) -> None:
    proxy = tmp_path / "docker-proxy"
    proxy.symlink_to(Path(sys.executable).resolve())
    _, port = start(program=str(proxy))
    server = remote(port)
    assert (server.pids(), server.cpu_ns()) == ((), None)
    assert server.processes_unknown == f"docker-proxy listens on port {port} and only forwards requests"


def test_processes_that_cannot_be_seen_are_unknown_with_the_reason(
    unused_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nobody = RemoteDeployment(unused_url)
    assert nobody.pids() == ()
    assert "no process that this program can see listens" in str(nobody.processes_unknown)
    elsewhere = RemoteDeployment("http://192.0.2.1:8000")
    assert (elsewhere.pids(), elsewhere.processes_unknown) == ((), "it runs on another machine")
    with socket.create_server(("127.0.0.1", 0)) as own:
        port = own.getsockname()[1]
        server = remote(port)
        assert server.pids() == (), "the tests and all they start are not a server"
        assert "this program" in str(server.processes_unknown)
        monkeypatch.setattr(psutil, "pids", list)
        hidden = remote(port)
        assert hidden.pids() == ()
        assert "another user" in str(hidden.processes_unknown)
