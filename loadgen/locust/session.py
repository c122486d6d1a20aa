"""The options, the user class and the session of the locustfile: what one test sends and stores in one process."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, get_args

import msgspec
from locust import User

from loadgen.base.exposure import ANYONE
from loadgen.base.headers import read_headers, split_header
from loadgen.client.bodies import choose_items, find_variation, fresh_numbers
from loadgen.client.connection import Address, AddressError, ConnectionRefused
from loadgen.client.endpoint import Endpoint, EndpointError, Signature, unmeasurable
from loadgen.client.grpc import parse_grpc_address
from loadgen.client.inputs import (
    RANDOM_INPUTS,
    InputError,
    SampleInputs,
    image_folder,
    read_given,
    read_inputs,
    served_model,
    write_samples,
)
from loadgen.client.outputs import AnswerError, ExpectedOutputs
from loadgen.client.traffic import Traffic
from loadgen.client.transports import InferenceTarget, PreparedBodies, prepare_bodies
from loadgen.experiment.schedule import RATE_LIMIT_PER_S
from loadgen.records.payloads import (
    DEFAULT_NAME,
    PAYLOADS,
    implied_payload,
    inputs_in_words,
    is_language,
    is_reference,
    reference,
    served_name,
    variant_name,
)
from loadgen.records.run import Access, Arrivals
from loadgen.records.samples import SampleWriter
from loadgen.records.targets import ROUTES, TRANSPORTS, Transport

logger = logging.getLogger("abserve")


_MOST_TIMEOUT_S = 3600.0


class LoadOptions(msgspec.Struct, frozen=True):
    """The options that the locustfile adds to Locust's, with their help and defaults."""

    model: Annotated[
        str,
        "The model's name on the server, or its reference, such as transformers:bert-base-uncased; default: the "
        "server's only one.",
    ] = ""
    batch_size: Annotated[int, "Inputs per request in the scenario Batched."] = 8
    payload: Annotated[str, "What a request carries; default: an image's or the model's own tensors."] = ""
    protocol: Annotated[Transport, "Transport."] = "http"
    grpc: Annotated[str, "HOST:PORT of the server's gRPC; default: the host and the port after its HTTP port."] = ""
    inputs: Annotated[str, "Your inputs: a folder, a file, or random."] = ""
    sequence_length: Annotated[str, "Length of the inputs of a model of text: text (default), a number, or a list."] = (
        ""
    )
    samples_dir: Annotated[str, "Inputs to send, from `abserve samples --out DIR`; default: made for the test."] = ""
    samples_out: Annotated[str, "Folder for raw samples, one .npy file per user class and process; default: none."] = ""
    rate: Annotated[float, "Requests per second in the scenario OpenLoop, over all workers."] = 0.0
    arrivals: Annotated[Arrivals, "Arrival process of OpenLoop."] = "poisson"
    request_timeout: Annotated[float, "Seconds until a request counts as failed."] = 60.0
    header: Annotated[
        tuple[str, ...], "NAME=VALUE, sent with every request; the value may be $VARIABLE; repeatable."
    ] = ()
    ca: Annotated[str, "CA certificates to trust, a PEM file."] = ""
    insecure: Annotated[bool, "Do not verify the server's certificate."] = False
    cert: Annotated[str, "Client certificate, a PEM file."] = ""
    key: Annotated[str, "Key of that certificate, if it is in another PEM file."] = ""
    model_version: Annotated[str, "Version of the model; default: the server chooses."] = ""

    @classmethod
    def add_to(cls, parser: Any) -> None:
        """Add them to Locust's command line and web page, which does not show options of a group."""

        def add(name: str, default: object, text: str, **extra: object) -> None:
            variable = f"ABSERVE_LOAD_{name.upper()}"
            option = f"--{name.replace('_', '-')}"
            if "action" not in extra:
                extra["type"] = type(default)
            parser.add_argument(option, default=default, env_var=variable, help=text, **extra)

        choices = {"payload": ("", *PAYLOADS), "protocol": TRANSPORTS, "arrivals": ("poisson", "constant")}
        extra: dict[str, dict[str, Any]] = {name: {"choices": list(values)} for name, values in choices.items()}
        extra["header"] = {"action": "append", "include_in_web_ui": False}
        extra["insecure"] = {"action": "store_true"}
        for field in msgspec.structs.fields(cls):
            default = [] if field.default == () else field.default
            _, text = get_args(field.type)
            add(field.name, default, text, **extra.get(field.name, {}))
        hidden = {"include_in_web_ui": False}
        add("metrics_port", 0, "Port of the generator's Prometheus metrics; 0: no metrics.", **hidden)
        add("anyone", False, f"{ANYONE} Of the page, the workers' port and the metrics.", action="store_true", **hidden)
        add("metrics_host", "127.0.0.1", "Address of the generator's Prometheus metrics.", **hidden)

    @classmethod
    def parse(cls, environment: Any) -> LoadOptions:
        """The current values: the web page may have changed them."""
        values = vars(environment.parsed_options)
        return msgspec.convert({name: values[name] for name in cls.__struct_fields__}, cls, strict=False)

    @property
    def payload_in_effect(self) -> str:
        """The payload in effect."""
        return self.payload or implied_payload(self.model or DEFAULT_NAME)

    @property
    def served_model(self) -> str | None:
        """The model's name on the server; None for a reference, whose samples tell it."""
        return served_name(self.model, self.payload_in_effect) if self.model else None

    @property
    def access(self) -> Access:
        """How the server is reached. Raises `AddressError` for a header that cannot be sent."""
        try:
            header = read_headers({name: value for name, _, value in map(split_header, self.header)})
        except ValueError as exc:
            raise AddressError(f"--header: {exc}") from None
        return Access(
            ca=self.ca or None, insecure=self.insecure, cert=self.cert or None, key=self.key or None,
            version=self.model_version or None, header=header,
        )  # fmt: skip

    def problem(self) -> str | None:
        """A sentence about the first invalid value, with the remedy."""
        if is_language(self.model):
            return (
                f"--model {self.model}: the locustfile sends tensors and reads no streamed tokens; measure a language "
                f"model with `abserve compare --model {self.model}`"
            )
        if self.batch_size < 1:
            return f"--batch-size {self.batch_size} is not possible; give a whole number from 1"
        if not 0.0 < self.request_timeout <= _MOST_TIMEOUT_S:
            return f"--request-timeout {self.request_timeout:g} is not possible; give up to {_MOST_TIMEOUT_S:g} seconds"
        if not 0.0 <= self.rate <= RATE_LIMIT_PER_S:
            return f"--rate {self.rate:g} is not possible; give 0 to {RATE_LIMIT_PER_S:g} requests per second"
        return None

    def target(self, address: Address, model: str) -> InferenceTarget:
        """The server for inference. Raises `AddressError`."""
        grpc = self.grpc or f"{address.authority.rpartition(':')[0]}:{address.port + 1}"
        if ROUTES[self.protocol].is_grpc:
            parse_grpc_address(grpc)
        if ROUTES[self.protocol].shares_memory and not address.is_local:
            raise AddressError(
                f"--protocol {self.protocol} needs a server on this machine, and {address.url} is not; use http or grpc"
            )
        return InferenceTarget(self.protocol, address.url, model, grpc, self.access)


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
        name = f"infer, batch {self.traffic.batch_size}"
        try:
            exchange, fault = self.traffic.infer(self.connection, self.number, intended_ns)
        except ConnectionRefused as refused:
            self.fire("POST", name, 0.0, failure=str(refused))
            raise
        latency_ms = (exchange.end_ns - (intended_ns or exchange.send_ns)) / 1e6
        self.fire("POST", name, latency_ms, exchange.response_bytes, fault)
        return fault is None

    def fire(
        self, kind: str, name: str, latency_ms: float, response_bytes: int = 0, failure: str | None = None
    ) -> None:
        """Report to Locust's statistics."""
        self.environment.events.request.fire(
            request_type=kind,
            name=name,
            response_time=latency_ms,
            response_length=response_bytes,
            exception=None if failure is None else AnswerError(failure),
            context={},
        )


class Session:
    """One test in one process, from test start to test stop."""

    def __init__(self, environment: Any, options: LoadOptions) -> None:
        """Raises `AddressError` for a host or a header that cannot be used."""
        self.options = options
        self._address = Address.parse(environment.host, options.access)
        self._open: list[tuple[str, Path | None, Traffic]] = []
        self._signature: Signature | None = None
        self._inputs: SampleInputs | None = None
        self._given = True
        """Whether the inputs are the user's or those of a model that abserve knows."""
        self._model_of_samples: str | None = None
        """The model's name on our servers, by the samples."""
        self._numbers = fresh_numbers()

    @property
    def model(self) -> str:
        """The model's name on the server: by the options, by the samples, or as the only one that the server has.
        Raises `EndpointError`, and `InputError` when none of them tells it."""
        name = self.options.served_model or self._model_of_samples
        if name is None and not self.options.model:
            preferred = variant_name(DEFAULT_NAME, self.options.payload_in_effect)
            name = self._model_of_samples = self._endpoint().only_model(preferred)
        if name is None:
            raise InputError(f"--model {self.options.model} is not a name on a server; give the name that it has there")
        return name

    def load_inputs(self) -> None:
        """Read or make the inputs, except those that the server's metadata tell: the user's own, and random values for
        a name that abserve does not know. Raises `InputError` for a folder without inputs and for a reference to a
        model that does not exist; `EndpointError` if there is no --model and the server does not have exactly one."""
        options = self.options
        images = image_folder(options.inputs or None)
        if options.inputs and images is None:
            return
        if options.samples_dir:
            self._read(Path(options.samples_dir))
            return
        model = options.model or self.model
        with _temporary_folder() as folder:
            try:
                write_samples(reference(model), folder, sequence_length=options.sequence_length or None, images=images)
            except InputError as exc:
                if not (is_reference(model) or images or options.sequence_length):
                    return
                raise InputError(
                    f"{exc}; give your own with --inputs, or --inputs random for random values of the right shapes"
                ) from exc
            self._read(folder)

    def _read(self, folder: Path) -> None:
        self._inputs = read_inputs(folder, self.options.payload_in_effect)
        self._model_of_samples = served_model(folder, self.options.payload_in_effect)

    def signature(self) -> Signature:
        """The model's metadata. Raises `EndpointError`, `InputError`."""
        if self._signature is None:
            if self._inputs is None:
                self.load_inputs()
            endpoint, model = self._endpoint(), self.model
            if fault := unmeasurable(endpoint.config(model), model):
                raise EndpointError(fault)
            self._signature = endpoint.signature(model)
        return self._signature

    def _endpoint(self) -> Endpoint:
        return Endpoint(self._address.url, timeout_s=self.options.request_timeout, access=self.options.access)

    def traffic(self, name: str, batch_size: int, *, bodies: int | None = None) -> Traffic:
        """The traffic of one user class. Raises `EndpointError`, `InputError`, `OSError`."""
        signature = self.signature()
        if self._inputs is None:
            with _temporary_folder() as folder:
                given = self.options.inputs or RANDOM_INPUTS
                self._given = bool(self.options.inputs)
                self._inputs = read_given(given, signature, folder, self.options.payload_in_effect, seed=0)
        if not self._open:
            made = "" if self._given else ", made from the server's metadata; send your own with --inputs"
            logger.info(f"model {signature.model}, inputs: {inputs_in_words(self._inputs.describe())}{made}")
        transport, inputs = self.options.protocol, self._inputs
        chosen = choose_items(inputs, batch_size, os.getpid(), count=bodies)
        prepared = prepare_bodies(
            transport, inputs, signature, find_variation(inputs, signature), chosen, self._numbers
        )
        target = replace(self.options.target(self._address, self.model), batched=signature.batched)
        path: Path | None = None
        if self.options.samples_out:
            stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
            path = Path(self.options.samples_out) / f"{name}-{stamp}-{os.getpid()}.npy"
        writer = SampleWriter(path)
        traffic = Traffic(
            target,
            prepared,
            batch_size,
            writer,
            timeout_s=self.options.request_timeout,
            expected=ExpectedOutputs(transport, signature, batch_size),
        )
        self._open.append((name, path, traffic))
        return traffic

    def flush(self) -> None:
        for _, _, traffic in self._open:
            traffic.writer.flush()

    def files(self) -> dict[str, Path]:
        """The sample file of each user class; empty when samples are not stored."""
        return {name: path for name, path, _ in self._open if path is not None}

    def close(self) -> list[tuple[Path | None, dict[str, Any]]]:
        """Finish the sample files, each with a JSON file that explains its numbers. The path of each user class, None
        when samples are not stored, and what a master needs to know of it. Raises `OSError`."""
        finished = []
        while self._open:
            name, path, traffic = self._open.pop()
            traffic.close()
            traffic.writer.close()
            described = {"name": name, "error_messages": traffic.error_messages, "batch_size": traffic.batch_size}
            finished.append((path, described))
            if path is not None:
                about = {
                    "url": self._address.url,
                    "model": self.model,
                    "payload": self.options.payload_in_effect,
                    "transport": self.options.protocol,
                    "inputs": self._inputs.describe() if self._inputs else None,
                    "batch_size": traffic.batch_size,
                    "requests": traffic.writer.count,
                    "errors": traffic.errors,
                    "error_messages": traffic.error_messages,
                }
                path.with_suffix(".json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        return finished


def idle_traffic() -> Traffic:
    """The traffic of users that cannot send, or cannot send yet: it has no requests, and its address is never used."""
    bodies = PreparedBodies((), (), None, fresh_numbers())
    return Traffic(InferenceTarget("http", "http://127.0.0.1", ""), bodies, 1, SampleWriter(None))


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="abserve-samples-") as name:
        yield Path(name) / "samples"
