"""The recording's schedule and clocks, on a fake clock and a scripted GPU."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from servers.gpu.readings import SampleBatch
from servers.gpu.sampler import INTERVALS_S, Recording
from tests.scripted_reader import Fault, Phase, ScriptedReader

S = 1_000_000_000
WALL = 1_700_000_000 * S


class World:
    """Time that passes when told to, and a recording in it."""

    def __init__(self, faults: Sequence[Fault] = (), reader: type[ScriptedReader] = ScriptedReader) -> None:
        self.now_ns = 100 * S
        self.offset_ns = WALL
        phases = [Phase(110 * S, 120 * S, 0.5, 300.0)]
        self.reader = reader(lambda: self.now_ns, lambda: self.now_ns + self.offset_ns, phases, faults)
        self.recording = Recording(self.reader, INTERVALS_S, lambda: self.now_ns, lambda: self.now_ns + self.offset_ns)
        self.lines: list[dict[str, Any]] = []

    def until(self, second: float) -> World:
        while self.recording.next_due_ns() <= second * S:
            self.now_ns = max(self.now_ns, self.recording.next_due_ns())
            self.lines += self.recording.tick()
        self.now_ns = int(second * S)
        return self

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["type"] == kind]

    def samples(self) -> list[tuple[int, float]]:
        return [tuple(pair) for line in self.of("samples") for pair in line["utilization"]]


def test_the_schedule() -> None:
    world = World().until(130)
    assert [line["at_ns"] for line in world.of("reading")] == [n * S for n in range(100, 131)]
    assert [line["at_ns"] for line in world.of("samples")] == [n * S for n in range(100, 131, 2)]
    assert [line["at_ns"] for line in world.of("edge")] == [n * S for n in range(110, 131, 10)]


def test_a_late_tick_reads_once_and_keeps_the_rhythm() -> None:
    world = World().until(103)
    world.now_ns = int(107.3 * S)
    world.until(109)
    assert [line["at_ns"] / S for line in world.of("reading")] == [100, 101, 102, 103, 107.3, 108, 109]


def test_samples_come_once_each_and_in_order_whatever_is_read_twice() -> None:
    world = World().until(130)
    samples = world.samples()
    ends = [at_ns for at_ns, _ in samples]
    assert ends == [n * S // 5 for n in range(ends[0] * 5 // S, 130 * 5 + 1)]
    assert ends[0] < 87 * S  # what the driver had kept from before
    assert {at_ns: share for at_ns, share in samples if at_ns in (110 * S, 115 * S, 121 * S)} == {
        110 * S: 0.0, 115 * S: 0.5, 121 * S: 0.0,
    }  # fmt: skip


def test_a_sampler_that_was_held_up_for_ten_seconds_loses_no_sample() -> None:
    world = World().until(104)
    world.now_ns = 114 * S
    world.until(120)
    ends = [at_ns for at_ns, _ in world.samples()]
    assert max(b - a for a, b in itertools.pairwise(ends)) == S // 5


@pytest.mark.parametrize("step_s", [3600, -3600])
def test_a_step_of_the_wall_clock_is_an_event_and_leaves_no_hole(step_s: int) -> None:
    """The driver stamps new samples with the stepped clock; ours go on."""

    class Kept(ScriptedReader):
        """Old samples keep their old stamps, as in a real ring buffer."""

        def samples(self, index: int, since_ns: int) -> SampleBatch:
            shift_ns = self._wall_ns() - self._clock_ns()
            stamped = [
                (at_ns if at_ns - shift_ns > 107 * S else at_ns - shift_ns + WALL, share)
                for at_ns, share in super().samples(index, 0).samples
            ]
            return SampleBatch(tuple(sorted(pair for pair in stamped if pair[0] > since_ns)))

    world = World(reader=Kept).until(107)
    world.offset_ns += step_s * S
    world.until(116)
    assert [line["event"] for line in world.of("event")] == ["clock_step"]
    ends = [at_ns for at_ns, _ in world.samples()]
    assert ends == sorted(set(ends))
    assert max(b - a for a, b in itertools.pairwise(ends)) <= 1.2 * S
    assert ends[-1] == 116 * S


def test_samples_on_the_monotonic_clock_and_on_one_of_their_own() -> None:
    class Monotonic(ScriptedReader):
        shift_ns = -WALL

        def samples(self, index: int, since_ns: int) -> SampleBatch:
            found = super().samples(index, since_ns - self.shift_ns if since_ns else 0)
            return SampleBatch(tuple((at_ns + self.shift_ns, share) for at_ns, share in found.samples))

    class Own(Monotonic):
        shift_ns = 10**18

    assert World(reader=Monotonic).until(120).samples() == World().until(120).samples()
    own = World(reader=Own).until(120).samples()
    assert own[-1][0] == 120 * S  # the newest one counts as of now


def test_a_failing_call_is_absent_and_named() -> None:
    world = World([Fault(105 * S, 107 * S, "energy", "UNKNOWN")]).until(110)
    failed = [line for line in world.of("reading") if "energy_joules" not in line]
    assert [line["at_ns"] // S for line in failed] == [105, 106]
    assert failed[0]["failed"] == {"energy": "UNKNOWN"}
    assert world.of("event") == []


def test_a_device_on_which_everything_fails_is_one_event_and_unhealthy() -> None:
    calls = ("energy", "power", "utilization", "memory")
    world = World([Fault(105 * S, 108 * S, call, "TIMEOUT") for call in calls]).until(107)
    assert [(line["event"], line["code"]) for line in world.of("event")] == [("nvml_error", "TIMEOUT")]
    assert world.recording.edge("x")[-1]["status"] == "error"
    world.until(110)
    assert world.recording.edge("y")[-1]["status"] == "ok"


def test_the_end_has_a_last_reading() -> None:
    world = World().until(100.5)
    last = world.recording.close()
    assert next(line["type"] for line in last) == "reading"
    assert last[0]["at_ns"] == int(100.5 * S)
