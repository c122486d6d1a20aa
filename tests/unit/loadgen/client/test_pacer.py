"""How early an open loop's timer is set, with a clock that only the test moves."""

from __future__ import annotations

import gevent
import pytest

import loadgen.client.pacer
from loadgen.client.pacer import Pacer
from loadgen.client.traffic import LoadWindow

US = 1_000


class Machine:
    """Stands in for the clock and the timer of a machine on which a user begins so long after its timer."""

    def __init__(self, delay_us: int) -> None:
        self.now_ns = 0
        self.delay_ns = delay_us * US
        self.broken = False

    def clock(self) -> int:
        self.now_ns += US
        return self.now_ns

    def wait_until(self, moment_ns: int) -> None:
        if self.broken:
            raise OSError("the timer is broken")
        gevent.sleep(0)  # the users go on
        self.now_ns = max(self.now_ns, moment_ns + self.delay_ns)

    def close(self) -> None:
        pass


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(0)
    monkeypatch.setattr(loadgen.client.pacer, "MonotonicTimer", lambda: made)
    monkeypatch.setattr(loadgen.client.pacer, "perf_counter_ns", made.clock)
    return made


def run(machine: Machine, gap_us: int, requests: int) -> tuple[Pacer, list[int]]:
    """One user of a constant loop; how late each of its requests is, in µs."""
    pacer, late = Pacer(LoadWindow(0, 0.0, 0.0)), list[int]()

    def user() -> None:
        while (intended_ns := pacer.take()) is not None:
            late.append((machine.now_ns - intended_ns) // US)

    greenlet = gevent.spawn(user)
    pacer.run([number * gap_us * US for number in range(1, requests + 1)], machine.clock(), 1)
    greenlet.join()
    return pacer, late


def test_a_fast_machine_waits_actively_for_no_longer_than_it_must(machine: Machine) -> None:
    """20 µs from the timer to the user, at 10,000 requests per second. Set 100 µs early each time, the timer left 80 µs
    of every 100 to be waited for, in which no answer was read."""
    machine.delay_ns = 20 * US
    pacer, late = run(machine, 100, 4000)
    assert len(late) == 4000
    assert min(late) >= 0, "nothing is sent early"
    assert max(late) < 10
    assert pacer.spun_ns < 4000 * 10 * US


def test_a_slow_machine_sets_the_timer_earlier(machine: Machine) -> None:
    """180 µs, as in an idle virtual machine. Set 100 µs early, the timer made every request 80 µs late."""
    machine.delay_ns = 180 * US
    _, late = run(machine, 10_000, 400)
    assert min(late) >= 0
    assert max(late[100:]) < 10


def test_a_request_that_waits_for_a_user_stays_due_when_it_was(machine: Machine) -> None:
    """Else the wait for a slow server would be in no latency (coordinated omission)."""
    pacer, due = Pacer(LoadWindow(0, 0.0, 0.0)), list[int]()

    def user() -> None:
        while (intended_ns := pacer.take()) is not None:
            due.append(intended_ns)
            machine.now_ns += 500 * US  # the answer takes five times as long as the next request is away

    greenlet = gevent.spawn(user)
    start_ns = machine.clock()
    pacer.run([number * 100 * US for number in range(1, 21)], start_ns, 1)
    greenlet.join()
    assert due == [start_ns + number * 100 * US for number in range(1, 21)]
    assert machine.now_ns - due[-1] > 5_000 * US


def test_users_end_when_the_timer_fails(machine: Machine) -> None:
    pacer = Pacer(LoadWindow(0, 0.0, 0.0))
    user = gevent.spawn(pacer.take)
    gevent.sleep(0)
    machine.broken = True
    with pytest.raises(OSError, match="broken"):
        pacer.run([10_000 * US], 0, 1)
    user.join(timeout=5.0)
    assert user.ready(), "it waited for ever"
    assert user.value is None
