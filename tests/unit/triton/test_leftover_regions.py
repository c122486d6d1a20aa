"""Regions are large enough, and those of killed servers go, those of living ones stay."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from servers.models.registry import get_specification
from servers.models.specification import ModelSpecification
from servers.triton import leftovers
from servers.triton.errors import TritonUnavailableError


def test_two_largest_batches_fit(specification: ModelSpecification) -> None:
    item_bytes = 4 * (3 * 224 * 224 + 512)
    size = leftovers.region_bytes(specification, 32)
    assert 2 * 32 * item_bytes < size < 2 * 32 * item_bytes + 18 * 2**20
    assert size % 2**20 == 0
    assert size < 64 * 2**20, "Docker's default /dev/shm has 64 MiB"


def test_an_axis_counts_with_its_largest_size() -> None:
    bert = get_specification("transformers:distilbert-base-uncased")
    assert leftovers.region_bytes(bert, 8) > 2 * 8 * 512 * (2 * 8 + 768 * 4)


def test_too_little_space_is_said_before_a_bus_error_says_it() -> None:
    with pytest.raises(TritonUnavailableError, match="--shm-size"):
        leftovers.assert_space(1 << 60)
    leftovers.assert_space(1)


@pytest.fixture
def prefix() -> Iterator[str]:
    prefix = leftovers.new_prefix()
    yield prefix
    leftovers.remove_regions(prefix)


def backdate(region: Path) -> None:
    then = time.time() - 2 * leftovers.YOUNG_REGION_SECONDS
    os.utime(region, (then, then))


def test_only_abandoned_regions_are_removed(prefix: str) -> None:
    region = leftovers.SHARED_MEMORY / f"{prefix}01234567-89ab"
    region.write_bytes(b"x")
    command = "import sys; print('up', flush=True); sys.stdin.read()"
    argument = f"--backend-config=python,shm-region-prefix-name={prefix}"
    with subprocess.Popen(
        [sys.executable, "-c", command, argument], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"up\n"
        backdate(region)
        leftovers.remove_abandoned_regions()
        assert region.exists()
        server.communicate(b"")
    region.touch()
    leftovers.remove_abandoned_regions()
    assert region.exists(), "a young one may belong to a server in a container"
    backdate(region)
    leftovers.remove_abandoned_regions()
    assert not region.exists()
