"""Every threshold of the verdict on where the work ran, in one place, each with its source.

They are stored with each verdict, so that an old verdict can be judged by the numbers it was reached with.
"""

from __future__ import annotations

from loadgen.records.run import Record


class Thresholds(Record, frozen=True, kw_only=True):
    """Starting points, to be calibrated per GPU; the ones marked "ours" have no outside source."""

    # Gates: below these the readings or the load carry no verdict.
    min_coverage: float = 0.9
    """Share of the load that utilisation samples and energy readings must cover. Ours: one lost drain of 2 s in 30 s
    is 0.93."""
    min_window_s: float = 30.0
    """MLPerf Power asks for 60 s; 30 s are 300 steps of an H200's energy counter (one every 100 ms)."""
    min_requests: int = 100
    """Ours: below it the rate of completed requests has no shape to compare with the GPU's activity."""
    max_error_share: float = 0.05
    """Ours: beyond it the load is not the one that was asked for."""
    min_gap_s: float = 4.0
    """Shortest usable idle gap before and after the load, without what is cut off. Ours: 20 utilisation samples."""
    gap_settle_s: float = 1.0
    """Cut from the start of each gap: a utilisation sample looks back up to 1 s (nvmlDeviceGetUtilizationRates)."""

    gap_margin_s: float = 0.5
    """Cut from the end of each gap: the driver's newest samples may end so long before it (200 ms on an H200)."""

    # Activity.
    active_utilisation_points: float = 5.0
    active_energy_share: float = 0.05
    idle_utilisation_points: float = 1.0
    idle_energy_share: float = 0.03
    """Of idle power times the window. Seen on an H200: 80 W idle, 690 W under full load."""
    sigmas: float = 3.0
    """Idle standard deviations (of 1 s bins) that a rise must exceed."""

    # Attribution.
    min_correlation: float = 0.6
    max_p_value: float = 0.01
    """Of the circular-shift test, whose smallest p is 1/bins: it needs more than 100 bins of 1 s."""
    bin_s: float = 1.0

    # Placement and the CPU witness.
    max_cpu_node_share: float = 0.01
    """CPU share of node time up to which an ONNX Runtime session counts as placed on the GPU: shape nodes."""
    max_partial_cpu_share: float = 0.10
    """CPU share up to which a partial placement may still be verified, with a note."""
    witness_cpu_share: float = 0.5
    """CPU seconds per request, as a share of the deliberate CPU run's, from which the CPU did the work."""
    witness_throughput_factor: float = 2.0
    """And throughput at most so many times the deliberate CPU run's."""

    # Reading the series.
    max_energy_bracket_s: float = 2.5
    """Longest distance between two readings across which energy and power are interpolated (the sampler reads at
    1 Hz, so one lost reading passes and two do not)."""
    max_sample_stretch: float = 1.5
    """A utilisation sample stands for at most so many of the driver's sample periods: lost samples leave a hole."""


DEFAULT_THRESHOLDS = Thresholds()
