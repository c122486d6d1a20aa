"""The open loop of the locustfile: a Locust user that sends when a schedule says so, not when it is answered."""

from __future__ import annotations

from itertools import islice
from time import perf_counter_ns
from typing import Any, ClassVar

import gevent
from gevent.event import Event
from locust import task
from locust.exception import StopUser

from loadgen.clients.exchange import ConnectionRefused
from loadgen.experiment.arrivals import endless_offsets_ns
from loadgen.generator.pacer import Pacer
from loadgen.generator.users import InferenceUser
from loadgen.generator.window import LoadWindow
from loadgen.locustfile.session import LoadOptions
from loadgen.locustfile.workers import share_of

_LEAD_NS = 20_000_000


class OpenLoop(InferenceUser):
    """One image a request, --rate requests a second over all workers, from at most -u connections."""

    pacer: ClassVar[Pacer | None] = None

    @task  # type: ignore[untyped-decorator]  # locust ships no usable types
    def load(self) -> None:
        """The next request that is due; a server that is gone counts as a failure for each."""
        if self.pacer is None or not self.traffic.requests:
            raise StopUser  # the test could not be prepared
        intended_ns = self.pacer.take()
        if intended_ns is None:
            raise StopUser
        try:
            self.infer(intended_ns)
        except ConnectionRefused:
            return


def start_open_loop(environment: Any, options: LoadOptions) -> None:
    """Requests fall due from when all users are there, by this process's share of the schedule."""
    window = LoadWindow(0, 0.0, 0.0)
    OpenLoop.pacer = pacer = Pacer(window)
    begun = Event()

    def begin(user_count: int, **_: object) -> None:
        begun.set()
        # Removed while the event is being fired, a listener takes the next one's turn in older versions of Locust.
        gevent.spawn(environment.events.spawning_complete.remove_listener, begin)
        share = share_of(environment)
        if share is not None:  # else all of the rate is given out to others, and the users here only wait
            part, parts, seed = share
            offsets = islice(endless_offsets_ns(options.arrivals, options.rate_per_s, seed), part, None, parts)
            gevent.spawn(pacer.run, offsets, perf_counter_ns() + _LEAD_NS, user_count)

    def end(**_: object) -> None:
        window.cut("the test was stopped")
        gevent.spawn(environment.events.test_stop.remove_listener, end)
        if not begun.is_set():
            environment.events.spawning_complete.remove_listener(begin)

    environment.events.spawning_complete.add_listener(begin)
    environment.events.test_stop.add_listener(end)
