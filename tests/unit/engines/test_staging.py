"""How often a tensor is copied on its way to the engine."""

from __future__ import annotations

import numpy as np

from servers.engines.padding import Staging


def test_a_contiguous_aligned_request_is_passed_on_without_a_copy():
    array = np.zeros((2, 3), np.float32)
    request = {"x": array}
    assert Staging().gather([request]) is request


def test_several_requests_are_copied_into_memory_that_is_used_again():
    staging = Staging()
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
        fit = Staging().gather([{"x": array}])["x"]
        assert fit.flags.c_contiguous
        assert fit.flags.aligned
        np.testing.assert_array_equal(fit, array)


def test_variable_shapes_share_the_memory_of_the_largest():
    staging = Staging()
    merged = [staging.gather([{"x": np.full((1, width), width, np.float32)}] * 2)["x"] for width in (30, 1, 7, 29)]
    assert {array.ctypes.data for array in merged} == {merged[0].ctypes.data}
    assert merged[-1].tolist() == [[29] * 29] * 2
