"""Measures the load generator itself on this machine: its highest rates, its CPU per request and token, its timing
error.

The other side is the sink (`loadgen.client.sink`), in separate processes. It does less than the native server with
a null engine (no tensors, no batcher, no threads), so with a core for each side the generator limits the rate. The
record says whether it did.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import msgspec
import numpy as np

from loadgen.base.child_process import OWN_MODULE, ChildProcess, usable_cores
from loadgen.client.endpoint import Signature, TensorSignature
from loadgen.client.generator import GeneratorProcess
from loadgen.client.messages import BlockOutcome, GeneratorError, Open, Prepare
from loadgen.client.sink import ANSWER_BYTES, INPUT, ITEM_SHAPE, MODEL, OUTPUT
from loadgen.experiment.prompts import PromptPlan, PromptShape
from loadgen.launch.work_folder import work_folder
from loadgen.measure.machine import MachineRecordError, command_line, fingerprint, read_machine, utc_now
from loadgen.metrics.registry import throughput_per_s
from loadgen.records.machine import Calibration, CalibrationWorkload, TimingError, TokenCeiling
from loadgen.records.payloads import IMAGE_PAYLOADS
from loadgen.records.samples import good, latencies_ms, read_samples
from loadgen.records.targets import ROUTES, TOKEN_TRANSPORTS, TRANSPORTS, Transport
from loadgen.records.tokens import read_tokens
from loadgen.stats.percentiles import percentile

JPEG_BYTES = 30_000
GENERATOR_IS_BUSY = 0.9
"""Share of a core. When the generator uses less, something else limited the rate."""
_ITEMS = 32
_BATCHED_USERS = 4
_TIMEOUT_S = 30.0
_IDLE_DELAY_MS = 2.0
_TIMING_REQUESTS = 700
_LOADED_DELAY = 1.2
"""Factor on the latency at the ceiling; together with the transfer that gives about half the rate."""
_TOKEN_SHAPE = PromptShape(32, 64)
_DATATYPES = {"fp32": "FP32", "uint8": "UINT8", "jpeg": "BYTES"}


class SinkProcesses:
    """Sinks that share their ports. Raises `MachineRecordError` when one does not start or answer."""

    def __init__(self, count: int, folder: Path) -> None:
        self._processes: list[ChildProcess] = []
        ports = {"port": 0, "grpc_port": 0}
        try:
            for number in range(count):
                argv = [*OWN_MODULE, "loadgen.client.sink", msgspec.json.encode(ports).decode()]
                process = ChildProcess(argv, log_path=folder / f"sink-{number}.log", pipes=True)
                self._processes.append(process)
                ports = _read(process)
        except MachineRecordError:
            self.stop()
            raise
        self.url = f"http://127.0.0.1:{ports['port']}"
        self.grpc_address = f"127.0.0.1:{ports['grpc_port']}"

    def delay(self, milliseconds: float) -> None:
        self._ask(f"delay {milliseconds}")

    def held_ns(self) -> list[int]:
        """How long the sinks kept each request since the last call."""
        return [ns for answer in self._ask("held") for ns in answer["held_ns"]]

    def cpu_ns(self) -> int | None:
        """CPU time of all sinks so far."""
        times = [process.cpu_ns() for process in self._processes]
        return None if None in times else sum(time for time in times if time is not None)

    def stop(self) -> None:
        for process in self._processes:
            process.stop(timeout_s=2.0)

    def _ask(self, command: str) -> list[Any]:
        for process in self._processes:
            process.send(command.encode())
        return [_read(process) for process in self._processes]


def _read(process: ChildProcess) -> Any:
    line = process.read_line(_TIMEOUT_S)
    if not line:
        reason = f"did not answer within {_TIMEOUT_S:g} s" if line is None else process.ended()
        raise MachineRecordError(f"the sink {reason}")
    return msgspec.json.decode(line)


def calibrate(
    say: Callable[[str], None],
    *,
    transports: Sequence[Transport] = TRANSPORTS,
    payloads: Sequence[str] = IMAGE_PAYLOADS,
    batch_sizes: Sequence[int] = (1, 32),
    concurrency: int = 16,
    seconds: float = 2.0,
) -> Calibration:
    """Measure every combination; `seconds` is the length of each ceiling's measurement. Batches get fewer users, to
    save memory. Raises `MachineRecordError` when nothing could be measured."""
    workloads: list[CalibrationWorkload] = []
    problems: list[str] = []
    host, packages = read_machine()
    count = max(1, min(4, usable_cores() - 1))
    with ExitStack() as resources:
        folder = resources.enter_context(work_folder("calibration"))
        samples = folder / "samples"
        write_images(samples)
        sinks = SinkProcesses(count, folder)
        resources.callback(sinks.stop)
        generator = GeneratorProcess(folder / "generator.log")
        resources.callback(generator.stop)
        for transport, payload in product(transports, payloads):
            measurement = _Measurement(generator, sinks, folder / "block.npy", transport, payload)
            try:
                measurement.prepare(samples, batch_sizes)
                for batch_size in batch_sizes:
                    say(f"{transport}, {payload}, batch {batch_size}")
                    users = concurrency if batch_size == 1 else min(concurrency, _BATCHED_USERS)
                    workloads.append(measurement.measure(batch_size, users, seconds))
            except GeneratorError as exc:
                problems.append(f"{transport}, {payload}: {exc}")
        tokens: list[TokenCeiling] = []
        for token_transport in (name for name in TOKEN_TRANSPORTS if not ROUTES[name].is_text):
            say(f"{token_transport}, streamed tokens")
            measurement = _Measurement(generator, sinks, folder / "block.npy", token_transport, "tokens")
            try:
                tokens.append(measurement.measure_tokens(concurrency, seconds))
            except GeneratorError as exc:
                problems.append(f"{token_transport}: {exc}")
    if not workloads:
        raise MachineRecordError(
            f"nothing could be measured: {'; '.join(problems) or 'no transport or payload was given'}"
        )
    return Calibration(
        fingerprint=fingerprint(host, packages),
        made_at=utc_now(),
        command=command_line(),
        host=host,
        packages=packages,
        sink_processes=count,
        seconds=seconds,
        workloads=tuple(workloads),
        problems=tuple(problems),
        tokens=tuple(tokens),
    )


@dataclass(frozen=True, slots=True)
class _Measurement:
    """One transport and payload; `samples` is the file of a block."""

    generator: GeneratorProcess
    sinks: SinkProcesses
    samples: Path
    transport: Transport
    payload: str

    def prepare(self, samples: Path, batch_sizes: Sequence[int]) -> None:
        """Replace the generator's bodies. Raises `GeneratorError`."""
        self.generator.prepare(
            Prepare(
                samples_directory=str(samples),
                payload=self.payload,
                signature=signature(self.payload),
                batch_sizes=tuple(batch_sizes),
                seed=0,
                transport=self.transport,
            )
        )

    def measure(self, batch_size: int, users: int, seconds: float) -> CalibrationWorkload:
        """The ceiling at one batch size, and at batch size 1 the timing error. Raises `GeneratorError`."""
        self.sinks.delay(0.0)
        self._run(batch_size, users, 2 * users, seconds / 10)
        before_ns, began_ns = self.sinks.cpu_ns(), perf_counter_ns()
        outcome = self._run(batch_size, users, 1, seconds)
        after_ns, ended_ns = self.sinks.cpu_ns(), perf_counter_ns()
        rate = (throughput_per_s(read_samples(self.samples)) or 0.0) / batch_size
        share = outcome.cpu_ns / (outcome.window_end_ns - outcome.window_start_ns)
        sink_cores = None
        if before_ns is not None and after_ns is not None:
            sink_cores = (after_ns - before_ns) / (ended_ns - began_ns)
        timing: tuple[TimingError, ...] = ()
        if batch_size == 1:
            timing = (
                self._time(1, _IDLE_DELAY_MS, rate, seconds),
                self._time(users, _LOADED_DELAY * 1000.0 * users / rate, rate, seconds),
            )
        return CalibrationWorkload(
            transport=self.transport,
            payload=self.payload,
            batch_size=batch_size,
            payload_bytes=round(float(np.mean(outcome.body_payload_bytes))),
            concurrency=users,
            requests_per_s=rate,
            images_per_s=rate * batch_size,
            generator_cpu_share=share,
            sink_cpu_cores=sink_cores,
            cpu_us_per_request=outcome.cpu_ns / (outcome.requests + outcome.cool_down) / 1000.0,
            limited_by="generator" if share >= GENERATOR_IS_BUSY else "sink or machine",
            timing=timing,
        )

    def measure_tokens(self, users: int, seconds: float) -> TokenCeiling:
        """The ceiling in streamed tokens. Raises `GeneratorError`."""
        plan = PromptPlan(low=1, high=4095, seed=0, shapes=(_TOKEN_SHAPE,))
        self.generator.prepare(
            Prepare(
                samples_directory="", payload=self.payload, signature=Signature(MODEL, (), ()), batch_sizes=(1,),
                seed=0, transport=self.transport, prompts=plan,
            )
        )  # fmt: skip
        self.sinks.delay(0.0)
        self._run(1, users, 2 * users, seconds / 10, _TOKEN_SHAPE)
        outcome = self._run(1, users, 1, seconds, _TOKEN_SHAPE)
        alone = float(np.mean(read_tokens(self.samples).events["events"] == 1))
        tokens = alone * (outcome.requests + outcome.cool_down) * _TOKEN_SHAPE.output_tokens
        cpu_us = outcome.cpu_ns / tokens / 1000.0
        return TokenCeiling(
            transport=self.transport,
            concurrency=users,
            measured_tokens_per_s=tokens / ((outcome.window_end_ns - outcome.window_start_ns) / 1e9),
            cpu_us_per_token=cpu_us,
            tokens_per_s=1e6 / cpu_us,
        )

    def _time(self, users: int, delay_ms: float, ceiling: float, seconds: float) -> TimingError:
        """The latency that the generator reports, minus the time for which the sink kept the request. The delay decides
        the rate: a closed loop sends at most users / delay requests per second."""
        self.sinks.delay(delay_ms)
        self._run(1, users, _TIMING_REQUESTS, seconds / 2)
        reported_us = latencies_ms(good(read_samples(self.samples))) * 1000.0
        held_us = np.array(self.sinks.held_ns()) / 1000.0
        rate = throughput_per_s(read_samples(self.samples)) or 0.0
        return TimingError(
            concurrency=users,
            delay_ms=delay_ms,
            requests_per_s=rate,
            ceiling_share=rate / ceiling,
            samples=len(reported_us),
            p50_us=_difference(reported_us, held_us, 0.5),
            p99_us=_difference(reported_us, held_us, 0.99),
        )

    def _run(
        self, batch_size: int, users: int, requests: int, seconds: float, shape: PromptShape | None = None
    ) -> BlockOutcome:
        """Run one block; afterwards the sinks hold only the times of its requests. Raises `GeneratorError`."""
        self.samples.unlink(missing_ok=True)
        command = Open(
            url=self.sinks.url,
            grpc_address=self.sinks.grpc_address,
            batch_size=batch_size,
            shape=shape,
            concurrency=users,
            requests=requests,
            seconds=seconds,
            max_seconds=max(10.0, seconds),
            timeout_s=_TIMEOUT_S,
            samples_path=str(self.samples),
        )
        self.generator.open(command)
        self.sinks.held_ns()  # forget the settling request of this block and everything before
        outcome = self.generator.go(command)
        if outcome.errors or outcome.storage_error is not None or outcome.cut_reason is not None:
            message = outcome.storage_error or next(iter(outcome.error_messages), outcome.cut_reason)
            raise GeneratorError(f"{outcome.errors} of {outcome.requests} requests failed ({message})")
        return outcome


def _difference(reported: np.ndarray[Any, Any], held: np.ndarray[Any, Any], quantile: float) -> float | None:
    high, low = percentile(reported, quantile), percentile(held, quantile)
    return None if high is None or low is None else high - low


def signature(payload: str) -> Signature:
    """The sink's model: images in, 2 KB out for any number of images."""
    shape = (-1, 1) if payload == "jpeg" else (-1, *ITEM_SHAPE)
    return Signature(
        MODEL,
        (TensorSignature(INPUT, _DATATYPES[payload], shape),),
        (TensorSignature(OUTPUT, "FP32", (1, ANSWER_BYTES // 4)),),
    )


def write_images(folder: Path) -> None:
    """Write seeded noise in the sizes of real images, in every payload; a JPEG is 30 KB of noise, never decoded."""
    random = np.random.default_rng(0)
    (folder / "jpeg").mkdir(parents=True)
    pixels = random.integers(0, 256, (_ITEMS, *ITEM_SHAPE), dtype=np.uint8)
    np.save(folder / f"{INPUT}.uint8.npy", pixels)
    np.save(folder / f"{INPUT}.fp32.npy", pixels.astype("<f4"))
    for number in range(_ITEMS):
        (folder / "jpeg" / f"{number:02d}.jpg").write_bytes(random.bytes(JPEG_BYTES))
    manifest: Mapping[str, object] = {"kind": "synthetic", "variants": {"jpeg": {"tensor": INPUT}}}
    (folder / "samples.json").write_bytes(msgspec.json.encode(manifest))
