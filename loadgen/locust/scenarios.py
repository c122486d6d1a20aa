"""The locustfile: `locust -f loadgen/scenarios.py --host http://127.0.0.1:8100`, with the web page or `--headless`.

It loads any server of the Open Inference Protocol: the native server (port 8100), Triton (port 8000) or another. The
scenario is the name of a user class; the default is Concurrent.

    Single       one user, one input per request
    Batched      --batch-size inputs per request, from each of the -u users
    Concurrent   one input per request, from each of the -u users at once: the load for dynamic batching
    OpenLoop     one input per request, --rate requests per second whether or not answers come, on at most -u
                 connections
    ColdStart    a stopwatch: start it, then start the server; it reports when the server was live, when it was ready
                 and when it had answered one request, all from Locust's own start, and ends

    locust -f loadgen/scenarios.py --host http://127.0.0.1:8000 --headless -u 16 -t 30s Concurrent

Several processes of this machine (`--processes 4`) or several machines (`--master` on one, `--worker --master-host
HOST` on the others) share the users and the rate; see docs/load.md.

Options beside Locust's own (its web page shows them, its --help does not), each also as an environment variable:

    --model NAME               ABSERVE_LOAD_MODEL             the model's name on the server, or its reference;
                                                              default: the server's only one
    --batch-size N             ABSERVE_LOAD_BATCH_SIZE        inputs per request in Batched
    --payload PAYLOAD          ABSERVE_LOAD_PAYLOAD           fp32, uint8, jpeg of an image; tensors of other models
    --protocol TRANSPORT       ABSERVE_LOAD_PROTOCOL          http, grpc or shm (shared memory, on the server's machine)
    --grpc HOST:PORT           ABSERVE_LOAD_GRPC              the server's gRPC; default: the host, HTTP port + 1
    --inputs PATH              ABSERVE_LOAD_INPUTS            your inputs: a folder, a file, or random
    --sequence-length LENGTHS  ABSERVE_LOAD_SEQUENCE_LENGTH   text, a number or a list, for a model of text
    --samples-dir DIR          ABSERVE_LOAD_SAMPLES_DIR       inputs to send, from `abserve samples --out DIR`
    --samples-out DIR          ABSERVE_LOAD_SAMPLES_OUT       raw samples in nanoseconds, one .npy per class and process
    --rate RATE                ABSERVE_LOAD_RATE              requests per second in OpenLoop, over all workers
    --arrivals KIND            ABSERVE_LOAD_ARRIVALS          arrival process of OpenLoop: poisson or constant
    --request-timeout SECONDS  ABSERVE_LOAD_REQUEST_TIMEOUT   until a request counts as failed
    --header NAME=VALUE        ABSERVE_LOAD_HEADER            sent with every request; repeatable
    --ca FILE                  ABSERVE_LOAD_CA                CA certificates to trust, for an https:// host
    --insecure                 ABSERVE_LOAD_INSECURE          do not verify the server's certificate
    --cert FILE                ABSERVE_LOAD_CERT              client certificate
    --key FILE                 ABSERVE_LOAD_KEY               its key, if it is in another file
    --model-version V          ABSERVE_LOAD_MODEL_VERSION     version of the model
    --metrics-port PORT        ABSERVE_LOAD_METRICS_PORT      Prometheus metrics of the generator; 0: none
    --metrics-host HOST        ABSERVE_LOAD_METRICS_HOST      address of these metrics
    --anyone                   ABSERVE_LOAD_ANYONE            listen beyond loopback: something in front protects it

Locust rounds its percentiles to two digits; the raw samples are exact.
"""

from __future__ import annotations

import logging
import os
import sys
from functools import partial
from itertools import islice
from time import perf_counter_ns, time
from typing import Any, ClassVar

import gevent
import msgspec
from gevent.event import Event
from locust import events, task
from locust.exception import StopUser

from loadgen.base.child_process import end_with
from loadgen.base.exposure import exposure
from loadgen.client.connection import Address, AddressError, ConnectionRefused
from loadgen.client.endpoint import Endpoint, EndpointError
from loadgen.client.inputs import InputError
from loadgen.client.pacer import OPEN_LEAD_NS, Pacer
from loadgen.client.traffic import LoadWindow
from loadgen.experiment.schedule import endless_offsets_ns
from loadgen.locust.metrics import export_load
from loadgen.locust.page import guard_page
from loadgen.locust.session import InferenceUser, LoadOptions, Session, idle_traffic
from loadgen.locust.workers import MasterSide, WorkerSide, share_of
from loadgen.records.payloads import DEFAULT_NAME

DEFAULT_HOST = "http://127.0.0.1:8100"
_POLL_SECONDS = 0.005
_AFTER_REFUSAL_SECONDS = 0.5
_FLUSH_SECONDS = 0.5

# With --processes Locust forks its workers, and leaves those that still start where its own start fails.
os.register_at_fork(after_in_child=partial(end_with, os.getpid()))

logger = logging.getLogger("abserve")


class Concurrent(InferenceUser):
    """One input per request, from many users; each sends the next request after the answer to the last one."""

    @task  # type: ignore[untyped-decorator]  # locust ships no usable types
    def load(self) -> None:
        """One request. When the server is gone it counts as a failure, and the next one follows after a pause."""
        if not self.traffic.requests:
            raise StopUser  # the test could not be prepared; raised in on_start, Locust would print a traceback
        try:
            self.infer()
        except ConnectionRefused:
            gevent.sleep(_AFTER_REFUSAL_SECONDS)


class Single(Concurrent):
    """One input at a time from one user, whatever -u says."""

    fixed_count = 1


class Batched(Concurrent):
    """--batch-size inputs per request."""


class OpenLoop(InferenceUser):
    """One input per request, --rate requests per second over all workers, on at most -u connections."""

    pacer: ClassVar[Pacer | None] = None

    @task  # type: ignore[untyped-decorator]  # locust ships no usable types
    def load(self) -> None:
        """The next request that is due; when the server is gone it counts as a failure."""
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
    """Waits for a server that is starting, and times it."""

    fixed_count = 1

    @task  # type: ignore[untyped-decorator]  # locust ships no usable types
    def watch(self) -> None:
        """Live, ready, first answer, end. Inputs that need no server are prepared before the clock starts."""
        try:
            options = LoadOptions.parse(self.environment)
            options = msgspec.structs.replace(options, model=options.model or DEFAULT_NAME)  # no server to ask yet
            self.session = Session(self.environment, options)
            self.session.load_inputs()
        except AddressError as exc:
            raise StopUser from exc  # it was reported when the test started
        except InputError as exc:
            _give_up(self.environment, str(exc))
            raise StopUser from exc
        self.started_ns = perf_counter_ns()
        endpoint = Endpoint(self.environment.host, timeout_s=options.request_timeout, access=options.access)
        self._await("server live", endpoint.live)
        try:
            model = self.session.model
            self._await("model ready", lambda: endpoint.ready(model))
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
        self.fire("START", name, (perf_counter_ns() - self.started_ns) / 1e6)


@events.init_command_line_parser.add_listener  # type: ignore[untyped-decorator]  # locust ships no usable types
def _add_options(parser: Any) -> None:
    LoadOptions.add_to(parser)
    # Locust's own default is every interface, for a page and a channel without a password.
    parser.set_defaults(web_host="127.0.0.1", master_bind_host="127.0.0.1")


@events.init.add_listener  # type: ignore[untyped-decorator]  # locust ships no usable types
def _init(environment: Any, **_: object) -> None:
    """Set defaults, and before a headless run ask the server whether it can start."""
    environment.host = environment.host or DEFAULT_HOST
    options = environment.parsed_options
    _check_exposure(environment, options)
    if getattr(environment, "web_ui", None) is not None:
        guard_page(environment.web_ui.app, str(options.web_host))
    _export_metrics(environment)
    if _is(environment, "MasterRunner"):
        MasterSide(environment)
    environment.abserve_worker = WorkerSide(environment) if _is(environment, "WorkerRunner") else None
    if not options.user_classes and not getattr(options, "class_picker", False):
        environment.user_classes[:] = [Concurrent]
    if environment.user_classes == [OpenLoop] and options.spawn_rate is None and options.num_users:
        options.spawn_rate = float(options.num_users)  # connections are only a limit, so open them at once
    if _headless(environment) and not options.worker and ColdStart not in environment.user_classes:
        problem = _problem(environment)
        if problem is not None:
            logger.error(problem)
            sys.exit(1)


def _check_exposure(environment: Any, options: Any) -> None:
    """End locust if other machines could reach what it listens on and nobody has said that they may."""
    listens = {
        "web_host": getattr(environment, "web_ui", None) is not None,
        "master_bind_host": _is(environment, "MasterRunner"),
        "metrics_host": bool(options.metrics_port),
    }
    for name, used in listens.items():
        option, host = f"--{name.replace('_', '-')}", str(getattr(options, name))
        if used and (reason := exposure(option, host, anyone=options.anyone)):
            logger.error(reason)
            sys.exit(2)


def _export_metrics(environment: Any) -> None:
    """A worker always counts, since it does not know whether its master shows the counts."""
    options = environment.parsed_options
    if not options.metrics_port and not options.worker:
        return
    try:
        export_load(environment, options.metrics_port, options.metrics_host)
    except OSError as exc:
        reason = exc.strerror or exc
        logger.error(f"port {options.metrics_port} cannot be used for metrics: {reason}; choose another --metrics-port")  # noqa: TRY400 (the sentence says it all)
        sys.exit(1)


@events.test_start.add_listener  # type: ignore[untyped-decorator]  # locust ships no usable types
def _test_start(environment: Any, **_: object) -> None:
    """Prepare the request bodies in the processes that have users: not in a master."""
    for user_class in environment.user_classes:
        user_class.traffic = idle_traffic()
    options = LoadOptions.parse(environment)
    if (problem := _wrong_options(environment, options)) is not None:
        _give_up(environment, problem)
        return
    if _is(environment, "MasterRunner"):
        return
    try:
        session = Session(environment, options)
        for user_class in environment.user_classes:
            if user_class is not ColdStart:
                size = options.batch_size if user_class is Batched else 1
                user_class.traffic = session.traffic(user_class.__name__, size)
    except (AddressError, EndpointError, InputError, OSError) as exc:
        _give_up(environment, str(exc))
        return
    except MemoryError:
        words = f"requests of batch size {options.batch_size} do not fit into memory; lower --batch-size"
        _give_up(environment, words)
        return
    if environment.runner is not None:
        environment.runner.stats.total.start_time = time()  # Locust's rates count from here, not from the preparation
    try:
        if OpenLoop in environment.user_classes:
            _start_open_loop(environment, options)
    except OSError as exc:
        session.close()
        _give_up(environment, str(exc))
        return
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
    """A test that measured nothing must not end with exit status 0."""
    counted = environment.runner is not None and environment.runner.stats.total.num_requests
    if counted or environment.process_exit_code is not None or not _headless(environment):
        return
    if not _is(environment, "WorkerRunner"):
        logger.error("the test ended before its first request; give it more time (-t) or spawn users faster (-r)")
        environment.process_exit_code = 1


def _start_open_loop(environment: Any, options: LoadOptions) -> None:
    """Begin this process's share of the schedule once all users are spawned. Raises `OSError`."""
    window = LoadWindow(0, 0.0, 0.0)
    OpenLoop.pacer = None  # not that of the test before
    OpenLoop.pacer = pacer = Pacer(window)
    begun = Event()

    def begin(user_count: int, **_: object) -> None:
        begun.set()
        # Older versions of Locust skip the next listener when one is removed while the event is fired.
        gevent.spawn(environment.events.spawning_complete.remove_listener, begin)
        share = share_of(environment)
        if share is None:  # other workers have the whole rate, and the users here only wait
            pacer.close()
            return
        part, parts, seed = share
        offsets = islice(endless_offsets_ns(options.arrivals, options.rate, seed), part, None, parts)
        gevent.spawn(pacer.run, offsets, perf_counter_ns() + OPEN_LEAD_NS, user_count)

    def end(**_: object) -> None:
        window.cut("the test was stopped")
        gevent.spawn(environment.events.test_stop.remove_listener, end)
        if not begun.is_set():
            pacer.close()
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


def _wrong_options(environment: Any, options: LoadOptions) -> str | None:
    """A sentence about options with which no test can run, with the remedy. A worker does not know which classes of
    users it will have."""
    if OpenLoop in environment.user_classes and options.rate == 0.0 and not _is(environment, "WorkerRunner"):
        return "OpenLoop needs a rate; give the requests per second, as in --rate 50"
    return options.problem()


def _problem(environment: Any) -> str | None:
    """A sentence that says why a run cannot start, with the remedy."""
    options = LoadOptions.parse(environment)
    if (problem := _wrong_options(environment, options)) is not None:
        return problem
    try:
        session, endpoint = Session(environment, options), Endpoint(environment.host, access=options.access)
        if options.model and options.served_model is None:
            session.load_inputs()
        model = session.model
        options.target(endpoint.address, model)
        endpoint.signature(model)
    except InputError as exc:
        return str(exc)
    except AddressError as exc:
        return f"--host: {exc}"
    except EndpointError as exc:
        remedy = (
            ""
            if endpoint.live()
            else ". Start a server, for example with: abserve serve native; or give another --host"
        )
        return f"{exc}{remedy}"
    if not endpoint.ready(model):
        return (
            f"the model {model} at {Address.parse(environment.host).url} is not ready; wait until it is and try again"
        )
    return None


def _give_up(environment: Any, problem: str) -> None:
    logger.error(problem)
    environment.process_exit_code = 1
    # Locust is still starting: stop it after its own call.
    gevent.spawn_later(0.1, environment.runner.quit if _headless(environment) else environment.runner.stop)


def _is(environment: Any, runner: str) -> bool:
    return type(environment.runner).__name__ == runner


def _headless(environment: Any) -> bool:
    return bool(getattr(environment.parsed_options, "headless", False))
