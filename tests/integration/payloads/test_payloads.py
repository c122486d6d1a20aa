"""The three payloads through both real servers: one picture has one answer, and one bad image one error."""

from __future__ import annotations

import io
import json
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from servers.models.images import UInt8Array, normalise
from servers.models.registry import get_variant
from servers.models.specification import ModelSpecification
from servers.protocol.tensors import Array
from servers.triton.config import ensemble_config, preprocess_config, preprocess_files, preprocess_name
from servers.triton.repository import PlacedModel
from tests.again import again
from tests.cosines import row_cosines

pytestmark = pytest.mark.triton
Batch = Callable[..., Array]
JPEG = get_variant("openclip_vit_b32", "jpeg")
UINT8 = get_variant("openclip_vit_b32", "uint8")


def picture(width: int, height: int, mode: str = "RGB", file_format: str = "JPEG") -> bytes:
    ramp = np.linspace(0, 255, width * height * 3).reshape(height, width, 3).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(ramp).convert(mode).save(buffer, file_format)
    return buffer.getvalue()


def flat(width: int, height: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), (90, 120, 30)).save(buffer, "JPEG")
    return buffer.getvalue()


def flipped(data: bytes) -> bytes:
    broken = bytearray(data)
    for position in range(len(broken) // 2, len(broken) // 2 + 40):
        broken[position] ^= 0x55
    return bytes(broken)


def claiming(width: int, height: int) -> bytes:
    data = bytearray(picture(16, 16))
    frame = data.index(b"\xff\xc0")
    data[frame + 5 : frame + 9] = height.to_bytes(2, "big") + width.to_bytes(2, "big")
    return bytes(data)


def null_answer(pixels: UInt8Array) -> Array:
    """What the null engine makes of RGB bytes: the first values of the same pictures as FP32 pixels."""
    return normalise(pixels, JPEG.preprocessing).reshape(len(pixels), -1)[:, :512]


@pytest.fixture(params=["native", "triton"])
def null_server(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(f"{request.param}_null")


@pytest.fixture(params=["native", "triton"])
def real_server(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(f"real_{request.param}")


@pytest.fixture(scope="module")
def reference(artefact: Any, specification: ModelSpecification, pixels: UInt8Array) -> Array:
    """ONNX Runtime in this process on the FP32 pixels."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(artefact.path), providers=["CPUExecutionProvider"])
    (answer,) = session.run(None, {"pixel_values": normalise(pixels[:3], specification.preprocessing)})
    return answer


@pytest.mark.slow  # by default the null engine below sees what is decoded, and export/test_payload_files.py each file
def test_the_payloads_of_a_picture_have_the_same_answer(
    real_server: Any,
    photographs: list[bytes],
    pixels: UInt8Array,
    reference: Array,
    batch_of: Batch,
    specification: ModelSpecification,
) -> None:
    fp32 = real_server.infer("fp32", normalise(pixels[:3], specification.preprocessing)).embedding
    uint8 = real_server.infer("uint8", pixels[:3]).embedding
    jpeg = real_server.infer("jpeg", batch_of(*photographs[:3])).embedding
    assert fp32.shape == uint8.shape == jpeg.shape == (3, 512)
    for answer in (fp32, uint8, jpeg):
        assert row_cosines(reference, answer).min() >= 0.99999
    np.testing.assert_array_equal(jpeg, uint8)


def test_what_is_decoded_is_the_samples_uint8_bit_for_bit(
    null_server: Any, photographs: list[bytes], pixels: UInt8Array, batch_of: Batch
) -> None:
    """The null engine answers the first 512 values of the red channel; of all three tests/unit/models has the proof."""
    answer = null_server.infer("jpeg", batch_of(*photographs)).embedding
    np.testing.assert_array_equal(answer, null_answer(pixels))
    np.testing.assert_array_equal(answer, null_server.infer("uint8", pixels).embedding)
    np.testing.assert_array_equal(answer, null_server.infer("fp32", normalise(pixels, JPEG.preprocessing)).embedding)


def test_a_bare_jpeg_is_a_request(null_server: Any, photographs: list[bytes], pixels: UInt8Array) -> None:
    answer = null_server.infer_raw("jpeg", photographs[2])
    np.testing.assert_array_equal(answer.embedding, null_answer(pixels[2:3]))
    raw = null_server.infer_raw("uint8", pixels[3].tobytes())
    np.testing.assert_array_equal(raw.embedding, null_answer(pixels[3:4]))


BAD_IMAGES = {
    "empty": b"",
    "text": b"not a picture",
    "png": picture(40, 40, file_format="PNG"),
    "cmyk": picture(40, 40, "CMYK"),
    "truncated": (whole := picture(448, 448))[: len(whole) * 4 // 5],
    "flipped": flipped(whole),
    "claims 65500 squared": claiming(65500, 65500),
    "80 megapixels": flat(10_000, 8_000),
    "too narrow": flat(2, 30_000),
}


@pytest.mark.parametrize("case", BAD_IMAGES)
def test_a_bad_image_has_the_same_answer_on_both(
    case: str, native_null: Any, triton_null: Any, batch_of: Batch
) -> None:
    answers = [server.infer("jpeg", batch_of(BAD_IMAGES[case])) for server in (native_null, triton_null)]
    assert [answer.status for answer in answers] == [400, 400]
    assert answers[0].error == answers[1].error
    assert "image" in answers[0].error


def test_a_grey_picture_and_a_tiny_one_are_pictures(native_null: Any, triton_null: Any, batch_of: Batch) -> None:
    images = batch_of(picture(300, 200, "L"), picture(1, 1))
    first, second = (server.infer("jpeg", images).embedding for server in (native_null, triton_null))
    np.testing.assert_array_equal(first, second)


def test_a_bad_image_in_a_batch_is_named(native_null: Any, triton_null: Any, batch_of: Batch) -> None:
    images = batch_of(picture(30, 30), b"no", picture(30, 30))
    errors = {server.infer("jpeg", images).error for server in (native_null, triton_null)}
    assert errors == {"image 1: the image is not a JPEG that can be decoded"}


def test_a_bad_image_fails_its_own_request_alone(
    null_server: Any, photographs: list[bytes], pixels: UInt8Array, batch_of: Batch
) -> None:
    """Sent at once, so that the batcher merges them."""
    name = JPEG.name

    def executions() -> int:
        return int(json.loads(null_server.get(f"/v2/models/{name}/stats").body)["model_stats"][0]["execution_count"])

    bodies = [batch_of(photographs[index] if index % 3 else b"broken") for index in range(16)]
    before = executions()
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda body: null_server.infer("jpeg", body), bodies))
    for index, answer in enumerate(answers):
        if index % 3 == 0:
            assert answer.status == 400
        else:
            np.testing.assert_array_equal(answer.embedding, null_answer(pixels[index : index + 1]))
    assert executions() - before < 16, "nothing was merged: this test has seen nothing"


@again
def test_health_answers_while_large_images_are_decoded(native_null: Any, batch_of: Batch) -> None:
    images = batch_of(*[flat(6300, 6300)] * 4)
    done = threading.Event()
    took: list[float] = []

    def send() -> None:
        started = time.perf_counter()
        answer = native_null.infer("jpeg", images)
        took.append(time.perf_counter() - started)
        done.set()
        assert answer.status == 200

    thread = threading.Thread(target=send)
    thread.start()
    latencies = []
    while not done.wait(0.005):
        started = time.perf_counter()
        assert native_null.get("/v2/health/live").status == 200
        latencies.append(time.perf_counter() - started)
    thread.join()
    assert len(latencies) > 5
    assert statistics.median(latencies) < took[0] / 10
    assert max(latencies) < took[0] / 2, "on the event loop, one answer would have waited for all of it"


def test_decoding_has_a_stage_of_its_own(native_null: Any, batch_of: Batch) -> None:
    def stages() -> dict[str, Any]:
        document = json.loads(native_null.get(f"/v2/models/{JPEG.name}/stats").body)
        return document["model_stats"][0]["abserve_stages"]

    before = stages()
    native_null.infer("jpeg", batch_of(flat(6000, 6000)))
    after = stages()
    grown = {stage: after[stage]["ns"] - before[stage]["ns"] for stage in after}
    assert grown["decode"] > 0.5 * sum(grown.values())


def test_each_model_counts_for_itself(null_server: Any, photographs: list[bytes], pixels: UInt8Array) -> None:
    def counts() -> dict[str, int]:
        models = json.loads(null_server.get("/v2/models/stats").body)["model_stats"]
        return {model["name"]: model["inference_count"] for model in models}

    before = counts()
    null_server.infer("uint8", pixels[:3])
    null_server.infer_raw("jpeg", photographs[0])
    expected = {"openclip_vit_b32": 0, "openclip_vit_b32_uint8": 3, "openclip_vit_b32_jpeg": 1}
    deadline = time.monotonic() + 60
    while (grown := {name: count - before[name] for name, count in counts().items()}) != expected:
        assert time.monotonic() < deadline, grown  # Triton counts a request just after its answer has left
    for payload, model in (("fp32", "openclip_vit_b32"), ("uint8", UINT8.name), ("jpeg", JPEG.name)):
        document = json.loads(null_server.get(f"/v2/models/{model}").body)
        assert document["name"] == model
        wanted = {"name": JPEG.inputs[0].name, "datatype": "BYTES", "shape": [-1, 1]} if payload == "jpeg" else None
        assert wanted in (None, document["inputs"][0])
    assert null_server.get("/v2/models/openclip_vit_b32_png").status in (400, 404)


def test_native_backends_get_jpeg_through_an_ensemble(
    start_triton: Any, tmp_path: Path, photographs: list[bytes], pixels: UInt8Array, batch_of: Batch
) -> None:
    """The generated configs, with the python backend in the place of the one that needs a GPU."""

    def add_ensemble(models: Path) -> None:
        ensemble = f"{JPEG.name}_onnx"
        for name, config, code in (
            (preprocess_name(JPEG), preprocess_config(JPEG), preprocess_files(JPEG)["model.py"]),
            (ensemble, ensemble_config(JPEG, ensemble, UINT8.name), None),
        ):
            (models / name / "1").mkdir(parents=True)
            (models / name / "config.pbtxt").write_text(config)
            if code is not None:
                (models / name / "1" / "model.py").write_text(code)

    engine = {"engine": "null", "max_batch_size": 32}
    with start_triton(tmp_path, engine, [PlacedModel(UINT8)], add_ensemble) as server:
        model = f"{JPEG.name}_onnx"
        answer = server.infer("jpeg", batch_of(*photographs[:4]), model=model).embedding
        np.testing.assert_array_equal(answer, null_answer(pixels[:4]))
        refused = server.infer("jpeg", batch_of(BAD_IMAGES["truncated"]), model=model)
        assert refused.status == 400
        assert "the image is a truncated or corrupt JPEG" in refused.error
