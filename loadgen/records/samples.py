"""One request is one sample; one block's samples are one `.npy` file, appended to while the block runs.

The file is written as `NAME.npy.part` and renamed when the block ends, so a name without `.part` is always whole.
A `.part` file that a killed run left behind is readable: its records are fixed-size and flushed every second.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

NS_PER_MS = 1e6
NS_PER_S = 1e9

SAMPLE_DTYPE = np.dtype(
    [
        ("intended_ns", "<i8"),  # when the schedule wanted it sent; in a closed loop equal to send_ns
        ("send_ns", "<i8"),  # just before the first byte went out
        ("first_byte_ns", "<i8"),  # first byte of the answer read; 0 where there was no answer
        ("end_ns", "<i8"),  # last byte of the answer read, or the failure noticed
        ("request_bytes", "<i8"),  # on the wire, headers included
        ("response_bytes", "<i8"),  # on the wire, headers included
        ("batch", "<i4"),  # items in the request
        ("user", "<i4"),  # which concurrent user sent it
        ("body", "<i4"),  # which prepared body was sent
        ("status", "<i2"),  # HTTP status, or gRPC status + 1000; 0 where there was no answer
        ("error", "<i2"),  # index into the block record's `error_messages`, -1 for a good answer
    ]
)
"""All times are `time.perf_counter_ns()` of the generator's process."""

Samples = npt.NDArray[np.void]


def good(samples: Samples) -> Samples:
    """Those that were answered without an error."""
    return samples[samples["error"] < 0]


def latencies_ms(samples: Samples) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """From the intended start to the last byte, of the given samples."""
    return np.asarray((samples["end_ns"] - samples["intended_ns"]) / NS_PER_MS, dtype=np.float64)
