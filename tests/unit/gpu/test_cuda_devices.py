"""Which GPU a CUDA ordinal is, by a stub of the driver library that honours CUDA_VISIBLE_DEVICES as the driver does."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Evaluate = Callable[..., Any]
SOURCE = Path(__file__).with_name("cuda_stub.c")
CODE = """
import json, sys
from servers.gpu.cuda_library import device_uuid
assert "torch" not in sys.modules
print(json.dumps([device_uuid(ordinal) for ordinal in range(4)]))
"""
GPU = "GPU-0f1f2f3f-4f5f-6f7f-8f9f-afbfcfdfef0{}"


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    def compiled(*options: str) -> Path:
        compiler = shutil.which("cc")
        if compiler is None:
            pytest.skip("no C compiler (cc) to build the stub of libcuda.so.1")
        folder = tmp_path_factory.mktemp("cuda")
        command = [compiler, "-shared", "-fPIC", "-w", *options, "-o", str(folder / "libcuda.so.1"), str(SOURCE)]
        subprocess.run(command, check=True)
        return folder

    return compiled


@pytest.fixture(scope="session")
def library(build: Callable[..., Path]) -> Path:
    return build()


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [("0", [0]), ("3", [3]), ("2,0", [2, 0]), ("0,1,2,3", [0, 1, 2, 3]), ("", [])],
)
def test_ordinals_count_what_is_visible(evaluate: Evaluate, library: Path, visible: str, gpus: list[int]) -> None:
    found = evaluate(CODE, library, CUDA_VISIBLE_DEVICES=visible)
    assert found == [GPU.format(gpu) for gpu in gpus] + [None] * (4 - len(gpus))


def test_a_mig_instance_is_named_as_one(evaluate: Evaluate, library: Path) -> None:
    found = evaluate(CODE, library, CUDA_VISIBLE_DEVICES="1", STUB_CUDA_MIG="1")
    assert found[0] == GPU.format(1).replace("GPU-0f", "MIG-77")


@pytest.mark.parametrize("option", ["-DOLD", "-DNEW"])
def test_a_driver_with_one_version_of_the_call(evaluate: Evaluate, build: Callable[..., Path], option: str) -> None:
    assert evaluate(CODE, build(option), CUDA_VISIBLE_DEVICES="2")[0] == GPU.format(2)


def test_without_a_driver_nothing_is_told(evaluate: Evaluate, library: Path) -> None:
    assert evaluate(CODE, None) == [None] * 4
    assert evaluate(CODE, library, STUB_CUDA_INIT="999") == [None] * 4
