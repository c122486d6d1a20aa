"""A machine with four GPUs, three of them busy with other people's work: the finding is about the arm's own alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from loadgen.findings.gpu.records import EvidenceRecord
from servers.gpu.readings import GpuReader
from tests.scripted_reader import Fault, ScriptedMachine, ScriptedReader

Run = Callable[..., EvidenceRecord]
OWN = "GPU-5c719ed0-0000-0000-0000-000000000000"
OTHERS = ("GPU-other-0", "GPU-other-1", "GPU-other-3")
STRANGERS = (900, 901)
DEAD = [Fault(0, 2**62, call, "UNKNOWN") for call in ("energy", "power", "utilization", "memory")]


def four(
    *, read: Sequence[str] | None = None, busy: float = 0.97, faults: Sequence[Fault] = ()
) -> Callable[[ScriptedReader, Any], GpuReader]:
    """The arm's GPU is number 2. `read`: those that the sampler reads; `faults`: of GPU 0."""

    def build(first_gpu: ScriptedReader, clock: Any) -> GpuReader:
        others = [
            ScriptedReader(
                clock.monotonic_ns, clock.wall_ns, (), faults if uuid == OTHERS[0] else (),
                idle_watts=650.0 if busy else 80.0, idle_busy=busy, pids=STRANGERS, uuid=uuid,
            )
            for uuid in OTHERS
        ]  # fmt: skip
        return ScriptedMachine([*others[:2], first_gpu, *others[2:]], read)

    return build


def telling(gpu_info: dict[str, Any], uuid: str | None) -> dict[str, Any]:
    return {"runtime": gpu_info["runtime"] | {"used_device_uuid": uuid}}


@pytest.mark.parametrize("read", [None, [OWN], ["2"]])
def test_other_peoples_work_changes_nothing(run: Run, plan: Any, read: Sequence[str] | None) -> None:
    alone, among = run(plan()), run(plan(machine=four(read=read)))
    assert among.finding == "GPU_VERIFIED"
    assert among == alone


def test_an_idle_gpu_among_busy_ones_is_idle(run: Run, plan: Any) -> None:
    record = run(plan(busy=0.0, watts=80.0, machine=four()))
    assert (record.finding, record.code, record.activity) == ("INCONCLUSIVE", "conflict", "idle")


def test_the_process_tells_where_the_server_does_not(run: Run, plan: Any, gpu_info: Any) -> None:
    record = run(plan(machine=four()), gpu_info=telling(gpu_info, None))
    assert (record.finding, record.uuid) == ("GPU_VERIFIED", OWN)


@pytest.mark.parametrize("read", [None, [OWN], [OTHERS[0]], []])
def test_nothing_tells_which_and_only_one_being_read_tells_nothing(
    run: Run, plan: Any, gpu_info: Any, read: Sequence[str] | None
) -> None:
    record = run(plan(pids=(), machine=four(read=read)), gpu_info=telling(gpu_info, None))
    assert (record.finding, record.code, record.uuid) == ("INCONCLUSIVE", "wrong_gpu", None)
    assert "several GPUs" in record.sentence


def test_a_server_on_several_gpus_is_not_verified_on_one(run: Run, plan: Any, gpu_info: Any) -> None:
    """Although its process is seen on one alone."""
    on_two = {"runtime": gpu_info["runtime"] | {"used_device_uuid": None, "device": "cuda:0,cuda:1"}}
    record = run(plan(machine=four()), gpu_info=on_two)
    assert (record.finding, record.code, record.uuid) == ("INCONCLUSIVE", "wrong_gpu", None)
    assert "uses more than one" in record.sentence


def test_another_gpu_was_read_than_the_server_uses(run: Run, plan: Any, gpu_info: Any) -> None:
    """Readings of the arm's GPU alone, and a server that says that it uses number 1."""
    record = run(plan(machine=four(read=[OWN])), gpu_info=telling(gpu_info, OTHERS[1]))
    assert (record.finding, record.code) == ("INCONCLUSIVE", "wrong_gpu")
    assert OTHERS[1] in record.sentence


def test_work_of_others_is_not_taken_for_the_servers(run: Run, plan: Any, gpu_info: Any) -> None:
    """A server that names GPU 0, where others have just begun to work, and has its process on another."""

    def build(first_gpu: ScriptedReader, clock: Any) -> GpuReader:
        busy = ScriptedReader(
            clock.monotonic_ns, clock.wall_ns, first_gpu._phases, pids=STRANGERS, uuid=OTHERS[0]
        )  # fmt: skip
        idle = ScriptedReader(clock.monotonic_ns, clock.wall_ns, pids=(4711,), uuid=OWN)
        return ScriptedMachine([busy, idle])

    record = run(plan(machine=build), gpu_info=telling(gpu_info, OTHERS[0]))
    assert (record.activity, record.inputs.attribution.foreign_pids) == ("active", STRANGERS)
    assert (record.finding, record.code) == ("INCONCLUSIVE", "unattributed")


def test_all_processes_are_ours_where_it_counts(run: Run, plan: Any) -> None:
    record = run(plan(pids=(4712,), machine=four()))
    assert (record.inputs.attribution.pid_resolved, record.inputs.attribution.exclusive) == (False, True)
    assert (record.finding, record.inputs.attribution.foreign_pids) == ("GPU_VERIFIED", ())


def test_another_gpu_that_cannot_be_read_makes_this_one_no_sicker(run: Run, plan: Any, gpu_info: Any) -> None:
    assert run(plan(machine=four(faults=DEAD))).finding == "GPU_VERIFIED"
    sick = run(plan(machine=four(faults=DEAD)), gpu_info=telling(gpu_info, OTHERS[0]))
    assert (sick.finding, sick.code) == ("INCONCLUSIVE", "nvml_unhealthy")


def test_another_gpu_that_falls_off_the_bus_costs_nothing_where_it_is_not_read(run: Run, plan: Any) -> None:
    lost = [Fault(0, 2**62, "*", "GPU_IS_LOST")]
    assert run(plan(machine=four(read=[OWN], faults=lost))).finding == "GPU_VERIFIED"


def test_the_control_looks_at_the_gpu_of_its_arm(run: Run, plan: Any, cpu_info: Any) -> None:
    """A server on the CPU names no GPU; that the arm's own stayed idle is what the control has to show."""
    slow = plan(busy=0.0, watts=80.0, pids=(), machine=four())
    control = run(slow, gpu_info=cpu_info, is_control=True, gpu_uuids=[OWN])
    assert (control.finding, control.activity, control.uuid) == ("CPU_FALLBACK", "idle", OWN)
    assert run(slow, gpu_info=cpu_info, is_control=True).activity is None


def test_a_mig_instance_is_not_the_gpu_that_it_is_of(run: Run, plan: Any, gpu_info: Any) -> None:
    record = run(plan(machine=four()), gpu_info=telling(gpu_info, "MIG-5c719ed0-1"))
    assert (record.finding, record.code) == ("INCONCLUSIVE", "wrong_gpu")
    assert "part of a GPU" in record.sentence


SECOND = "GPU-9-second"


def two(second: Callable[[ScriptedReader, Any], ScriptedReader] | None = None) -> Callable[[ScriptedReader, Any], Any]:
    """A machine with the arm's two GPUs, which do the same unless `second` says what the other one does."""

    def same(first: ScriptedReader, clock: Any) -> ScriptedReader:
        return ScriptedReader(clock.monotonic_ns, clock.wall_ns, first._phases, pids=(4711,), uuid=SECOND)

    return lambda first, clock: ScriptedMachine([first, (second or same)(first, clock)])


def on_both(gpu_info: dict[str, Any]) -> dict[str, Any]:
    told = {"device": "cuda:0,cuda:1", "used_device_uuid": None, "used_device_uuids": [SECOND, OWN]}
    return {"runtime": gpu_info["runtime"] | told}


def test_an_arm_on_two_gpus_is_verified_on_both_and_pays_for_both(run: Run, plan: Any, gpu_info: Any) -> None:
    alone, record = run(plan()), run(plan(machine=two()), gpu_info=on_both(gpu_info))
    assert (record.finding, record.activity, record.attributed) == ("GPU_VERIFIED", "active", True)
    assert record.uuid == f"{OWN},{SECOND}"
    assert [(each.finding, each.uuid) for each in record.gpus] == [("GPU_VERIFIED", OWN), ("GPU_VERIFIED", SECOND)]
    ours, one = record.inputs.gpu, alone.inputs.gpu
    assert ours is not None
    assert one is not None
    for name in ("joules_per_item", "excess_joules_per_item", "energy_joules", "idle_power_watts"):
        assert getattr(ours, name) == pytest.approx(2 * getattr(one, name), rel=0.01), name
    assert ours.utilisation_low == pytest.approx(one.utilisation_low, rel=0.01)
    each = [gpu.joules_per_item for part in record.gpus if (gpu := part.inputs.gpu) is not None]
    assert sum(joules or 0.0 for joules in each) == pytest.approx(ours.joules_per_item)


def test_an_arm_whose_second_gpu_idles_is_not_verified(run: Run, plan: Any, gpu_info: Any) -> None:
    def idle(_first: ScriptedReader, clock: Any) -> ScriptedReader:
        return ScriptedReader(clock.monotonic_ns, clock.wall_ns, pids=(4711,), uuid=SECOND)

    record = run(plan(machine=two(idle)), gpu_info=on_both(gpu_info))
    assert (record.finding, record.code, record.activity) == ("INCONCLUSIVE", "conflict", "idle")
    assert record.sentence.startswith(f"{SECOND}: ")
    assert [each.finding for each in record.gpus] == ["GPU_VERIFIED", "INCONCLUSIVE"]
    assert record.no_energy is not None


def test_another_process_on_one_of_two_gpus_spoils_both(run: Run, plan: Any, gpu_info: Any) -> None:
    def shared(first: ScriptedReader, clock: Any) -> ScriptedReader:
        return ScriptedReader(clock.monotonic_ns, clock.wall_ns, first._phases, pids=(4711, 900), uuid=SECOND)

    record = run(plan(machine=two(shared)), gpu_info=on_both(gpu_info))
    assert (record.finding, record.code, record.attributed) == ("INCONCLUSIVE", "unattributed", False)


def test_a_second_gpu_that_was_not_read_is_told(run: Run, plan: Any, gpu_info: Any) -> None:
    record = run(plan(), gpu_info=on_both(gpu_info))
    assert (record.finding, record.code) == ("INCONCLUSIVE", "wrong_gpu")
    assert record.inputs.gpu is None


def test_the_control_of_an_arm_on_two_gpus_shows_that_both_stay_idle(run: Run, plan: Any, cpu_info: Any) -> None:
    def idle(_first: ScriptedReader, clock: Any) -> ScriptedReader:
        return ScriptedReader(clock.monotonic_ns, clock.wall_ns, uuid=SECOND)

    def working(first: ScriptedReader, clock: Any) -> ScriptedReader:
        return ScriptedReader(clock.monotonic_ns, clock.wall_ns, [*busy_of(first)], uuid=SECOND)

    def busy_of(first: ScriptedReader) -> Sequence[Any]:
        return [replace(phase, busy=0.9, watts=600.0) for phase in first._phases]

    for second, activity in ((idle, "idle"), (working, "active")):
        slow = plan(busy=0.0, watts=80.0, pids=(), machine=two(second))
        control = run(slow, gpu_info=cpu_info, is_control=True, gpu_uuids=[OWN, SECOND])
        assert (control.finding, control.activity) == ("CPU_FALLBACK", activity)
        assert [each.activity for each in control.gpus] == ["idle", activity]
