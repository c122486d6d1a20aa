"""How often a tensor is copied on its way to the engine."""

from __future__ import annotations

import numpy as np

from servers.engines.padding import Staging


def test_a_contiguous_aligned_request_is_passed_on_without_a_copy():
    array = np.zeros((2, 3), np.float32)
    request = {"x": array}
    assert Staging(4).gather([request]) is request


def test_several_requests_are_copied_into_memory_that_is_used_again():
    staging = Staging(4)
    parts = [{"x": np.full((rows, 3), rows, np.float32)} for rows in (1, 2)]
    first = staging.gather(parts)["x"]
    for _ in range(3):
        merged = staging.gather(parts)["x"]
        assert merged[:, 0].tolist() == [1, 2, 2]
        assert merged.ctypes.data == first.ctypes.data


def test_unaligned_and_strided_requests_are_made_fit():
    unaligned = np.frombuffer(bytearray(4 * 6 + 1), np.uint8)[1:].view(np.float32).reshape(2, 3)
    strided = np.arange(12, dtype=np.float32).reshape(2, 6)[:, ::2]
    for array in (unaligned, strided):
        fit = Staging(4).gather([{"x": array}])["x"]
        assert fit.flags.c_contiguous
        assert fit.flags.aligned
        np.testing.assert_array_equal(fit, array)


def test_variable_shapes_share_the_memory_of_the_largest():
    staging = Staging(2)
    merged = [staging.gather([{"x": np.full((1, width), width, np.float32)}] * 2)["x"] for width in (30, 1, 7, 29)]
    assert {array.ctypes.data for array in merged} == {merged[0].ctypes.data}
    assert merged[-1].tolist() == [[29] * 29] * 2


def test_the_engines_own_memory_is_used_where_it_fits():
    own = np.zeros((4, 3), np.float32)
    staging = Staging(4, engines={"x": own})
    merged = staging.gather([{"x": np.full((rows, 3), rows, np.float32)} for rows in (1, 2)])["x"]
    assert merged.ctypes.data == own.ctypes.data
    assert merged[:, 0].tolist() == [1, 2, 2]
    for misfit in ({"y": own}, {"x": own[:2]}, {"x": own[:, :2]}, {"x": own.astype(np.float16)}):
        ((name, memory),) = misfit.items()
        merged = Staging(4, engines={name: memory}).gather([{"x": np.ones((1, 3), np.float32)}] * 2)["x"]
        assert not np.shares_memory(merged, memory)
        assert merged.tolist() == np.ones((2, 3)).tolist()
