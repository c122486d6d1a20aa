"""System shared memory over HTTP and gRPC with tritonclient's own module, and owners that take their memory away."""

from __future__ import annotations

import json
import os
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException

from servers.models.items import jpeg_paths
from tests.integration.native.raw_client import check_well

MODEL = "openclip_vit_b32"
ROW_BYTES = 512 * 4
IMAGE_BYTES = 3 * 224 * 224 * 4
KEY = f"abserve_test_{os.getpid()}"
FILE = Path("/dev/shm") / KEY


@dataclass
class FrontEnd:
    client: Any
    module: ModuleType

    def register(self, name: str, size: int, offset: int = 0, key: str = KEY) -> None:
        self.client.register_system_shared_memory(name, f"/{key}", size, offset=offset)

    def infer(self, count: int, region: str, size: int, offset: int = 0, output: tuple | None = None) -> Any:
        item = self.module.InferInput("pixel_values", [count, 3, 224, 224], "FP32")
        item.set_shared_memory(region, size, offset=offset)
        outputs = None
        if output is not None:
            wanted = self.module.InferRequestedOutput("embedding")
            wanted.set_shared_memory(*output)
            outputs = [wanted]
        return self.client.infer(MODEL, [item], outputs=outputs)


@contextmanager
def front_end(server, kind: str) -> Iterator[FrontEnd]:
    module = tritonclient.http if kind == "http" else tritonclient.grpc
    client = module.InferenceServerClient(server.address if kind == "http" else server.grpc_address)
    try:
        yield FrontEnd(client, module)
    finally:
        client.close()


@pytest.fixture(params=["http", "grpc"])
def both(request, open_server):
    """A client of HTTP, then one of gRPC; no region outlives a test."""
    with front_end(open_server, request.param) as opened:
        yield opened
        opened.client.unregister_system_shared_memory()
        opened.client.unregister_cuda_shared_memory()
        FILE.unlink(missing_ok=True)


def images(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, 3, 224, 224), dtype=np.float32)


def first_values(data: np.ndarray) -> np.ndarray:
    return data.reshape(len(data), -1)[:, :512]


@contextmanager
def segment(size: int, content: bytes = b"") -> Iterator[None]:
    FILE.write_bytes(content.ljust(size, b"\0"))
    try:
        yield
    finally:
        FILE.unlink(missing_ok=True)


@pytest.mark.parametrize("count", [1, 5])
def test_tensors_travel_through_regions_both_ways(both, count):
    data = images(count)
    given = shm.create_shared_memory_region("given", f"{KEY}_in", data.nbytes)
    taken = shm.create_shared_memory_region("taken", f"{KEY}_out", 64 + count * ROW_BYTES)
    try:
        shm.set_shared_memory_region(given, [data])
        both.register("given", data.nbytes, key=f"{KEY}_in")
        both.register("taken", 64 + count * ROW_BYTES, key=f"{KEY}_out")
        result = both.infer(count, "given", data.nbytes, output=("taken", count * ROW_BYTES, 64))
        answer = result.get_output("embedding")
        if isinstance(answer, dict):
            assert answer == {"name": "embedding", "datatype": "FP32", "shape": [count, 512]}
        else:
            assert set(answer.parameters) == {
                "shared_memory_region", "shared_memory_byte_size", "shared_memory_offset"
            }  # fmt: skip
        written = shm.get_contents_as_numpy(taken, np.float32, [count, 512], offset=64)
        np.testing.assert_array_equal(written, first_values(data))
        np.testing.assert_array_equal(both.infer(count, "given", data.nbytes).as_numpy("embedding"), written)
    finally:
        shm.destroy_shared_memory_region(given)
        shm.destroy_shared_memory_region(taken)


def test_an_empty_piece_is_no_fault(both):
    """0 bytes where the model needs some are the fault of the shape, as with bytes in the body."""
    with segment(64):
        both.register("some", 64)
        for offset in (0, 64):
            with pytest.raises(InferenceServerException, match=r"needs 602112 bytes .* got 0"):
                both.infer(1, "some", 0, offset)
        with pytest.raises(InferenceServerException, match="uses 0 bytes from byte 65"):
            both.infer(1, "some", 0, 65)


def test_a_piece_inside_a_region_that_begins_off_a_page(both):
    data = images(1, 7)
    with segment(0, b"\0" * 5000 + data.tobytes()):
        both.register("off", 1000 + data.nbytes, offset=4000)
        result = both.infer(1, "off", data.nbytes, offset=1000)
    np.testing.assert_array_equal(result.as_numpy("embedding"), first_values(data))


def test_a_repeated_request_means_what_is_registered_now(both):
    first, second = images(2, 1), images(2, 2)
    size = first.nbytes // 2
    with segment(0, first.tobytes() + second.tobytes() + b"\0" * ROW_BYTES):
        for data, start in ((first, 0), (second, first.nbytes), (first, 0)):
            both.register("given", size, offset=start)
            both.register("taken", ROW_BYTES, offset=2 * first.nbytes)
            for _ in range(3):
                both.infer(1, "given", size, output=("taken", ROW_BYTES))
                written = np.frombuffer(FILE.read_bytes()[-ROW_BYTES:], np.float32)
                np.testing.assert_array_equal(written, first_values(data)[0])
                with FILE.open("r+b") as memory:  # another answer would be seen
                    memory.seek(-ROW_BYTES, os.SEEK_END)
                    memory.write(b"\1" * ROW_BYTES)
            both.client.unregister_system_shared_memory("taken")
            with pytest.raises(InferenceServerException, match="'taken' is not registered"):
                both.infer(1, "given", size, output=("taken", ROW_BYTES))
            both.client.unregister_system_shared_memory("given")
            with pytest.raises(InferenceServerException, match="'given' is not registered"):
                both.infer(1, "given", size)
        both.register("given", size - 1)
        both.register("taken", ROW_BYTES - 1)
        with pytest.raises(InferenceServerException, match="which has"):
            both.infer(1, "given", size, output=("taken", ROW_BYTES))


def test_status_tells_regions_without_their_keys(both):
    with segment(8192):
        both.register("a", 4096, offset=4096)
        both.register("b", 10)
        status = both.client.get_system_shared_memory_status(**as_json(both))
        rows = {row["name"]: row for row in (status["regions"].values() if isinstance(status, dict) else status)}
        assert {name: (int(row.get("offset", 0)), int(row["byte_size"])) for name, row in rows.items()} == {
            "a": (4096, 4096),
            "b": (0, 10),
        }
        assert KEY not in json.dumps(rows)
        both.client.unregister_system_shared_memory("a")
        both.client.unregister_system_shared_memory("a")  # one that is gone is not missed
        with pytest.raises(InferenceServerException, match="'a' is not registered"):
            both.client.get_system_shared_memory_status("a")
        both.client.get_system_shared_memory_status("b")


def as_json(opened: FrontEnd) -> dict[str, bool]:
    return {"as_json": True} if opened.module is tritonclient.grpc else {}


@pytest.mark.parametrize(
    ("size", "offset", "message"),
    [
        (4097, 0, "byte 4097 of an object of 4096 bytes"),
        (4096, 1, "ends at byte 4097"),
        (2**64 - 32, 32, "overflow"),
        (2**63 - 1, 32, "ends at byte"),
        (64, 2**63 - 1, "ends at byte"),
        (0, 0, "size ≥ 1"),
    ],
)
def test_regions_past_their_memory_are_refused(both, size, offset, message):
    with segment(4096), pytest.raises(InferenceServerException, match=message) as caught:
        both.register("r", size, offset=offset)
    assert KEY not in str(caught.value)


@pytest.mark.parametrize("size", [1, 4096])
def test_requests_past_their_region_are_refused(both, size):
    with segment(2 * IMAGE_BYTES):
        both.register("r", IMAGE_BYTES)
        for region, offset, byte_size, message in (
            ("r", 1, IMAGE_BYTES, "which has"),
            ("r", 0, IMAGE_BYTES + size, "which has"),
            ("r", 2**63 - 1, IMAGE_BYTES, "which has"),
            ("r", 0, IMAGE_BYTES - size, "needs 602112 bytes"),
            ("none", 0, IMAGE_BYTES, "'none' is not registered"),
        ):
            with pytest.raises(InferenceServerException, match=message):
                both.infer(1, region, byte_size, offset)
        with pytest.raises(InferenceServerException, match="which has"):
            both.infer(1, "r", IMAGE_BYTES, output=("r", ROW_BYTES, IMAGE_BYTES - ROW_BYTES + 1))
        with pytest.raises(InferenceServerException, match="2048 bytes"):
            both.infer(1, "r", IMAGE_BYTES, output=("r", ROW_BYTES - 1))
        both.infer(1, "r", IMAGE_BYTES)


def test_an_offset_and_a_size_whose_sum_overflows_are_refused(open_server):
    with segment(4096), front_end(open_server, "http") as opened:
        opened.register("r", 4096)
        parameters = {
            "shared_memory_region": "r", "shared_memory_offset": 32, "shared_memory_byte_size": 2**64 - 32
        }  # fmt: skip
        tensor = {"name": "pixel_values", "datatype": "FP32", "shape": [1, 3, 224, 224], "parameters": parameters}
        answer = open_server.request("POST", f"/v2/models/{MODEL}/infer", json.dumps({"inputs": [tensor]}).encode())
        assert answer.status == 400
        assert "overflow" in json.loads(answer.body)["error"]
        opened.client.unregister_system_shared_memory()


KEYS = ["../etc/passwd", "..", ".", "", "a/b", "n" * 256, "triton_python_backend_shm_region_1", "abserve_absent"]


@pytest.mark.parametrize("key", KEYS)
def test_keys_that_are_no_memory_of_the_client_are_refused_and_not_repeated(both, key):
    with pytest.raises(InferenceServerException) as caught:
        both.client.register_system_shared_memory("r", f"/{key}", 64)
    assert caught.value.status() in ("400", "StatusCode.INVALID_ARGUMENT")
    assert len(key) < 3 or key not in str(caught.value)
    assert "passwd" not in str(caught.value)


def test_links_and_pipes_are_not_followed(both, tmp_path):
    target = tmp_path / "target"
    target.write_bytes(b"x" * 64)
    FILE.symlink_to(target)
    with pytest.raises(InferenceServerException, match="cannot be opened"):
        both.register("r", 64)
    FILE.unlink()
    os.mkfifo(FILE)
    with pytest.raises(InferenceServerException, match="does not name a shared-memory object"):
        both.register("r", 64)


def test_a_name_is_registered_once(both):
    with segment(64):
        both.register("r", 64)
        with pytest.raises(InferenceServerException, match="registered already"):
            both.register("r", 64)


def test_memory_that_was_unlinked_still_serves(both):
    data = images(1)
    with segment(0, data.tobytes()):
        both.register("r", data.nbytes)
    assert not FILE.exists()
    np.testing.assert_array_equal(both.infer(1, "r", data.nbytes).as_numpy("embedding"), first_values(data))


def test_memory_that_was_truncated_fails_its_request_and_not_the_server(both):
    data = images(1)
    with segment(0, data.tobytes()):
        both.register("r", data.nbytes)
        both.infer(1, "r", data.nbytes, output=("r", ROW_BYTES))
        os.truncate(FILE, 4096)
        with pytest.raises(InferenceServerException, match="has been truncated"):
            both.infer(1, "r", data.nbytes)
        item = both.module.InferInput("pixel_values", [1, 3, 224, 224], "FP32")
        item.set_data_from_numpy(data)
        wanted = both.module.InferRequestedOutput("embedding")
        wanted.set_shared_memory("r", ROW_BYTES)
        with pytest.raises(InferenceServerException, match="has been truncated"):
            both.client.infer(MODEL, [item], outputs=[wanted])
        result = both.client.infer(MODEL, [item])
    np.testing.assert_array_equal(result.as_numpy("embedding"), first_values(data))


def test_memory_is_read_when_a_request_is_accepted_and_truncating_it_later_changes_nothing(controlled):
    server = controlled("--allow-shared-memory", "true", grpc=True)
    server.open("load")
    server.wait_ready()
    values = np.arange(4, dtype=np.float32)
    with segment(0, values.tobytes()), front_end(server, "grpc") as opened:
        opened.register("r", 16)
        answers: queue.Queue[Any] = queue.Queue()

        def start() -> None:
            item = opened.module.InferInput("x", [1, 4], "FP32")
            item.set_shared_memory("r", 16)
            opened.client.async_infer("rows", [item], lambda result, error: answers.put((result, error)))

        start()
        server.wait_until(lambda: (server.folder / "infer-reached").exists(), "the engine is busy")
        start()
        server.wait_until(lambda: server.metric("abserve_native_pending_requests") == 1, "the second waits")
        os.truncate(FILE, 8)
        start()
        assert "has been truncated" in str(answers.get(timeout=60)[1])  # refused while the engine is still busy
        server.open("infer")
        for _ in range(2):
            np.testing.assert_array_equal(answers.get(timeout=60)[0].as_numpy("y"), [values])
        assert server.infer([3.0] * 4).status == 200


def test_memory_that_is_truncated_while_the_engine_has_it_ends_nobody(controlled):
    """A mapping of it would end the server with SIGBUS as soon as the engine reads the input."""
    server = controlled("--allow-shared-memory", "true", "--max-queue-delay-us", "0", grpc=True)
    server.open("load")
    server.wait_ready()
    values = np.arange(4, dtype=np.float32)
    with segment(0, values.tobytes()), front_end(server, "grpc") as opened:
        opened.register("r", 16)
        item = opened.module.InferInput("x", [1, 4], "FP32")
        item.set_shared_memory("r", 16)
        answers: queue.Queue[Any] = queue.Queue()
        opened.client.async_infer("rows", [item], lambda result, error: answers.put((result, error)))
        server.wait_until(lambda: (server.folder / "infer-reached").exists(), "the engine has it")
        os.truncate(FILE, 0)
        server.open("infer")
        np.testing.assert_array_equal(answers.get(timeout=60)[0].as_numpy("y"), [values])
    assert server.infer([3.0] * 4).status == 200


def test_reading_a_hole_takes_no_shared_memory(both):
    """A page fault in a hole would, and end the server with SIGBUS when none is left."""
    with segment(0):
        os.truncate(FILE, IMAGE_BYTES)
        both.register("r", IMAGE_BYTES)
        assert not both.infer(1, "r", IMAGE_BYTES).as_numpy("embedding").any()
        assert FILE.stat().st_blocks == 0


def test_an_input_over_the_limit_is_refused_before_it_is_read(both, open_server):
    """One element of 3 GiB in a request of 153 bytes: it took 6.2 GB and held the event loop for 13.7 s."""
    size = 3 * 2**30
    before = open_server.memory_bytes
    with segment(0):
        os.truncate(FILE, size)
        with FILE.open("r+b") as file:
            file.write((size - 4).to_bytes(4, "little"))
        both.register("r", size)
        for datatype, shape in (("BYTES", [1, 1]), ("FP32", [size // IMAGE_BYTES, 3, 224, 224])):
            item = both.module.InferInput("pixel_values", shape, datatype)
            item.set_shared_memory("r", size // IMAGE_BYTES * IMAGE_BYTES if datatype == "FP32" else size)
            with pytest.raises(InferenceServerException, match="the server takes at most 67108864"):
                both.client.infer(MODEL, [item])
    assert open_server.memory_bytes - before < 32 * 2**20


def test_files_travel_through_regions_and_malformed_ones_are_refused(native):
    server = native("--payloads", "jpeg", "--allow-shared-memory", "true")
    server.wait_ready()
    file = jpeg_paths()[0].read_bytes()
    model = f"{MODEL}_jpeg"
    with front_end(server, "http") as opened:
        elements = np.array([[file]], dtype=object)
        sent = opened.module.InferInput("image", [1, 1], "BYTES").set_data_from_numpy(elements)
        named = opened.module.InferInput("image", [1, 1], "BYTES")
        named.set_shared_memory("r", 4 + len(file))
        with segment(0, len(file).to_bytes(4, "little") + file):
            opened.register("r", 4 + len(file))
            given, read = (opened.client.infer(model, [item]).as_numpy("embedding") for item in (sent, named))
            np.testing.assert_array_equal(given, read)
            with FILE.open("r+b") as changed:
                changed.write((len(file) + 1).to_bytes(4, "little"))
            with pytest.raises(InferenceServerException, match="are left"):
                opened.client.infer(model, [named])
            os.truncate(FILE, 100)
            with pytest.raises(InferenceServerException, match="truncated"):
                opened.client.infer(model, [named])


def test_without_the_switch_every_route_names_it(null_server, native):
    answers = [
        null_server.request("GET", "/v2/systemsharedmemory/status"),
        null_server.request("POST", "/v2/systemsharedmemory/region/r/register", b'{"key": "/k", "byte_size": 1}'),
        null_server.request("POST", "/v2/systemsharedmemory/region/r/unregister"),
        null_server.request("POST", "/v2/systemsharedmemory/unregister"),
        null_server.request("POST", "/v2/cudasharedmemory/unregister"),
    ]
    parameters = {"shared_memory_region": "r", "shared_memory_byte_size": IMAGE_BYTES}
    tensor = {"name": "pixel_values", "datatype": "FP32", "shape": [1, 3, 224, 224], "parameters": parameters}
    answers.append(null_server.request("POST", f"/v2/models/{MODEL}/infer", json.dumps({"inputs": [tensor]}).encode()))
    for answer in answers:
        assert answer.status == 400
        assert "--allow-shared-memory" in json.loads(answer.body)["error"]
    server = native(grpc=True)
    server.wait_ready()
    with front_end(server, "grpc") as opened, segment(64):
        for call in (lambda: opened.register("r", 64), opened.client.get_system_shared_memory_status):
            with pytest.raises(InferenceServerException, match="--allow-shared-memory"):
                call()


def test_cuda_memory_is_refused_clearly(open_server):
    body = json.dumps({"raw_handle": {"b64": "AA=="}, "device_id": 0, "byte_size": 1}).encode()
    answer = open_server.request("POST", "/v2/cudasharedmemory/region/r/register", body)
    assert answer.status == 501
    assert "system shared memory" in json.loads(answer.body)["error"]


@pytest.mark.parametrize("fronts", ["0", "2"])
def test_regions_leave_descriptors_for_clients(native, fronts):
    """Each has one descriptor in each process, and all of them a quarter of what a process may have."""
    server = native("--fronts", fronts, "--allow-shared-memory", "true", ulimit="-n 256")
    server.wait_ready()
    before = max(process.num_fds() for process in server.processes)
    file = Path(f"/dev/shm/abserve_test_descriptors_{os.getpid()}")
    file.write_bytes(bytes(16))
    body = json.dumps({"key": f"/{file.name}", "offset": 0, "byte_size": 16}).encode()
    try:
        statuses = [
            server.request("POST", f"/v2/systemsharedmemory/region/r{number}/register", body).status
            for number in range(70)
        ]
        assert statuses == [200] * 64 + [413] * 6
        assert max(process.num_fds() for process in server.processes) <= before + 64 + 2
        check_well(server)
        assert server.request("POST", "/v2/systemsharedmemory/region/r5/unregister").status == 200
        assert server.request("POST", "/v2/systemsharedmemory/region/r99/register", body).status == 200
    finally:
        file.unlink()
