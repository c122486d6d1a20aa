"""CUDA shared memory over HTTP and gRPC with tritonclient's own calls: what is registered, sent and refused."""

from __future__ import annotations

import base64
import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from tests.integration.native.cuda_memory.conftest import IMAGE_BYTES, MODEL, ROW_BYTES, Allocation, images


@pytest.mark.parametrize("rows", [1, 5])
def test_the_same_embedding_as_over_the_wire_both_ways(both, device, rows):
    data = images(rows, rows)
    given = device.allocate(64 + data.nbytes, data, 64)
    taken = device.allocate(16 + rows * ROW_BYTES)
    both.register("given", given)
    both.register("taken", taken)
    expected = both.send(data).as_numpy("embedding")
    np.testing.assert_array_equal(both.infer(rows, "given", 64).as_numpy("embedding"), expected)
    both.infer(rows, "given", 64, output=("taken", rows * ROW_BYTES, 16))
    np.testing.assert_array_equal(taken.read(rows, 16), expected)
    given.write(data[::-1].copy(), 64)  # what is there when it is asked for, not when it was registered
    np.testing.assert_array_equal(both.infer(rows, "given", 64).as_numpy("embedding"), expected[::-1])


def test_requests_that_are_merged_get_their_own_rows(both, device):
    data = images(6, 3)
    both.register("given", device.allocate(data.nbytes, data))
    taken = device.allocate(6 * ROW_BYTES)
    both.register("taken", taken)

    def one(row: int) -> None:
        both.apart(
            lambda front_end: front_end.infer(1, "given", row * IMAGE_BYTES, ("taken", ROW_BYTES, row * ROW_BYTES))
        )

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(one, range(6)))
    np.testing.assert_array_equal(taken.read(6), data.reshape(6, -1)[:, :512])


def test_status_names_regions_and_no_handles_and_kinds_are_kept_apart(both, device):
    allocation = device.allocate(4096)
    both.register("a", allocation)
    both.register("b", allocation, 10)
    options = {"as_json": True} if both.module is tritonclient.grpc else {}
    status = both.client.get_cuda_shared_memory_status(**options)
    rows = {row["name"]: row for row in (status["regions"].values() if isinstance(status, dict) else status)}
    assert {name: int(row["byte_size"]) for name, row in rows.items()} == {"a": 4096, "b": 10}
    assert {int(row.get("device_id", 0)) for row in rows.values()} == {0}
    assert "abserve_cuda_stub" not in json.dumps(rows)
    system = both.client.get_system_shared_memory_status(**options)
    assert not (system["regions"] if system and isinstance(system, dict) else system)
    with pytest.raises(InferenceServerException, match="registered already"):
        both.client.register_system_shared_memory("a", "/whatever", 64)
    both.client.unregister_system_shared_memory("a")
    both.client.unregister_system_shared_memory()
    both.client.get_cuda_shared_memory_status("a")
    both.client.unregister_cuda_shared_memory("a")
    both.client.unregister_cuda_shared_memory("a")  # one that is gone is not missed
    assert device.log() == ["open", "open", "close"]
    with pytest.raises(InferenceServerException, match="'a' is not registered"):
        both.client.get_cuda_shared_memory_status("a")
    both.client.get_cuda_shared_memory_status("b")
    assert "cuda_shared_memory" in str(both.client.get_server_metadata())


def test_what_cannot_be_registered_is_refused_and_left_closed(both, device):
    allocation, freed = device.allocate(4096), device.allocate(4096)
    freed.free()
    no_handle = Allocation.__new__(Allocation)
    for handle, size, number, message in (
        (allocation.handle, 4097, 0, "byte 4097 of an allocation of 4096"),
        (allocation.handle, 2**62, 0, "of an allocation of 4096"),
        (allocation.handle, 0, 0, "size ≥ 1"),
        (allocation.handle, 4096, 1, "this server sees 1"),
        (allocation.handle, 4096, -1, "this server sees 1"),
        (allocation.handle[:63], 4096, 0, "must have 64 bytes, got 63"),
        (b"", 4096, 0, "must have 64 bytes, got 0"),
        (b"\xff" * 64, 4096, 0, "CUDA_ERROR_INVALID_VALUE"),
        (freed.handle, 4096, 0, "CUDA_ERROR_INVALID_HANDLE"),
        (allocation.handle[:4] + b"\7" + allocation.handle[5:], 4096, 0, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED"),
    ):
        no_handle.handle, no_handle.size = handle, size
        with pytest.raises(InferenceServerException, match=message) as caught:
            both.register("r", no_handle, size, number)
        assert caught.value.status() in ("400", "StatusCode.INVALID_ARGUMENT")
        assert "abserve_cuda_stub" not in str(caught.value)
    both.register("r", allocation)
    with pytest.raises(InferenceServerException, match="registered already"):
        both.register("r", allocation)
    with pytest.raises(InferenceServerException, match="1 to 256 characters"):
        both.register("n" * 257, allocation)


def test_http_bodies_without_a_handle_are_refused(gpu_server, device):
    for body in (
        b"",
        b"[]",
        b'{"raw_handle": "AA==", "device_id": 0, "byte_size": 1}',
        b'{"raw_handle": {"b64": "\\u00e4"}, "device_id": 0, "byte_size": 1}',
        b'{"raw_handle": {"b64": "A"}, "device_id": 0, "byte_size": 1}',
        b'{"raw_handle": {"b64": "AA=="}, "byte_size": 1}',
        b'{"raw_handle": {"b64": "AA=="}, "device_id": 0, "byte_size": "1"}',
        b'{"raw_handle": {"b64": "AA=="}, "device_id": true, "byte_size": 1}',
    ):
        answer = gpu_server.request("POST", "/v2/cudasharedmemory/region/r/register", body)
        assert answer.status == 400, (body, answer.body)
        assert json.loads(answer.body)["error"]


def test_a_handle_may_be_wrapped_as_perf_analyzers_is(gpu_server, device):
    allocation = device.allocate(IMAGE_BYTES)
    wrapped = base64.b64encode(allocation.handle).decode()
    wrapped = f"{wrapped[:72]}\n{wrapped[72:]}\n"
    body = {"raw_handle": {"b64": wrapped}, "device_id": 0, "byte_size": IMAGE_BYTES}
    answer = gpu_server.request("POST", "/v2/cudasharedmemory/region/w/register", json.dumps(body).encode())
    assert answer.status == 200, answer.body
    assert gpu_server.request("POST", "/v2/cudasharedmemory/region/w/unregister", b"").status == 200


def test_requests_past_their_region_are_refused(both, device):
    data = images(1)
    both.register("r", device.allocate(2 * IMAGE_BYTES, data), IMAGE_BYTES)
    for rows, offset, message in ((1, 1, "which has"), (2, 0, "which has"), (1, 2**63 - 1, "which has")):
        with pytest.raises(InferenceServerException, match=message):
            both.infer(rows, "r", offset)
    item = both.module.InferInput("pixel_values", [1, 3, 224, 224], "FP32")
    item.set_shared_memory("r", IMAGE_BYTES - 4)
    with pytest.raises(InferenceServerException, match="needs 602112 bytes"):
        both.client.infer(MODEL, [item])
    with pytest.raises(InferenceServerException, match="2048 bytes"):
        both.infer(1, "r", output=("r", ROW_BYTES - 1))
    with pytest.raises(InferenceServerException, match="which has"):
        both.infer(1, "r", output=("r", ROW_BYTES, IMAGE_BYTES - ROW_BYTES + 1))
    np.testing.assert_array_equal(both.infer(1, "r").as_numpy("embedding"), data.reshape(1, -1)[:, :512])
