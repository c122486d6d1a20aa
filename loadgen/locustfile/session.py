"""One test of the locustfile: its options, the request bodies, the sample files."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from locust import User

from loadgen.experiment.arrivals import RATE_LIMIT_PER_S
from loadgen.generator.users import Traffic
from loadgen.locustfile.workers import WorkerFile
from loadgen.records.payloads import PAYLOADS, base_name, variant_name
from loadgen.records.run import Arrivals, Transport
from loadgen.records.samples import SampleWriter
from loadgen.transport.bodies import choose_items
from loadgen.transport.endpoint import Endpoint, Signature
from loadgen.transport.exchange import ConnectionRefused
from loadgen.transport.grpc import parse_grpc_address
from loadgen.transport.inputs import InputError, SampleInputs, read_inputs, write_samples, write_synthetic
from loadgen.transport.promise import Promise
from loadgen.transport.requests import Address, AddressError
from loadgen.transport.transports import TRANSPORTS, Target, prepare_bodies
from loadgen.transport.variation import FreshNumbers, find_variation

logger = logging.getLogger("abserve")


_MOST_TIMEOUT_S = 3600.0


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What the locustfile adds to Locust's own options."""

    model: str
    batch_size: int
    payload: str
    transport: Transport
    grpc: str
    samples_dir: str
    samples_out: str
    timeout_s: float
    rate_per_s: float
    arrivals: Arrivals

    @staticmethod
    def add_to(parser: Any) -> None:
        """Add them to Locust's command line and web page, which does not show options of a group."""

        def add(name: str, default: object, text: str, **extra: object) -> None:
            variable = "ABSERVE_LOAD_" + name.lstrip("-").replace("-", "_").upper()
            parser.add_argument(name, default=default, env_var=variable, help=text, **extra)

        add("--model", "openclip_vit_b32", "The model's name on the server.")
        add("--batch-size", 8, "Inputs per request in the scenario Batched.", type=int)
        add("--payload", "fp32", "Format of an image in a request.", choices=list(PAYLOADS))
        add("--protocol", "http", "Transport.", choices=list(TRANSPORTS))
        add("--grpc", "", "HOST:PORT of the server's gRPC; default: the host and the port after its HTTP port.")
        add("--samples-dir", "", "Inputs to send, from `abserve samples --out DIR`; default: made for the test.")
        add("--samples-out", "", "Folder for raw samples, one .npy file per user class and process; default: none.")
        add("--rate", 0.0, "Requests per second in the scenario OpenLoop, over all workers.", type=float)
        add("--arrivals", "poisson", "Arrival process of OpenLoop.", choices=["poisson", "constant"])
        add("--request-timeout", 60.0, "Seconds until a request counts as failed.", type=float)
        hidden = {"include_in_web_ui": False}
        add("--metrics-port", 0, "Port of the generator's Prometheus metrics; 0: no metrics.", type=int, **hidden)
        add("--metrics-host", "127.0.0.1", "Address of the generator's Prometheus metrics.", **hidden)

    @classmethod
    def parse(cls, environment: Any) -> LoadOptions:
        """The current values: the web page may have changed them."""
        given = environment.parsed_options
        return cls(
            model=variant_name(given.model, given.payload),
            transport=given.protocol,
            grpc=given.grpc or "",
            batch_size=int(given.batch_size),
            payload=given.payload,
            samples_dir=given.samples_dir or "",
            samples_out=given.samples_out or "",
            timeout_s=float(given.request_timeout),
            rate_per_s=float(given.rate),
            arrivals=given.arrivals,
        )

    def problem(self) -> str | None:
        """A sentence about the first invalid value, with the remedy."""
        if self.batch_size < 1:
            return f"--batch-size {self.batch_size} is not possible; give a whole number from 1"
        if not 0.0 < self.timeout_s <= _MOST_TIMEOUT_S:
            return f"--request-timeout {self.timeout_s:g} is not possible; give a time up to {_MOST_TIMEOUT_S:g} s"
        if not 0.0 <= self.rate_per_s <= RATE_LIMIT_PER_S:
            return f"--rate {self.rate_per_s:g} is not possible; give 0 to {RATE_LIMIT_PER_S:g} requests per second"
        return None

    def target(self, address: Address) -> Target:
        """The server for inference. Raises `AddressError`."""
        grpc = self.grpc or f"{address.authority.rpartition(':')[0]}:{address.port + 1}"
        if self.transport == "grpc":
            parse_grpc_address(grpc)
        if self.transport == "shm" and not address.is_local:
            raise AddressError(
                f"--protocol shm needs a server on this machine, and {address.url} is not; use http or grpc"
            )
        return Target(self.transport, address.url, self.model, grpc)


class FailedRequestError(Exception):
    """A failed request in Locust's statistics."""


class InferenceUser(User):  # type: ignore[misc]  # locust ships no usable types
    """One user with one connection. Subclasses call `infer`."""

    abstract = True
    traffic: Traffic

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        self.number = next(self.traffic.user_numbers)
        self.connection = self.traffic.connection()

    def on_stop(self) -> None:
        self.connection.close()

    def infer(self, intended_ns: int | None = None) -> bool:
        """Send the next body and report it to Locust's statistics; returns whether it was good. Raises
        `ConnectionRefused`."""
        try:
            exchange, fault = self.traffic.infer(self.connection, self.number, intended_ns)
        except ConnectionRefused as refused:
            self._fire(0.0, 0, str(refused))
            raise
        self._fire((exchange.end_ns - (intended_ns or exchange.send_ns)) / 1e6, exchange.response_bytes, fault)
        return fault is None

    def _fire(self, latency_ms: float, response_bytes: int, failure: str | None) -> None:
        self.environment.events.request.fire(
            request_type="POST",
            name=f"infer, batch {self.traffic.batch_size}",
            response_time=latency_ms,
            response_length=response_bytes,
            exception=None if failure is None else FailedRequestError(failure),
            context={},
        )


class Session:
    """From test start to test stop, in one process."""

    def __init__(self, environment: Any, options: LoadOptions) -> None:
        self.options = options
        self._address = Address.parse(environment.host)
        self._open: list[tuple[str, Path | None, Traffic]] = []
        self._signature: Signature | None = None
        self._inputs: SampleInputs | None = None
        self._numbers = FreshNumbers()

    def load_inputs(self) -> None:
        """Read or make the inputs, if that needs no server. Raises `InputError` for a folder without inputs."""
        options = self.options
        if options.samples_dir:
            self._inputs = read_inputs(Path(options.samples_dir), options.payload)
            return
        with _temporary_folder() as folder, suppress(InputError):
            write_samples(base_name(options.model), folder)
            self._inputs = read_inputs(folder, options.payload)

    def traffic(self, name: str, batch_size: int, *, bodies: int | None = None) -> Traffic:
        """The traffic of one user class. Raises `EndpointError`, `InputError`, `OSError`."""
        if self._signature is None:
            self._signature = Endpoint(self._address.url, timeout_s=self.options.timeout_s).signature(
                self.options.model
            )
        if self._inputs is None:
            self.load_inputs()
        if self._inputs is None:
            logger.warning(f"there are no sample inputs for the model {self.options.model}; sending random values")
            with _temporary_folder() as folder:
                write_synthetic(self._signature, folder, self.options.payload, seed=0)
                self._inputs = read_inputs(folder, self.options.payload)
        transport, inputs, signature = self.options.transport, self._inputs, self._signature
        chosen = choose_items(inputs.count, batch_size, os.getpid(), count=bodies)
        prepared = prepare_bodies(
            transport, inputs, signature, find_variation(inputs, signature), chosen, self._numbers
        )
        target = self.options.target(self._address)
        path: Path | None = None
        if self.options.samples_out:
            stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
            path = Path(self.options.samples_out) / f"{name}-{stamp}-{os.getpid()}.npy"
        writer = SampleWriter(path)
        traffic = Traffic(
            target,
            tuple(target.sendable(body) for body in prepared.requests),
            batch_size,
            writer,
            timeout_s=self.options.timeout_s,
            fresh=prepared.fresh,
            promise=Promise(transport, signature, batch_size),
        )
        self._open.append((name, path, traffic))
        return traffic

    def idle_traffic(self) -> Traffic:
        """The traffic of users that cannot send, or not yet."""
        target = Target("http", self._address.url, self.options.model)
        return Traffic(target, (), 1, SampleWriter(None), timeout_s=self.options.timeout_s)

    def flush(self) -> None:
        for _, _, traffic in self._open:
            traffic.writer.flush()

    def files(self) -> dict[str, Path]:
        """The sample file of each user class; empty when samples are not stored."""
        return {name: path for name, path, _ in self._open if path is not None}

    def close(self) -> list[WorkerFile]:
        """Finish the sample files, each with a JSON file that explains its numbers. Raises `OSError`."""
        finished = []
        while self._open:
            name, path, traffic = self._open.pop()
            traffic.close()
            traffic.writer.close()
            finished.append(WorkerFile(name, path, tuple(traffic.error_messages), traffic.batch_size))
            if path is not None:
                about = {
                    "url": self._address.url,
                    "model": self.options.model,
                    "payload": self.options.payload,
                    "transport": self.options.transport,
                    "inputs": self._inputs.describe() if self._inputs else None,
                    "batch_size": traffic.batch_size,
                    "requests": traffic.writer.count,
                    "errors": traffic.errors,
                    "error_messages": traffic.error_messages,
                }
                path.with_suffix(".json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        return finished


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="abserve-samples-") as name:
        yield Path(name) / "samples"
