"""The locustfile: `locust -f loadgen/scenarios.py --host http://127.0.0.1:8100`, with the web page or `--headless`.

It drives any server of the Open Inference Protocol: the native server (port 8100), Triton (port 8000) or another.
Name one of the user classes to choose a scenario; without a name it is Concurrent.

    Single       one user, one image a request
    Batched      --batch-size images a request, from each of the -u users
    Concurrent   one image a request, from each of the -u users at once: what dynamic batching is for
    OpenLoop     one image a request, --rate of them a second whatever becomes of the answers, on at most -u connections
    ColdStart    a stopwatch: start it, then start the server; it reports when the server was live, when it was ready
                 and when it had answered one image, all from Locust's own start, and ends

    locust -f loadgen/scenarios.py --host http://127.0.0.1:8000 --headless -u 16 -t 30s Concurrent

On several processes of this machine (`--processes 4`) or on several machines (`--master` on one, `--worker
--master-host HOST` on the others) they share the users and the rate; see docs/load.md.

Options beside Locust's own (its --help does not list them, its web page does), each also as an environment variable:

    --model NAME               ABSERVE_LOAD_MODEL             model to ask
    --batch-size N             ABSERVE_LOAD_BATCH_SIZE        images a request in Batched
    --payload PAYLOAD          ABSERVE_LOAD_PAYLOAD           how an image travels: fp32, uint8, jpeg
    --protocol TRANSPORT       ABSERVE_LOAD_PROTOCOL          http, grpc or shm (shared memory, on the server's machine)
    --grpc HOST:PORT           ABSERVE_LOAD_GRPC              gRPC door; default: the host's, HTTP port + 1
    --samples-dir DIR          ABSERVE_LOAD_SAMPLES_DIR       images to send, from `abserve samples --out DIR`
    --samples-out DIR          ABSERVE_LOAD_SAMPLES_OUT       raw samples in nanoseconds, one .npy a class and process
    --rate RATE                ABSERVE_LOAD_RATE              requests a second in OpenLoop, over all workers
    --arrivals KIND            ABSERVE_LOAD_ARRIVALS          how they fall due: poisson or constant
    --request-timeout SECONDS  ABSERVE_LOAD_REQUEST_TIMEOUT   until a request counts as failed
    --metrics-port PORT        ABSERVE_LOAD_METRICS_PORT      Prometheus metrics of the generator; 0: none
    --metrics-host HOST        ABSERVE_LOAD_METRICS_HOST      address that they listen on

Locust's own percentiles are rounded to two digits; the raw samples are not.
"""

from __future__ import annotations

import logging
import sys
from itertools import islice
from time import perf_counter_ns
from typing import Any, ClassVar

import gevent
from gevent.event import Event
from locust import events, task
from locust.exception import StopUser

from loadgen.experiment.arrivals import endless_offsets_ns
from loadgen.exporters.load import export_load
from loadgen.generator.pacer import Pacer
from loadgen.generator.users import InferenceUser
from loadgen.generator.window import LoadWindow
from loadgen.locustfile.session import LoadOptions, Session
from loadgen.locustfile.workers import MasterSide, WorkerSide, share_of
from loadgen.transport.endpoint import Endpoint, EndpointError
from loadgen.transport.exchange import ConnectionRefused
from loadgen.transport.inputs import InputError
from loadgen.transport.requests import Address, AddressError

DEFAULT_HOST = "http://127.0.0.1:8100"
_POLL_SECONDS = 0.005
_AFTER_REFUSAL_SECONDS = 0.5
_FLUSH_SECONDS = 0.5
_OPEN_LEAD_NS = 20_000_000

logger = logging.getLogger("abserve")


class _ClosedLoopUser(InferenceUser):
    """Sends the next request when the last one is answered."""

    abstract = True

    @task  # type: ignore[untyped-decorator]  # locust ships no usable types
    def load(self) -> None:
        """One request; a server that is gone is asked again after a while, each time counted as a failure."""
        if not self.traffic.requests:
            raise StopUser  # the test could not be prepared; raised in on_start, Locust would print a traceback
        try:
            self.infer()
        except ConnectionRefused:
            gevent.sleep(_AFTER_REFUSAL_SECONDS)


class Single(_ClosedLoopUser):
    """One image at a time from one user, whatever -u says."""

    fixed_count = 1


class Batched(_ClosedLoopUser):
    """--batch-size images in every request."""


class Concurrent(_ClosedLoopUser):
    """One image in every request, from many users."""


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


class ColdStart(InferenceUser):
    """Waits for a server that is being started, and times it."""

    fixed_count = 1

    @task  # type: ignore[untyped-decorator]  # locust ships no usable types
    def watch(self) -> None:
        """Live, ready, first answer, end. What needs no server is prepared before the clock runs."""
        self.session = Session(self.environment, LoadOptions.parse(self.environment))
        try:
            self.session.load_inputs()
        except InputError as exc:
            _give_up(self.environment, str(exc))
            raise StopUser from exc
        self.started_ns = perf_counter_ns()
        options = self.session.options
        endpoint = Endpoint(self.environment.host, timeout_s=options.timeout_s)
        self._await("server live", endpoint.live)
        self._await("model ready", lambda: endpoint.ready(options.model))
        try:
            self.traffic = self.session.traffic(type(self).__name__, 1, bodies=1)
            self.connection = self.traffic.connection()
        except (AddressError, EndpointError, InputError) as exc:
            _give_up(self.environment, str(exc))
            raise StopUser from exc
        if self.infer():
            self._report("first answer")
        self.session.close()
        gevent.spawn(self.environment.runner.quit if _headless(self.environment) else self.environment.runner.stop)
        raise StopUser

    def _await(self, name: str, there: Any) -> None:
        while not there():
            gevent.sleep(_POLL_SECONDS)
        self._report(name)

    def _report(self, name: str) -> None:
        self.environment.events.request.fire(
            request_type="START",
            name=name,
            response_time=(perf_counter_ns() - self.started_ns) / 1e6,
            response_length=0,
            exception=None,
            context={},
        )


@events.init_command_line_parser.add_listener  # type: ignore[untyped-decorator]  # locust ships no usable types
def _add_options(parser: Any) -> None:
    LoadOptions.add_to(parser)
    # Locust's own default is every interface, for a page and a channel without a password.
    parser.set_defaults(web_host="127.0.0.1", master_bind_host="127.0.0.1")


@events.init.add_listener  # type: ignore[untyped-decorator]  # locust ships no usable types
def _init(environment: Any, **_: object) -> None:
    """Defaults, and one question to the server before a headless run starts."""
    environment.host = environment.host or DEFAULT_HOST
    options = environment.parsed_options
    _export_metrics(environment)
    if _is(environment, "MasterRunner"):
        MasterSide(environment)
    environment.abserve_worker = WorkerSide(environment) if _is(environment, "WorkerRunner") else None
    if not options.user_classes and not getattr(options, "class_picker", False):
        environment.user_classes[:] = [Concurrent]
    if environment.user_classes == [OpenLoop] and options.spawn_rate is None and options.num_users:
        options.spawn_rate = float(options.num_users)  # connections are a limit and no load: none has to come slowly
    if _headless(environment) and not options.worker and ColdStart not in environment.user_classes:
        problem = _problem(environment)
        if problem is not None:
            logger.error(problem)
            sys.exit(1)


def _export_metrics(environment: Any) -> None:
    """A worker always counts: whether its master shows the counts is for the master to know."""
    options = environment.parsed_options
    if not options.metrics_port and not options.worker:
        return
    try:
        export_load(environment, options.metrics_port, options.metrics_host)
    except OSError as exc:
        reason = exc.strerror or exc
        logger.error(f"no metrics at port {options.metrics_port}: {reason}; choose another --metrics-port")  # noqa: TRY400 (the sentence says it all)
        sys.exit(1)


@events.test_start.add_listener  # type: ignore[untyped-decorator]  # locust ships no usable types
def _test_start(environment: Any, **_: object) -> None:
    """Prepare the bodies where the users run: here or in a worker, not in a master."""
    if _is(environment, "MasterRunner"):
        return
    session = Session(environment, LoadOptions.parse(environment))
    for user_class in environment.user_classes:
        user_class.traffic = session.idle_traffic()
    if (problem := session.options.problem()) is not None:
        _give_up(environment, problem)
        return
    try:
        for user_class in environment.user_classes:
            if user_class is not ColdStart:
                size = session.options.batch_size if user_class is Batched else 1
                user_class.traffic = session.traffic(user_class.__name__, size)
    except (AddressError, EndpointError, InputError, OSError) as exc:
        _give_up(environment, str(exc))
        return
    except MemoryError:
        _give_up(
            environment, f"requests of {session.options.batch_size} images do not fit into memory: lower --batch-size"
        )
        return
    if OpenLoop in environment.user_classes:
        _start_open_loop(environment, session.options)
    worker = environment.abserve_worker
    if worker is not None:
        worker.started(session.files())
    flusher = gevent.spawn(_flush, environment, session)

    def finish(**_: object) -> None:
        environment.events.test_stop.remove_listener(finish)
        flusher.kill()
        try:
            finished = session.close()
            if worker is not None:
                worker.hand_in(finished)
        except OSError as exc:
            _storage_failed(environment, exc)

    environment.events.test_stop.add_listener(finish)


@events.quitting.add_listener  # type: ignore[untyped-decorator]  # locust ships no usable types
def _quitting(environment: Any, **_: object) -> None:
    """A test that has measured nothing must not look like a good one."""
    counted = environment.runner is not None and environment.runner.stats.total.num_requests
    if counted or environment.process_exit_code is not None or not _headless(environment):
        return
    if not _is(environment, "WorkerRunner"):
        logger.error("no request was sent before the test ended: give it more time (-t), or users faster (-r)")
        environment.process_exit_code = 1


def _start_open_loop(environment: Any, options: LoadOptions) -> None:
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
            gevent.spawn(pacer.run, offsets, perf_counter_ns() + _OPEN_LEAD_NS, user_count)

    def end(**_: object) -> None:
        window.cut("the test was stopped")
        gevent.spawn(environment.events.test_stop.remove_listener, end)
        if not begun.is_set():
            environment.events.spawning_complete.remove_listener(begin)

    environment.events.spawning_complete.add_listener(begin)
    environment.events.test_stop.add_listener(end)


def _flush(environment: Any, session: Session) -> None:
    while True:
        gevent.sleep(_FLUSH_SECONDS)
        try:
            session.flush()
        except OSError as exc:
            _storage_failed(environment, exc)
            return


def _storage_failed(environment: Any, exc: OSError) -> None:
    _give_up(environment, f"the samples cannot be stored: {exc.strerror or exc}; choose another --samples-out")


def _problem(environment: Any) -> str | None:
    """Why a run cannot start, in a sentence with its remedy."""
    options = LoadOptions.parse(environment)
    if (problem := options.problem()) is not None:
        return problem
    if OpenLoop in environment.user_classes and options.rate_per_s == 0.0:
        return "OpenLoop: say how many requests a second fall due, as in --rate 50"
    model = options.model
    try:
        endpoint = Endpoint(environment.host)
        options.target(endpoint.address)
        endpoint.signature(model)
    except AddressError as exc:
        return f"--host: {exc}"
    except EndpointError as exc:
        return f"{exc}. Start a server, for example: abserve serve native; or name another with --host"
    if not endpoint.ready(model):
        return f"the model {model} at {Address.parse(environment.host).url} is not ready yet; wait for it"
    return None


def _give_up(environment: Any, problem: str) -> None:
    logger.error(problem)
    environment.process_exit_code = 1
    # Locust is still in the middle of starting: stop it from outside of its own call.
    gevent.spawn_later(0.1, environment.runner.quit if _headless(environment) else environment.runner.stop)


def _is(environment: Any, runner: str) -> bool:
    return type(environment.runner).__name__ == runner


def _headless(environment: Any) -> bool:
    return bool(getattr(environment.parsed_options, "headless", False))
