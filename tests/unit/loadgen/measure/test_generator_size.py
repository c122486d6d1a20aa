"""How many processes the load generator gets, by what a pilot shows."""

from __future__ import annotations

from typing import cast

import msgspec
import pytest

from loadgen.client.messages import BlockOutcome
from loadgen.experiment.schedule import closed_loop
from loadgen.measure.context import RunContext, most_processes, pilot_loads, size_generator, used_share
from loadgen.measure.progress import RunProgress
from loadgen.records.machine import Calibration, CalibrationWorkload
from loadgen.records.run import Workload
from tests.integration.loadgen.conftest import make_experiment

CEILING_PER_S = 1000.0
MANY = closed_loop(32, 1, seconds=0.5, max_seconds=30.0)


def calibration() -> Calibration:
    workload = CalibrationWorkload(
        transport="http", payload="fp32", batch_size=1, payload_bytes=1, concurrency=16, requests_per_s=CEILING_PER_S,
        images_per_s=CEILING_PER_S, generator_cpu_share=1.0, sink_cpu_cores=None, cpu_us_per_request=1.0,
        limited_by="generator",
    )  # fmt: skip
    return Calibration(
        fingerprint="",
        made_at="",
        command="",
        host={},
        packages={},
        sink_processes=1,
        seconds=1.0,
        workloads=(workload,),
    )


def outcome(rate_per_s: float, cpu_share: float = 0.5) -> BlockOutcome:
    return BlockOutcome(
        window_start_ns=0, window_end_ns=10**9, requests=int(rate_per_s), errors=0, error_messages=(),
        cpu_ns=int(cpu_share * 1e9), reconnects=0, cut_reason=None, storage_error=None,
    )  # fmt: skip


def share(
    rate_per_s: float, load: Workload = MANY, *, known: bool = True, of: int = 1, cpu_share: float = 0.5
) -> float:
    calibrated = calibration() if known else None
    return used_share(outcome(rate_per_s, cpu_share), load, make_experiment(), calibrated, payload="fp32", of=of)


def test_the_ceiling_is_the_calibrated_one_or_what_its_own_cpu_time_allows() -> None:
    assert share(500) == pytest.approx(0.5)
    assert share(500, of=2) == pytest.approx(0.25)
    assert share(500, known=False, cpu_share=0.8) == pytest.approx(0.8)
    open_loop = msgspec.structs.replace(MANY, rate_per_s=100.0)
    assert share(500, open_loop) == pytest.approx(0.1), "no more than its rate is sent"
    assert share(900, closed_loop(1, 1, max_seconds=1.0)) == 0.0, "one user cannot be shared"
    assert share(0) == 0.0


def test_requests_of_the_cool_down_count_as_they_take_their_time() -> None:
    """The window includes the cool-down. Without its requests the arm looked a quarter slower than it is, and got too
    few processes."""
    cooled = msgspec.structs.replace(outcome(750), cool_down=250)
    assert used_share(cooled, MANY, make_experiment(), calibration(), payload="fp32", of=1) == pytest.approx(1.0)


@pytest.mark.parametrize(("cores", "users", "expected"), [(2, 64, 1), (3, 64, 1), (16, 64, 8), (16, 4, 4), (1, 1, 1)])
def test_the_servers_keep_half_the_cores_and_no_process_is_without_a_user(
    cores: int, users: int, expected: int
) -> None:
    assert most_processes([closed_loop(users, 1, max_seconds=1.0)], cores) == expected


def test_every_shape_of_the_load_is_tried_once() -> None:
    single, concurrent = make_experiment().workloads
    cold = msgspec.structs.replace(single, scenario="cold-start")
    loads = pilot_loads([cold, single, concurrent, msgspec.structs.replace(concurrent, seconds=9.0)])
    assert [(load.batch_size, load.concurrency) for load in loads] == [(1, 1), (1, 4)]


class Server:
    """Stands in for a run: an arm that answers so many requests per second, if as many can be sent."""

    def __init__(self, rate_per_s: float) -> None:
        self.experiment = make_experiment(workloads=(MANY,))
        self.rate_per_s = rate_per_s
        self.processes = 1
        self.generator = self
        self.progress = RunProgress()
        self.payload, self.name = "fp32", "native"
        self.arms = {"a": self}

    def load_runner(self, *, watched: bool) -> Server:
        assert not watched, "an idle gap of the GPU is not due"
        return self

    def unstored(self, _title: str, _label: str, _load: Workload) -> BlockOutcome:
        return outcome(min(self.rate_per_s, self.processes * CEILING_PER_S))

    def stop(self) -> None:
        self.processes = 0

    def start_generator(self, processes: int) -> None:
        assert self.processes == 0, "the earlier one was stopped"
        self.processes = processes

    def prepare_bodies(self, batch_sizes: list[int]) -> None:
        assert batch_sizes == [1]


@pytest.mark.parametrize(
    ("rate_per_s", "cores", "expected"), [(300, 64, 1), (900, 64, 3), (6000, 64, 15), (6000, 8, 4), (6000, 2, 1)]
)
def test_there_are_enough_for_the_fastest_arm_also_where_one_process_could_not_show_its_speed(
    monkeypatch: pytest.MonkeyPatch, rate_per_s: float, cores: int, expected: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    server = Server(rate_per_s)
    assert size_generator(cast("RunContext", server), calibration(), [1]) == expected
    assert server.processes == expected
