"""The exporter over a GPU that exists only on paper, so that the dashboards' GPU queries have data."""

from __future__ import annotations

import signal
import threading
from dataclasses import replace
from time import monotonic_ns, time_ns

from scripted_reader import Fault, Phase, ScriptedReader  # type: ignore[import-not-found]

from servers.gpu.exporter import GpuExporter, GpuPolling
from servers.gpu.readings import Reading

DAY_NS = 86_400_000_000_000


class EveryQuantityReader(ScriptedReader):  # type: ignore[misc]
    """With the quantities that a real H200 gives beside those of the script."""

    def reading(self, index: int) -> Reading:
        """The script's reading and constants; throttled by its power limit for half of the time."""
        scripted = super().reading(index)
        constants = {
            "power_limit_watts": 700.0,
            "memory_total_bytes": 2.0**37,
            "temperature_celsius": 60.0,
            "graphics_clock_hertz": 1.98e9,
            "sm_clock_hertz": 1.98e9,
            "memory_clock_hertz": 3.2e9,
            "clock_event_reasons": 4.0,
            "software_power_cap_ns": monotonic_ns() / 2,
            "sm_active_ratio": 0.6,
            "tensor_active_ratio": 0.4,
            "dram_active_ratio": 0.3,
            "pcie_transmit_bytes": monotonic_ns() * 2,
            "pcie_receive_bytes": monotonic_ns() * 12,
        }
        return replace(scripted, values={**scripted.values, **constants})


def scripted_exporter(host: str, port: int) -> GpuExporter:
    """An exporter over a GPU that is busy for a day."""
    start_ns = monotonic_ns()
    reader = EveryQuantityReader(
        monotonic_ns,
        time_ns,
        [Phase(start_ns, start_ns + DAY_NS, busy=0.8, watts=600.0)],
        [Fault(start_ns, start_ns + DAY_NS, "ecc_errors", "NOT_SUPPORTED")],
    )
    return GpuExporter(GpuPolling(reader), host, port)


def main() -> None:
    """Until SIGTERM."""
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    exporter = scripted_exporter("0.0.0.0", 9445)
    ended.wait()
    exporter.close()


if __name__ == "__main__":
    main()
