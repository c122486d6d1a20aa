"""Every transport with every payload, from the generator's process to real servers that execute no model."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal
from urllib.request import urlopen

import numpy as np
import pytest

from loadgen.client.connection import ConnectionRefused
from loadgen.client.endpoint import Endpoint
from loadgen.client.generator import GeneratorProcess
from loadgen.client.inputs import SampleInputs, read_inputs, write_samples
from loadgen.client.messages import BlockOutcome, GeneratorError, Open, Prepare
from loadgen.client.transports import InferenceTarget, prepare, read_answer
from loadgen.experiment.replay import Replay
from loadgen.experiment.schedule import due_offsets_ns
from loadgen.launch.embedded import EmbeddedDeployment
from loadgen.measure.answers import ParityTarget, check_parity
from loadgen.records.payloads import IMAGE_PAYLOADS, variant_name
from loadgen.records.targets import TRANSPORTS, Transport
from loadgen.records.traffic import RecordedRequest, RecordedTensor, TrafficRecording, TrafficWriter
from loadgen.stats.agreement import tolerance_of
from tests.again import again
from tests.integration.loadgen.conftest import await_true, regions_of_load
from tests.recording import write_traffic

ABSERVE = (sys.executable, "-P", "-m", "loadgen.entry")
MODEL = "openclip_vit_b32"
DELAY_S = 0.3
USERS = 8
REQUESTS = 3 * USERS


@pytest.fixture(scope="module")
def samples() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        write_samples(MODEL, Path(folder) / "samples", ABSERVE)
        yield Path(folder) / "samples"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedDeployment]:
    """A native server whose answers take 300 ms without keeping it busy."""
    options = {"engine": "null", "payloads": ",".join(IMAGE_PAYLOADS), "added-delay-ms": str(1000 * DELAY_S)}
    options |= {"model": MODEL, "allow-shared-memory": "true"}
    deployment = EmbeddedDeployment("native", options, tmp_path_factory.mktemp("server") / "log", abserve=ABSERVE)
    deployment.largest_batch = 48
    deployment.start()
    try:
        for payload in IMAGE_PAYLOADS:
            deployment.wait_ready(variant_name(MODEL, payload), 90)
        yield deployment
    finally:
        deployment.stop()


@pytest.fixture(scope="module")
def generator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GeneratorProcess]:
    """One for all tests that leave it usable."""
    process = GeneratorProcess(tmp_path_factory.mktemp("generator") / "generator.log")
    yield process
    process.stop()


def question(deployment: EmbeddedDeployment, samples: Path, transport: Transport, payload: str) -> ParityTarget:
    name = variant_name(MODEL, payload)
    target = InferenceTarget(transport, deployment.url, name, deployment.grpc_address)
    return ParityTarget(target, Endpoint(deployment.url).signature(name), read_inputs(samples, payload))


def ask(arm: ParityTarget, items: list[int]) -> dict[str, np.ndarray]:
    request = arm.target.sendable(prepare(arm.target.transport, arm.inputs, arm.signature, items))
    connection = arm.target.connection((request,), timeout_s=30)
    try:
        return dict(read_answer(connection, connection.send(request)))
    finally:
        connection.close()


def open_block(generator: GeneratorProcess, arm: ParityTarget, samples: Path, payload: str, **changes: object) -> Open:
    transport = arm.target.transport
    generator.prepare(
        Prepare(
            samples_directory=str(samples), payload=payload, signature=arm.signature, batch_sizes=(1,), seed=0,
            transport=transport, key=payload,
        )
    )  # fmt: skip
    fields: dict[str, object] = {
        "url": arm.target.url, "grpc_address": arm.target.grpc_address, "key": payload, "batch_size": 1,
        "concurrency": USERS, "requests": REQUESTS, "seconds": 0.0, "max_seconds": 60.0, "timeout_s": 20.0,
    }  # fmt: skip
    command = Open(**{**fields, **changes})  # type: ignore[arg-type]
    generator.open(command)
    return command


def registered(url: str) -> object:
    """The server's list of regions, an array and so no document of `Endpoint`."""
    with urlopen(f"{url}/v2/systemsharedmemory/status", timeout=60) as answer:
        return json.load(answer)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_open_loop_keeps_its_schedule_over_every_transport(
    server: EmbeddedDeployment, samples: Path, tmp_path: Path, transport: Transport, processes: int
) -> None:
    """The server takes 300 ms: users who waited for answers could send 27 a second and not 40."""
    arm = question(server, samples, transport, "uint8")
    path = tmp_path / "0000.npy"
    generator = GeneratorProcess(tmp_path / "generator.log", processes=processes)
    try:
        command = open_block(
            generator, arm, samples, "uint8", samples_path=str(path), concurrency=32, requests=1, seconds=2.0,
            arrivals="poisson", rate_per_s=40.0, arrivals_seed=4,
        )  # fmt: skip
        outcome = generator.go(command)
    finally:
        generator.stop()
    rows = np.load(path)
    due = due_offsets_ns("poisson", 40.0, 80, 4)
    assert (np.sort(rows["intended_ns"]) - rows["intended_ns"].min()).tolist() == due.tolist()
    assert (outcome.errors, outcome.offered, outcome.cut_reason) == (0, 80, None)
    late_ms = (rows["send_ns"] - rows["intended_ns"]) / 1e6
    assert np.median(late_ms) < 1000 * DELAY_S <= np.median((rows["end_ns"] - rows["intended_ns"]) / 1e6)
    assert not regions_of_load()


# Every transport and payload once by default: a payload is the same bytes over each, as the next test has it.
@pytest.mark.parametrize(
    ("transport", "payload"),
    [
        pytest.param(transport, payload, marks=() if row == column else pytest.mark.slow)
        for row, transport in enumerate(TRANSPORTS)
        for column, payload in enumerate(IMAGE_PAYLOADS)
    ],
)
@again
def test_users_do_not_wait_for_each_other(
    server: EmbeddedDeployment, generator: GeneratorProcess, samples: Path, tmp_path: Path,
    transport: Transport, payload: str,
) -> None:  # fmt: skip
    """N users of a server that takes a fixed time reach N / time, not 1 / time. More than two at a time tell."""
    arm = question(server, samples, transport, payload)
    path = tmp_path / "0000.npy"
    command = open_block(generator, arm, samples, payload, samples_path=str(path))
    outcome: BlockOutcome = generator.go(command)
    rate = outcome.requests / ((outcome.window_end_ns - outcome.window_start_ns) / 1e9)
    assert (outcome.requests, outcome.errors, outcome.transport) == (REQUESTS, 0, transport)
    assert rate > 2 / DELAY_S, "the users waited for each other"
    sent = np.load(path)
    assert set(sent["status"]) == {1000 if transport == "grpc" else 200}
    payload_bytes = np.array(outcome.body_payload_bytes)[sent["body"]]
    beside = sent["request_bytes"] - (0 if transport == "shm" else payload_bytes)
    assert ((beside > 50) & (beside < 1000)).all(), "what is not the payload is small"
    expected = {"fp32": 602_112, "uint8": 150_528}
    assert set(payload_bytes) == {expected[payload]} if payload in expected else len(set(payload_bytes)) > 5
    assert (sent["send_ns"] < sent["first_byte_ns"]).all()
    assert (sent["first_byte_ns"] <= sent["end_ns"]).all()
    assert regions_of_load() == []
    assert registered(server.url) == []


@pytest.mark.parametrize("payload", IMAGE_PAYLOADS)
def test_the_answer_does_not_depend_on_the_transport(server: EmbeddedDeployment, samples: Path, payload: str) -> None:
    answers = [ask(question(server, samples, transport, payload), [3, 0, 5])["embedding"] for transport in TRANSPORTS]
    assert answers[0].shape == (3, 512)
    assert len(np.unique(answers[0], axis=0)) == 3
    for answer in answers[1:]:
        assert answer.dtype == answers[0].dtype
        assert (answer == answers[0]).all()


def test_parity_is_asked_through_the_arms_own_doors(server: EmbeddedDeployment, samples: Path) -> None:
    few = {name: array[:3] for name, array in read_inputs(samples, "uint8").arrays.items()}
    inputs = SampleInputs(few, "photographs")
    arms = {
        label: ParityTarget(arm.target, arm.signature, inputs)
        for label, transport in (("a", "grpc"), ("b", "shm"))
        for arm in [question(server, samples, transport, "uint8")]  # type: ignore[arg-type]
    }
    record = check_parity(arms, [2, 4], tolerance_of(["fp32"]))
    assert record.ok, record.error
    assert all(case.max_abs == 0 for case in record.cases)
    assert regions_of_load() == []


@pytest.mark.parametrize("transport", ["http", "grpc"])
def test_a_recorded_request_that_an_arm_refuses_is_named(
    server: EmbeddedDeployment, samples: Path, tmp_path: Path, transport: Literal["http", "grpc"]
) -> None:
    traffic = write_traffic(tmp_path, [(at, np.zeros((16, 2))) for at in (0.0, 1.0)], grpc=transport == "grpc")
    arm = question(server, samples, transport, "uint8")
    record = check_parity(
        {"a": arm, "b": arm}, [1], tolerance_of(["fp32"]), few=True, replay=Replay(str(traffic), transport, 1.0)
    )
    assert (record.ok, record.failed_arm, record.refused_items) == (False, "a", 16)
    assert {"http": "HTTP 400: ", "grpc": "INVALID_ARGUMENT: "}[transport] in (record.error or "")


def test_recorded_requests_for_answers_in_json_are_compared(
    server: EmbeddedDeployment, samples: Path, tmp_path: Path
) -> None:
    """As clients send them that know nothing of the binary extension."""
    arm = question(server, samples, "http", "uint8")
    (tensor,) = arm.signature.inputs
    array = np.zeros((1, *tensor.shape[1:]), int)
    inputs = {"name": tensor.name, "datatype": tensor.datatype, "shape": array.shape, "data": array.ravel().tolist()}
    content = json.dumps({"inputs": [inputs]}).encode()
    writer = TrafficWriter(tmp_path / "traffic", TrafficRecording(started_at="2026-11-29T00:00:00Z"))
    for at_ns in (0, 10**9):
        request = RecordedRequest(
            at_ns=at_ns, transport="http", route="/v2/models/m/infer", status=200, content_bytes=len(content),
            tensors=(RecordedTensor(name=tensor.name, datatype=tensor.datatype, shape=array.shape),),
            headers={"content-type": "application/json"},
        )  # fmt: skip
        writer.add(request, content)
    writer.flush()
    replay = Replay(str(tmp_path / "traffic"), "http", 1.0)
    record = check_parity({"a": arm, "b": arm}, [1], tolerance_of(["fp32"]), few=True, replay=replay)
    assert record.ok, record.error
    assert any("recorded requests" in case.name for case in record.cases)


def test_a_slow_model_answers_fewer_inputs_alone_but_each_length(
    server: EmbeddedDeployment, samples: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loadgen.measure.answers.PARITY_SECONDS", 0.0)
    arm = question(server, samples, "http", "uint8")
    lengths = (3,) * 12 + (5,) * 4  # labels only: the model has no axis
    inputs = SampleInputs({name: array[:16] for name, array in arm.inputs.arrays.items()}, "given", lengths=lengths)
    arms = {label: ParityTarget(arm.target, arm.signature, inputs) for label in ("a", "b")}
    record = check_parity(arms, [6], tolerance_of(["fp32"]), (3, 5))
    assert record.ok, record.error
    assert (record.cases[0].name, record.cases[0].images) == ("each of 8 of 16 inputs alone", 8)
    assert {"one batch of 6, length 3", "one batch of 6, length 5"} < {case.name for case in record.cases}


def test_a_screening_asks_for_few_answers_of_many_lengths(server: EmbeddedDeployment, samples: Path) -> None:
    arm = question(server, samples, "http", "uint8")
    inputs = SampleInputs(
        {name: array[:16] for name, array in arm.inputs.arrays.items()}, "given", lengths=tuple(range(16))
    )
    arms = {label: ParityTarget(arm.target, arm.signature, inputs) for label in ("a", "b")}
    record = check_parity(arms, [6], tolerance_of(["fp32"]), few=True)
    assert record.ok, record.error
    assert record.cases[0].images == 8


def test_a_server_that_shares_no_memory_says_what_to_do(samples: Path, tmp_path: Path) -> None:
    options = {"engine": "null", "payloads": "uint8", "model": MODEL}
    deployment = EmbeddedDeployment("native", options, tmp_path / "log", abserve=ABSERVE)
    deployment.start()
    try:
        deployment.wait_ready(variant_name(MODEL, "uint8"), 90)
        with pytest.raises(ConnectionRefused, match="--allow-shared-memory"):
            ask(question(deployment, samples, "shm", "uint8"), [0])
    finally:
        deployment.stop()
    assert regions_of_load() == []


def test_a_started_server_accepts_the_largest_batch_of_the_load(server: EmbeddedDeployment) -> None:
    config = Endpoint(server.url).config(MODEL)
    assert config is not None
    assert config["max_batch_size"] == 48


@pytest.mark.parametrize("transport", ["http", pytest.param("grpc", marks=pytest.mark.slow), "shm"])
def test_a_server_killed_under_load_ends_the_block(
    generator: GeneratorProcess, samples: Path, tmp_path: Path, transport: Transport
) -> None:
    options = {"engine": "null", "payloads": "uint8", "model": MODEL, "allow-shared-memory": "true"}
    deployment = EmbeddedDeployment("native", {**options, "added-delay-ms": "100"}, tmp_path / "log", abserve=ABSERVE)
    deployment.start()
    try:
        deployment.wait_ready(variant_name(MODEL, "uint8"), 90)
        arm = question(deployment, samples, transport, "uint8")
        path = tmp_path / "0000.npy"
        command = open_block(generator, arm, samples, "uint8", requests=10**6, samples_path=str(path))
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(generator.go, command)
            part = path.with_name(path.name + ".part")
            await_true(lambda: part.exists() and part.stat().st_size > 2000, "samples on disk")
            for pid in deployment.pids():
                os.kill(pid, signal.SIGKILL)
            outcome = running.result(60)
    finally:
        deployment.stop()
    assert outcome.cut_reason is not None
    assert "no more connections" in outcome.cut_reason
    assert 0 < outcome.errors <= 3 * USERS
    assert regions_of_load() == []


def test_a_killed_generator_leaves_no_memory(server: EmbeddedDeployment, samples: Path, tmp_path: Path) -> None:
    generator = GeneratorProcess(tmp_path / "generator.log")
    arm = question(server, samples, "shm", "uint8")
    open_block(generator, arm, samples, "uint8")
    assert len(registered(server.url)) == 1 + USERS, "the requests, and a slot for each user"  # type: ignore[arg-type]
    assert regions_of_load() == [], "the names are gone as soon as the server has mapped them"
    generator._workers[0].child.popen.kill()
    with pytest.raises(GeneratorError):
        generator.go(Open(url="", batch_size=1, concurrency=1, requests=1, seconds=0, max_seconds=1, timeout_s=1))
    generator.stop()
    assert regions_of_load() == []


@pytest.mark.parametrize("transport", ["grpc", "shm"])
def test_the_generator_ends_with_its_input_while_a_block_is_open(
    server: EmbeddedDeployment, samples: Path, tmp_path: Path, transport: Transport
) -> None:
    """An open channel would keep the process; an open region would stay registered."""
    generator = GeneratorProcess(tmp_path / "generator.log")
    before = registered(server.url)
    open_block(generator, question(server, samples, transport, "uint8"), samples, "uint8")
    process = generator._workers[0].child.popen
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(60) == 0
    assert registered(server.url) == before
    generator.stop()


def test_a_missing_grpc_address_is_refused_at_once(
    server: EmbeddedDeployment, generator: GeneratorProcess, samples: Path
) -> None:
    with pytest.raises(GeneratorError, match="no gRPC address"):
        open_block(generator, question(server, samples, "grpc", "uint8"), samples, "uint8", grpc_address=None)
