"""Inputs that never repeat: what is sent stays valid, differs every time, and can be made again from its number."""

from __future__ import annotations

import io
import socket
import threading

import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from loadgen.client.bodies import Variation, choose_items, find_variation, for_server, fresh_numbers
from loadgen.client.connection import Address, assemble
from loadgen.client.endpoint import Signature, TensorSignature
from loadgen.client.http import HttpConnection
from loadgen.client.inputs import SampleInputs
from loadgen.client.shared_memory import SharedMemoryRequest
from loadgen.client.transports import PreparedBodies, prepare
from loadgen.records.targets import TRANSPORTS
from servers.models.items import jpeg_paths

Image = pytest.importorskip("PIL.Image")  # comes with the extra `servers`
RNG = np.random.default_rng(0)
ARRAYS: dict[str, tuple[str, np.ndarray]] = {
    "fp32": ("FP32", RNG.standard_normal((6, 3, 8, 8)).astype("<f4")),
    "fp16": ("FP16", RNG.standard_normal((6, 9)).astype("<f2")),
    "pixels": ("UINT8", RNG.integers(0, 256, (6, 8, 8, 3), dtype=np.uint8)),
    "tokens": ("INT64", RNG.integers(0, 2, (6, 77)).astype("<i8")),
    "flags": ("BOOL", RNG.integers(0, 2, (6, 64)).astype("?")),
}


def photographs() -> np.ndarray:
    files = np.empty((6, 1), dtype=object)
    files[:, 0] = [path.read_bytes() for path in jpeg_paths()[:6]]
    return files


def case(kind: str) -> tuple[SampleInputs, Signature, Variation]:
    datatype, array = ("BYTES", photographs()) if kind == "jpeg" else ARRAYS[kind]
    inputs = SampleInputs({"x": array}, "photographs")
    signature = Signature("m", (TensorSignature("x", datatype, (-1, *array.shape[1:])),),
                          (TensorSignature("y", "FP32", (-1, 4)),))  # fmt: skip
    variation = find_variation(inputs, signature)
    assert variation is not None
    return inputs, signature, variation


KINDS = [*ARRAYS, "jpeg"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_number_makes_another_item_that_is_as_valid(kind: str) -> None:
    inputs, _, variation = case(kind)
    made = [variation.varied(inputs, 2, 2**40 - 3 + n).arrays["x"] for n in range(50)]
    assert len({array.tobytes() if kind != "jpeg" else array[0, 0] for array in made}) == 50
    original = inputs.arrays["x"]
    for array in made:
        assert (array.dtype, array.shape) == (original.dtype, (1, *original.shape[1:]))
        if kind in ("fp32", "fp16"):
            assert np.isfinite(array).all()
            assert original.min() <= array.min() <= array.max() <= original.max()
        if kind in ("tokens", "flags"):
            assert set(np.unique(array)) <= {0, 1}
    assert variation.capacity == 2**40


def test_a_varied_photograph_is_still_that_photograph_and_no_two_have_the_same_pixels() -> None:
    inputs, _, variation = case("jpeg")
    for item in range(6):
        files = [variation.varied(inputs, item, number).arrays["x"][0, 0] for number in range(20)]
        pixels = [np.asarray(Image.open(io.BytesIO(file)).convert("L"), dtype=float) for file in files]
        assert len({array.tobytes() for array in pixels}) == 20, "a cache behind the decoder would know them"
        same = np.asarray(Image.open(io.BytesIO(inputs.arrays["x"][item, 0])).convert("L"), dtype=float)
        assert min(np.corrcoef(array.ravel(), same.ravel())[0, 1] for array in pixels) > 0.9


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_bytes_on_the_wire_can_be_made_again(transport: str, kind: str) -> None:
    """Bytes on the wire, for each transport, against the same request made of varied items."""
    inputs, signature, variation = case(kind)
    items = (4, 1, 4)
    body = prepare(transport, inputs, signature, items, variation)  # type: ignore[arg-type]
    first, patches = PreparedBodies((), (items,), variation, fresh_numbers()).patches(0)
    again = [variation.varied(inputs, item, first + row).arrays["x"] for row, item in enumerate(items)]
    expected = SampleInputs({"x": np.concatenate(again)}, "photographs")
    whole = prepare(transport, expected, signature, range(3))  # type: ignore[arg-type]
    if isinstance(body, SharedMemoryRequest):
        data = bytearray(body.inputs[0].data)
        for place, patch in zip(body.inputs[0].places, patches, strict=True):
            data[place : place + len(patch)] = patch
        assert data == whole.inputs[0].data  # type: ignore[union-attr]
        return
    sent = b"".join(assemble(b"", body.pieces, patches))
    assert sent == whole.body  # type: ignore[union-attr]
    assert b"".join(assemble(b"", body.pieces, ())) == body.body
    if transport == "grpc":
        assert service_pb2.ModelInferRequest.FromString(sent).inputs[0].shape[0] == 3


def test_of_several_inputs_the_one_with_most_room_varies() -> None:
    """And only where the datatype has room: a flag for each item has none."""
    arrays = {"flag": np.ones((4, 1), "<i4"), "x": RNG.standard_normal((4, 9)).astype("<f4")}
    tensors = (TensorSignature("flag", "INT32", (-1, 1)), TensorSignature("x", "FP32", (-1, 9)))
    signature = Signature("m", tensors, (TensorSignature("y", "FP32", (-1, 4)),))
    variation = find_variation(SampleInputs(arrays, "synthetic"), signature)
    assert variation is not None
    assert variation.name == "x"
    for transport in ("http", "grpc"):
        body = prepare(transport, SampleInputs(arrays, "synthetic"), signature, (0, 3), variation)
        patches = [variation.patch(item, 5) for item in (0, 3)]
        sent = b"".join(assemble(b"", body.pieces, patches))  # type: ignore[union-attr]
        varied = [variation.varied(SampleInputs(arrays, "synthetic"), item, 5).arrays["x"] for item in (0, 3)]
        assert sent.endswith(np.concatenate(varied).tobytes())
    constant = {"x": np.ones((4, 77), "<i8")}
    assert find_variation(SampleInputs(constant, "synthetic"), signature) is None
    only = Signature("m", tensors[:1], ())
    assert find_variation(SampleInputs(arrays, "synthetic"), only) is None


def test_no_two_requests_of_a_process_share_a_number() -> None:
    inputs, _, variation = case("fp32")
    items = choose_items(inputs, 3, seed=0)
    fresh = PreparedBodies((), items, variation, fresh_numbers())
    seen: set[bytes] = set()
    for request in range(200):
        body = request % len(items)
        first, patches = fresh.patches(body)
        assert patches == [variation.patch(item, first + row) for row, item in enumerate(items[body])]
        seen.update(patches)
    assert len(seen) == 600


def test_a_large_body_in_many_pieces_arrives_whole() -> None:
    """More pieces than a `sendmsg` takes, more bytes than a socket holds."""
    inputs = SampleInputs({"x": RNG.standard_normal((4, 3000)).astype("<f4")}, "synthetic")
    signature = Signature("m", (TensorSignature("x", "FP32", (-1, 3000)),), (TensorSignature("y", "FP32", (-1, 4)),))
    variation = find_variation(inputs, signature)
    assert variation is not None
    items = tuple(row % 4 for row in range(700))
    listener = socket.create_server(("127.0.0.1", 0))
    address = Address("127.0.0.1", listener.getsockname()[1])
    body = prepare("http", inputs, signature, items, variation)
    request = for_server(body, address, "m")  # type: ignore[arg-type]
    _, patches = PreparedBodies((), (items,), variation, fresh_numbers()).patches(0)
    expected = b"".join(assemble(request.head, request.pieces, patches))
    received = bytearray()

    def serve() -> None:
        peer, _ = listener.accept()
        with peer:
            while len(received) < len(expected):
                received.extend(peer.recv(2**16))
            peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    connection = HttpConnection(address, timeout_s=20)
    try:
        exchange = connection.send(request, patches)
    finally:
        connection.close()
        thread.join(60)
        listener.close()
    assert exchange.status == 200, exchange.failure
    assert received == expected
    assert exchange.request_bytes == len(expected)
