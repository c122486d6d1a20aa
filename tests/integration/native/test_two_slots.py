"""A whole server over an engine that takes a second batch while it executes one."""

from __future__ import annotations

import json
import signal
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tritonclient.grpc as triton

PENDING = "abserve_native_pending_requests"


@pytest.fixture
def start(controlled, tmp_path):
    (tmp_path / "pipeline").touch()
    return controlled


def events(server) -> list[str]:
    path = server.folder / "events"
    return path.read_text().splitlines() if path.exists() else []


def config(server) -> dict:
    return json.loads(server.request("GET", "/v2/models/rows/config").body)["parameters"]


def test_clients_of_both_doors_each_get_their_own_rows(start):
    server = start("--pipeline", "true", "--max-batch-size", "8", "--max-queue-delay-us", "500", grpc=True)
    server.open("load", "infer")
    server.wait_ready()

    def over_http(seed: int) -> int:
        generator = np.random.default_rng(seed)
        for number in range(15):
            if number == 7 and seed == 3:
                assert server.infer([666.0] * 4).status == 500  # fails, with whoever shares its batch
                continue
            sent = generator.integers(20, 600, (int(generator.integers(1, 9)), 4)).astype(np.float32)
            answer = server.infer(*sent.tolist())
            if answer.status == 500:
                continue
            assert json.loads(answer.body)["outputs"][0]["data"] == sent.reshape(-1).tolist()
        return 15

    def over_grpc(seed: int) -> int:
        generator = np.random.default_rng(seed)
        with triton.InferenceServerClient(server.grpc_address) as client:
            for _ in range(15):
                sent = generator.integers(20, 600, (int(generator.integers(1, 9)), 4)).astype(np.float32)
                tensor = triton.InferInput("x", list(sent.shape), "FP32").set_data_from_numpy(sent)
                try:
                    got = client.infer("rows", [tensor]).as_numpy("y")
                except triton.InferenceServerException:  # how often is counted below
                    continue
                np.testing.assert_array_equal(got, sent)
        return 15

    with ThreadPoolExecutor(8) as pool:
        done = [pool.submit(over_http, seed) for seed in range(4)] + [pool.submit(over_grpc, seed) for seed in range(4)]
        assert sum(future.result() for future in done) == 120
    stats = server.model_stats()["inference_stats"]
    assert stats["success"]["count"] + stats["fail"]["count"] == 120
    assert 1 <= stats["fail"]["count"] <= 8  # at most one whole batch
    assert events(server).count("collect") == len([event for event in events(server) if event != "collect"])
    assert config(server)["batch_slots"] == {"string_value": "2"}


def test_sigterm_finishes_both_slots_and_what_waits(start):
    server = start("--pipeline", "true", "--max-batch-size", "2", "--max-queue-delay-us", "0")
    server.open("load")
    server.wait_ready()
    before = len(events(server))
    with ThreadPoolExecutor(6) as pool:
        futures = [pool.submit(server.infer, [20.0] * 4, [21.0] * 4)]
        server.wait_until(lambda: len(events(server)) == before + 1, "the first batch is executed")
        futures.append(pool.submit(server.infer, [22.0] * 4, [23.0] * 4))
        server.wait_until(lambda: len(events(server)) == before + 2, "the second is submitted beside it")
        futures += [pool.submit(server.infer, [value] * 4) for value in (24.0, 25.0, 26.0)]
        server.wait_until(lambda: server.metric(PENDING) == 3, "three wait")
        assert events(server)[before:] == ["submit 2", "submit 2"]
        server.process.send_signal(signal.SIGTERM)
        server.wait_until(lambda: server.status("/v2/health/live") is None, "new connections are refused")
        assert not any(future.done() for future in futures)
        server.open("infer")
        got = [json.loads(future.result().body)["outputs"][0]["data"][::4] for future in futures]
    assert got[:2] == [[20.0, 21.0], [22.0, 23.0]]
    assert sorted(got[2:]) == [[24.0], [25.0], [26.0]]
    assert server.process.wait(10) == 0
    assert (server.folder / "closed").exists()


def test_it_is_off_unless_switched_on(start):
    server = start()
    server.open("load", "infer")
    server.wait_ready()
    assert server.infer([20.0] * 4).status == 200
    assert events(server) == []
    assert config(server)["batch_slots"] == {"string_value": "1"}
