"""Runs the tests in forks of the process that has collected them (`-p tests.workers --workers N`).

Collecting takes 18 seconds of CPU time and more than a gigabyte, most of it imports; forks share both. A worker runs
whole files. Every second worker takes them from the end of the list: the tests of the first folders mostly wait for
servers, those of the last compute.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import threading
import traceback
from collections import deque
from dataclasses import dataclass
from itertools import groupby
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import pytest

Items = list[pytest.Item]
ENDED = object()
"""What comes from a worker that has ended."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=int, default=0, help="run the files of tests in so many processes")


@dataclass
class Worker:
    """A child of the process that has collected the tests."""

    number: int
    pid: int
    waiting: Items
    """Of the files that it was given: the tests whose reports have not come, in their order."""


class Reports:
    """In a worker, in place of the terminal: gives each report to the parent."""

    def __init__(self, config: pytest.Config, parent: Connection) -> None:
        self._config, self._parent = config, parent

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._parent.send(self._config.hook.pytest_report_to_serializable(config=self._config, report=report))


def _work(session: Any, parent: Connection) -> None:
    """Run the files that the parent names by their places in the collection, until it names none."""
    config: Any = session.config
    config.pluginmanager.unregister(name="terminalreporter")
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()  # its files are the parent's
    capture.start_global_capturing()
    config.pluginmanager.register(Reports(config, parent))
    folder = config._tmp_path_factory.getbasetemp() / f"worker{os.getpid()}"
    folder.mkdir()
    config._tmp_path_factory._basetemp = folder

    def more() -> Items:
        parent.send(None)
        return [session.items[place] for place in parent.recv()]

    try:
        file = more()
        while file and not (session.shouldstop or session.shouldfail):
            item = file.pop(0)
            file = file or more()
            config.hook.pytest_runtest_protocol(item=item, nextitem=file[0] if file else None)
    finally:
        session._setupstate.teardown_exact(None)  # what it has started ends, also where it is interrupted


def _fork(session: pytest.Session, number: int, others: list[Connection]) -> tuple[Connection, Worker]:
    ours, theirs = Pipe()
    if pid := os.fork():
        theirs.close()
        return ours, Worker(number, pid, [])
    for end in (ours, *others):
        end.close()
    atexit._clear()  # what the parent registered is the parent's
    status = 1
    try:
        _work(session, theirs)
        status = 0
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        pass  # the parent has ended or ends
    except Exception:  # noqa: BLE001 – as the interpreter does
        session.config.pluginmanager.getplugin("capturemanager").stop_global_capturing()  # type: ignore[union-attr]
        traceback.print_exc()
    finally:
        _end(status)


def _end(status: int) -> NoReturn:
    """As the interpreter ends, without freeing what the parent has."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    finally:
        os._exit(status)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """None, which leaves it to pytest, without `--workers` and where tests could not be collected."""
    config: Any = session.config
    count = config.option.workers
    if not count or session.testsfailed or config.option.collectonly:
        return None
    config.pluginmanager.getplugin("terminalreporter").showfspath = False  # reports of several files come mixed
    config._tmp_path_factory.getbasetemp()  # it is removed at the end, with the workers' folders
    places = {item: place for place, item in enumerate(session.items)}
    files = deque(list(items) for _, items in groupby(session.items, key=lambda item: item.path))
    config.get_terminal_writer().flush()  # else each worker has what is not yet written
    gc.collect()
    gc.freeze()
    workers: dict[Connection, Worker] = {}

    def start(number: int) -> None:
        end, worker = _fork(session, number, list(workers))
        workers[end] = worker

    def ended(end: Connection) -> None:
        """Its test failed if it ended in one; another worker takes the rest."""
        worker = workers.pop(end)
        end.close()
        status = os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])
        if not worker.waiting:
            return
        item, *rest = worker.waiting
        config.hook.pytest_runtest_logreport(report=_lost(item, status))
        files.extendleft([rest] if rest else [])
        start(worker.number)

    try:
        for number in range(count):
            start(number)
        while workers and not (session.shouldfail or session.shouldstop):
            end, *_ = wait(list(workers))
            assert isinstance(end, Connection)
            message = _received(end)
            worker = workers[end]
            if message is ENDED:
                ended(end)
            elif message is None:
                file = (files.pop if worker.number % 2 else files.popleft)() if files else []
                worker.waiting += file
                end.send([places[item] for item in file])
            else:
                report = config.hook.pytest_report_from_serializable(config=config, data=message)
                if report.when == "teardown":
                    worker.waiting = [item for item in worker.waiting if item.nodeid != report.nodeid]
                config.hook.pytest_runtest_logreport(report=report)
    finally:
        for end, worker in workers.items():
            end.close()
            os.kill(worker.pid, signal.SIGINT)
            os.waitpid(worker.pid, 0)
        gc.unfreeze()  # else libraries list at the end what was not freed
    if session.shouldfail or session.shouldstop:
        raise session.Failed(session.shouldfail or session.shouldstop)
    return True


def _received(end: Connection) -> object:
    try:
        return end.recv()
    except (EOFError, ConnectionResetError):
        return ENDED


def _lost(item: pytest.Item, status: int) -> pytest.TestReport:
    """The report of a test in which its worker ended."""
    message = f"its worker ended with the status {status}"
    return pytest.TestReport(item.nodeid, item.location, {}, "failed", message, "call")
