"""Every engine names the GPU that it executes on as NVML and torch do, whatever CUDA_VISIBLE_DEVICES leaves it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from servers.engines.factory import build_engine
from servers.engines.settings import EngineSettings
from servers.export.artefacts import ensure_artefact
from servers.export.manifest import executed_form
from servers.gpu.cuda_library import device_uuid
from servers.gpu.info import Runtime, gpu_info
from servers.models.registry import get_variant
from servers.models.weights import RandomWeights

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

WEIGHTS = RandomWeights(0)
ARTEFACTS = Path(__file__).resolve().parents[3] / ".artefacts"
CODE = """
import json, pynvml, torch
from servers.gpu.cuda_library import device_uuid
found = [device_uuid(n) for n in range(torch.cuda.device_count())]
torchs = [f"GPU-{torch.cuda.get_device_properties(n).uuid}" for n in range(torch.cuda.device_count())]
pynvml.nvmlInit()
nvmls = [pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(n)) for n in range(pynvml.nvmlDeviceGetCount())]
print(json.dumps([found, torchs, nvmls]))
"""


def uuids(**settings: str) -> tuple[list[str], list[str], list[str]]:
    """In a new process: ours, torch's, and NVML's of the whole machine."""
    kept = {name: value for name, value in os.environ.items() if name not in ("CUDA_VISIBLE_DEVICES",)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CODE], env=kept | settings, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    ours, torchs, nvmls = json.loads(done.stdout.splitlines()[-1])
    return ours, torchs, nvmls


def test_ours_torchs_and_nvmls_are_one() -> None:
    ours, torchs, nvmls = uuids(CUDA_DEVICE_ORDER="PCI_BUS_ID")
    assert ours == torchs == nvmls


def test_the_order_of_what_is_visible_is_followed() -> None:
    _, _, nvmls = uuids()
    if len(nvmls) < 2:
        pytest.skip("takes two GPUs")
    for visible in ("1", "1,0", nvmls[1]):
        ours, torchs, _ = uuids(CUDA_VISIBLE_DEVICES=visible, CUDA_DEVICE_ORDER="PCI_BUS_ID")
        expected = [nvmls[1]] if "," not in visible else [nvmls[1], nvmls[0]]
        assert ours == torchs == expected


@pytest.mark.parametrize("kind", ["torch", "onnxruntime"])
def test_the_engines_tell_it(kind: str) -> None:
    """The last GPU that is visible: with several, one that is neither the first nor the default."""
    ordinal = torch.cuda.device_count() - 1
    expected = f"GPU-{torch.cuda.get_device_properties(ordinal).uuid}"
    specification = get_variant("openclip_vit_b32", "fp32")
    path = None
    if kind == "onnxruntime":
        ort = pytest.importorskip("onnxruntime")
        if "CUDAExecutionProvider" not in ort.get_available_providers():
            pytest.skip("this onnxruntime has no CUDA provider")
        path = ensure_artefact(specification, WEIGHTS, ARTEFACTS, form=executed_form(kind, "fp32")).path
    engine = build_engine(
        specification, WEIGHTS, EngineSettings(kind, "fp32", "auto", f"cuda:{ordinal}", 0, 2), path
    )  # fmt: skip
    engine.load()
    try:
        seen = engine.describe()
    finally:
        engine.close()
    assert seen.details["device_uuid"] == device_uuid(ordinal) == expected
    document = gpu_info(Runtime(kind, seen.version, seen.device, seen.details))
    runtime, devices = document["runtime"], document["devices"]
    assert isinstance(runtime, dict)
    assert isinstance(devices, list)
    assert runtime["used_device_uuid"] == expected
    assert expected in {device["uuid"] for device in devices}
