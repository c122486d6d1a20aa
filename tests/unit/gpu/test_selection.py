"""Which GPUs the sampler reads on a machine with several: what CUDA_VISIBLE_DEVICES and `--gpu` name, and no other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from loadgen.findings.gpu.records import read_readings
from servers.gpu.readings import DeviceIdentity, matching, visible

Start = Callable[..., Any]
FOUR = tuple(DeviceIdentity(n, uuid) for n, uuid in enumerate(("GPU-0a-1", "GPU-1b-2", "GPU-2c-3", "GPU-2d-4")))
PARENTS = {"MIG-77": "GPU-1b-2"}


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (None, None),
        ("", ()),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("2", ("2",)),
        (" 3, 1", ("3", "1")),
        ("GPU-1b,MIG-77", ("GPU-1b", "MIG-77")),
        ("1,-1,2", ("1",)),
    ],
)
def test_what_the_variable_names(value: str | None, names: tuple[str, ...] | None) -> None:
    assert visible({} if value is None else {"CUDA_VISIBLE_DEVICES": value}) == names


@pytest.mark.parametrize(
    ("names", "indices"),
    [
        ((), []),
        (("2",), [2]),
        (("3", "1", "3"), [1, 3]),
        (("7",), []),
        (("GPU-1b-2",), [1]),
        (("GPU-1",), [1]),
        (("GPU-2",), []),  # the beginning of two
        (("MIG-77", "1"), [1]),
        (("MIG-GPU-2c-3/7/0",), [2]),
        (("MIG-unknown",), []),
    ],
)
def test_names_and_devices(names: Sequence[str], indices: list[int]) -> None:
    assert [device.index for device in matching(names, FOUR, PARENTS.get)] == indices


@pytest.mark.parametrize(
    ("options", "settings", "uuids"),
    [
        ((), {}, ["GPU-stub", "GPU-stub-1", "GPU-stub-2", "GPU-stub-3"]),
        ((), {"CUDA_VISIBLE_DEVICES": "2"}, ["GPU-stub-2"]),
        (("--gpu", "GPU-stub-3"), {"CUDA_VISIBLE_DEVICES": "2"}, ["GPU-stub-3"]),
        (("--gpu", "1", "--gpu", "3"), {}, ["GPU-stub-1", "GPU-stub-3"]),
        (("--gpu", "all"), {"CUDA_VISIBLE_DEVICES": "2"}, ["GPU-stub", "GPU-stub-1", "GPU-stub-2", "GPU-stub-3"]),
        ((), {"CUDA_VISIBLE_DEVICES": "MIG-stub-2", "STUB_MIG": "1"}, ["GPU-stub-2"]),
        # Another GPU that has fallen off the bus is no fault of the one that is read.
        (("--gpu", "GPU-stub-3"), {"STUB_BROKEN": "1"}, ["GPU-stub-3"]),
        (("--gpu", "GPU-elsewhere"), {}, []),
    ],
)
def test_the_sampler_reads_what_is_named_and_tells_how_many_there_are(
    start_sampler: Start, stub_library: Path, options: tuple[str, ...],
    settings: dict[str, str], uuids: list[str],
) -> None:  # fmt: skip
    sampler = start_sampler(stub_library, *options, STUB_COUNT="4", **settings)
    assert sampler.ready["status"] == "ok"
    sampler.command("edge x")
    assert sampler.stop() == 0
    readings = read_readings(sampler.path.parent, [sampler.path.name])
    (header,) = readings.headers
    assert [device.uuid for device in header.devices] == uuids
    assert list(readings.devices) == uuids
    assert {line["uuid"] for line in sampler.lines("reading")} == set(uuids)
    assert [device.uuid for device in readings.edges[-1].devices] == uuids
    assert readings.gpu_count == header.device_count == 4
    if not uuids:
        assert "4 GPUs" in str(header.error)
        assert "GPU-elsewhere" in str(header.error)


def test_the_named_gpu_is_lost(start_sampler: Start, stub_library: Path) -> None:
    sampler = start_sampler(stub_library, "--gpu", "GPU-stub-1", STUB_COUNT="4", STUB_BROKEN="1")
    assert sampler.ready["status"] == "gpu_lost"
