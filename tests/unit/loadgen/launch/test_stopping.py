"""Servers end at the same time, each of them whatever another one does."""

from __future__ import annotations

from threading import Barrier

import pytest

from loadgen.launch.deployment import Deployment, stop_all


class Meeting(Deployment):
    """Ends when all the others are ending too."""

    def __init__(self, barrier: Barrier, error: str = "") -> None:
        self._barrier, self._error, self.stopped = barrier, error, False

    def stop(self) -> None:
        self._barrier.wait(60)
        self.stopped = True
        if self._error:
            raise OSError(self._error)


def test_servers_are_stopped_at_the_same_time_and_all_of_them() -> None:
    barrier = Barrier(3)
    servers = [Meeting(barrier), Meeting(barrier, "cannot be stopped"), Meeting(barrier)]
    with pytest.raises(OSError, match="cannot be stopped"):
        stop_all(servers)
    assert [server.stopped for server in servers] == [True, True, True]
    stop_all([])
