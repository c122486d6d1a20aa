"""`abserve doctor` about containers, with the answers of engines that are not here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from servers.commands import doctor as module
from servers.commands.doctor import docker_checks
from servers.options.launch import MachineCheck

H200: Mapping[str, Any] = {"status": "ok", "devices": [{"name": "H200"}], "nvml": {"driver_version": "580.95.05"}}
NO_GPU: Mapping[str, Any] = {"status": "no_library", "devices": []}


class Machine:
    """Answers the commands that the doctor runs."""

    def __init__(self, *, compose: str | None = "2.40.3", images: Mapping[str, datetime] = {}, **info: Any) -> None:
        self._info = {"ServerVersion": "28.2.2", **info}
        self._compose = compose
        self._images = images

    def __call__(self, command: Sequence[str]) -> str | None:
        if command[1] == "info":
            return json.dumps(self._info)
        if command[1] == "compose":
            return self._compose
        created = self._images.get(command[-1])
        return None if created is None else f"{created:%Y-%m-%dT%H:%M:%S}.123456789Z\n"


def named(found: list[MachineCheck]) -> dict[str, MachineCheck]:
    assert all(finding.ok or finding.remedy for finding in found)
    return {finding.name: finding for finding in found}


def test_a_good_gpu_box() -> None:
    found = named(docker_checks(H200, Machine(Runtimes={"runc": {}, "nvidia": {}})))
    assert set(found) == {"driver", "docker", "docker compose", "container toolkit"}
    assert all(finding.ok for finding in found.values())


@pytest.mark.parametrize(
    ("gpu", "machine", "name"),
    [
        ({**H200, "nvml": {"driver_version": "570.1"}}, Machine(Runtimes={"nvidia": {}}), "driver"),
        ({**H200, "nvml": {}}, Machine(Runtimes={"nvidia": {}}), "driver"),
        (H200, Machine(Runtimes={"runc": {}}), "container toolkit"),
        (NO_GPU, Machine(compose="2.19.1"), "docker compose"),
        (NO_GPU, Machine(compose=None), "docker compose"),
    ],
)
def test_what_is_missing_is_named(gpu: Mapping[str, Any], machine: Machine, name: str) -> None:
    found = named(docker_checks(gpu, machine))
    assert [finding.name for finding in found.values() if not finding.ok] == [name]


def test_devices_by_cdi_are_as_good() -> None:
    machine = Machine(Runtimes={"runc": {}}, DiscoveredDevices=[{"Source": "cdi", "ID": "nvidia.com/gpu=0"}])
    assert named(docker_checks(H200, machine))["container toolkit"].ok


@pytest.mark.parametrize(("inside", "told"), [(False, "abserve compare"), (True, "this is a container")])
def test_a_box_without_docker_lacks_nothing(inside: bool, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("servers.commands.doctor.in_container", lambda: inside)
    (finding,) = docker_checks(NO_GPU, lambda _: None)
    assert not finding.fails
    assert told in f"{finding.detail} {finding.remedy}"


def test_images_older_than_the_code_or_than_a_season(monkeypatch: pytest.MonkeyPatch) -> None:
    now = datetime.now(UTC)
    monkeypatch.setattr(module, "_newest_source", lambda: now - timedelta(days=200))
    ages = {module.IMAGES[0]: now - timedelta(days=100), module.IMAGES[1]: now - timedelta(days=300)}
    found = named(docker_checks(NO_GPU, Machine(images=ages)))
    assert "100 days" in found[module.IMAGES[0]].detail
    assert found[module.IMAGES[1]].remedy == "docker compose build"
    fresh = named(docker_checks(NO_GPU, Machine(images={module.IMAGES[0]: now})))
    assert fresh[module.IMAGES[0]].ok
    assert module.IMAGES[1] not in fresh


@pytest.mark.parametrize("compared", [True, False], ids=["checkout", "wheel"])
def test_an_image_is_compared_only_with_code_that_is_here(monkeypatch: pytest.MonkeyPatch, compared: bool) -> None:
    now = datetime.now(UTC)
    monkeypatch.setattr(module, "_newest_source", lambda: now - timedelta(days=9) if compared else None)
    image = named(docker_checks(NO_GPU, Machine(images={module.IMAGES[0]: now})))[module.IMAGES[0]]
    assert image.ok
    assert ("newer than the code" in image.detail) is compared
