"""CUDA regions that are unregistered, held or lost while requests use them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from tests.integration.native.cuda_memory.conftest import IMAGE_BYTES, ROW_BYTES, images


def test_a_region_that_is_being_read_is_closed_afterwards(both, device, gpu_server):
    """Unregistering is answered when the copy has ended; meanwhile the event loop answers others."""
    data = images(1)
    both.register("r", device.allocate(data.nbytes, data))
    before_ns = gpu_server.model_stats()["inference_stats"]["compute_input"]["ns"]
    (device.folder / "hold-read").touch()
    with ThreadPoolExecutor(2) as pool:
        answer = pool.submit(both.apart, lambda front_end: front_end.infer(1, "r"))
        gpu_server.wait_until(lambda: (device.folder / "held").exists(), "it is being read")
        started_ns = (device.folder / "held").stat().st_mtime_ns
        unregistered = pool.submit(both.apart, lambda front_end: front_end.client.unregister_cuda_shared_memory("r"))
        gpu_server.wait_until(
            lambda: b'"r"' not in gpu_server.request("GET", "/v2/cudasharedmemory/status").body, "it is forgotten"
        )
        assert device.log() == ["open"]
        assert not unregistered.done()
        (device.folder / "hold-read").unlink()
        np.testing.assert_array_equal(answer.result(60).as_numpy("embedding"), data.reshape(1, -1)[:, :512])
        unregistered.result(60)
    assert device.log() == ["open", "close"]
    after_ns = gpu_server.model_stats()["inference_stats"]["compute_input"]["ns"]
    assert after_ns > before_ns  # a copy from the device is part of what the input took
    assert after_ns - before_ns <= (device.folder / "log").stat().st_mtime_ns - started_ns + 10**9
    with pytest.raises(InferenceServerException, match="'r' is not registered"):
        both.infer(1, "r")


def test_a_request_that_waits_when_its_region_is_unregistered_is_told_so(both, device, gpu_server):
    both.register("first", device.allocate(IMAGE_BYTES, images(1)))
    both.register("second", device.allocate(IMAGE_BYTES, images(1)))
    (device.folder / "hold-read").touch()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(both.apart, lambda front_end: front_end.infer(1, "first"))
        gpu_server.wait_until(lambda: (device.folder / "held").exists(), "the engine is busy")
        second = pool.submit(both.apart, lambda front_end: front_end.infer(1, "second"))
        gpu_server.wait_until(lambda: gpu_server.metric("abserve_native_pending_requests") == 1, "the second waits")
        both.client.unregister_cuda_shared_memory("second")  # nothing uses it yet: at once
        assert device.log() == ["open", "open", "close"]
        (device.folder / "hold-read").unlink()
        first.result(60)
        with pytest.raises(InferenceServerException, match="unregistered before its input was read"):
            second.result(60)


def test_outputs_are_written_beside_the_event_loop_and_not_after_the_region(both, device, gpu_server):
    data = images(1)
    both.register("r", device.allocate(ROW_BYTES))
    (device.folder / "hold-write").touch()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(both.apart, lambda front_end: front_end.send(data, ("r", ROW_BYTES)))
        gpu_server.wait_until(lambda: (device.folder / "held").exists(), "it is being written")
        assert gpu_server.status("/v2/health/ready") == 200
        assert not answer.done()
        (device.folder / "hold-write").unlink()
        answer.result(60)
    np.testing.assert_array_equal(device.allocations[0].read(1), data.reshape(1, -1)[:, :512])


def test_copies_that_fail_fail_their_request_and_not_the_server(both, device, gpu_server):
    data = images(1)
    both.register("r", device.allocate(IMAGE_BYTES, data))
    (device.folder / "lost").touch()
    with pytest.raises(
        InferenceServerException, match=r"cannot be read from GPU 0.*CUDA_ERROR_ILLEGAL_ADDRESS"
    ) as caught:
        both.infer(1, "r")
    assert caught.value.status() in ("400", "StatusCode.INVALID_ARGUMENT")
    with pytest.raises(InferenceServerException, match="cannot be written to region 'r' on GPU 0") as caught:
        both.send(data, ("r", ROW_BYTES))
    assert caught.value.status() in ("500", "StatusCode.INTERNAL")
    (device.folder / "lost").unlink()
    np.testing.assert_array_equal(both.infer(1, "r").as_numpy("embedding"), data.reshape(1, -1)[:, :512])
