"""The engine process of a matrix without an engine's library: checks, references, resources, and the protocol."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from loadgen.engines import plan as plan_of
from loadgen.engines.worker_process import Ready
from loadgen.records.matrix import Measured
from servers.engines.factory import ENGINES_PYTHON
from servers.engines.interface import PLANS_FOLDER, EngineError
from servers.engines.null import NullEngine
from servers.engines.onnxruntime import OnnxRuntimeEngine
from servers.engines.settings import EngineSettings, resolved_device
from servers.engines.torch.engine import TorchEngine
from servers.gpu.readings import EdgeReading, GpuProcess
from servers.measuring.measurement import (
    MIN_REPEATS_PER_ROUND,
    STORED_ITEMS,
    EngineTimes,
    MeasuredEngine,
    Reference,
    stored_references,
)
from servers.measuring.request import (
    MeasurementRequest,
    RequestCheck,
    WorkerCommand,
    checked,
    offers,
)
from servers.measuring.resources import Resources, joules_of, peak_rss_bytes, rapl_counter
from servers.measuring.worker import measured_cell, private_compile_cache
from servers.models.registry import get_specification
from servers.models.weights import RandomWeights
from servers.protocol.tensors import Array
from tests.again import again

TEXT = "transformers:bert-base-uncased"
IMAGE = "torchvision:resnet50"
WORKER = [sys.executable, "-P", "-m", "servers.measuring.worker"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3])}


def request(**changes: Any) -> MeasurementRequest:
    return MeasurementRequest(**{"model": IMAGE, "engine": "torch", "batches": (1, 4), "device": "cpu", **changes})


def test_what_can_be_measured_is_resolved() -> None:
    check = checked(request())
    assert (check.reason, check.mode, check.precision, check.device) == (None, "tuned", "fp32", "cpu")
    assert check.threads == len(os.sched_getaffinity(0))
    assert check.lengths == (None,)
    check = checked(request(model=TEXT, engine="onnxruntime", threads=3))
    assert (check.mode, check.threads, check.lengths) == ("session", 3, (128,))


@pytest.mark.parametrize(
    ("changes", "reason", "wrong"),
    [
        ({"engine": "tensorrt"}, "the tensorrt engine does not run on cpu; use --device cuda", False),
        ({"precision": "bf16"}, "does not offer precision bf16 on cpu", False),
        ({"mode": "graph"}, "does not offer mode graph on cpu", False),
        ({"mode": "session"}, "the torch engine has no mode 'session'", False),
        ({"model": TEXT, "lengths": (600,)}, "sequence 600: bert_base_uncased takes at most 512; leave it out", False),
        ({"device": "cuda:0"}, "this machine has no NVIDIA GPU", False),
        ({"engine": "aotinductor", "device": "cuda:0"}, "the aotinductor engine does not run on cuda", False),
        ({"model": TEXT, "engine": "onnxruntime-jax"}, "cannot be exported through JAX: only its batch could", False),
        ({"model": "torchvision:resnet55"}, "resnet50", True),
        ({"weights": "random:x"}, "the seed must be a whole number", True),
    ],
)
def test_what_cannot_be_measured_is_refused_with_the_reason(
    changes: dict[str, Any], reason: str, wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("servers.engines.settings.nvidia_device_present", lambda: False)
    check = checked(request(**changes))
    assert reason in str(check.reason)
    assert check.wrong is wrong


def test_a_missing_library_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("servers.engines.factory.find_spec", lambda _: None)
    monkeypatch.setenv(ENGINES_PYTHON, "none")
    assert "the torch engine needs torch, which is not installed; run: pip install" in str(checked(request()).reason)


@pytest.mark.skipif(find_spec("jax") is not None, reason="JAX is installed in this environment")
def test_the_worker_of_a_generating_engine_continues_where_its_libraries_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    generating = request(model="language:tiny", engine="jax")
    monkeypatch.setenv(ENGINES_PYTHON, "none")
    assert "the jax engine needs jax, which is not installed; run:" in str(checked(generating).reason)
    other = tmp_path / "python"
    other.write_text('#!/bin/sh\ncase "$*" in *find_spec*) exit 0;; esac\necho here: "$@"\n')
    other.chmod(0o755)
    monkeypatch.setenv(ENGINES_PYTHON, str(other))
    assert checked(generating).reason is None
    text = msgspec.json.encode(generating).decode()
    environment = {**ENVIRONMENT, ENGINES_PYTHON: str(other)}
    done = subprocess.run([*WORKER, text], capture_output=True, text=True, timeout=60, check=True, env=environment)
    assert done.stdout == f"here: -P -m servers.measuring.worker {text}\n"


def test_lengths_that_are_too_long_leave_the_others() -> None:
    check = checked(request(model=TEXT, lengths=(64, 600, 64)))
    assert (check.reason, check.lengths) == (None, (64,))
    assert "sequence 600" in str(check.too_long)


def test_on_a_gpu_a_model_without_fixed_shapes_has_another_mode(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("servers.engines.settings.nvidia_device_present", lambda: True)
    monkeypatch.setattr("servers.measuring.request.environment_of", lambda _: None)
    assert resolved_device("auto") == resolved_device("cuda") == "cuda:0"
    assert checked(request(device="auto")).mode == "graph"
    assert checked(request(device="auto")).precision == "fp16"
    assert checked(request(device="auto")).threads is None
    monkeypatch.setattr("servers.engines.batches.has_buckets", lambda _: False)
    assert checked(request(device="auto")).mode == "eager"
    assert checked(request(device="auto", engine="onnxruntime")).mode == "session"
    assert "use mode eager" in str(checked(request(device="auto", mode="graph")).reason)
    assert "use the engine torch or onnxruntime" in str(checked(request(device="auto", engine="tensorrt")).reason)


def test_offers_are_what_the_load_generator_reads() -> None:
    offered = msgspec.convert(json.loads(msgspec.json.encode(offers("cpu"))), plan_of.Offers)
    assert offered.modes["torch"]["cpu"] == ("tuned", "eager", "traced")
    assert offered.device == "cpu"
    with pytest.raises(EngineError, match="unknown device 'gpu'; use auto, cpu or cuda:N"):
        offers("gpu")


def cell_of(engine: NullEngine, inputs: Mapping[str, Array]) -> tuple[dict[str, Any], EngineTimes]:
    """One item, measured for no longer than it must be."""
    measured = MeasuredEngine(engine, get_specification(IMAGE), [1])
    return measured_cell(measured, Reference(inputs, None), WorkerCommand(batch=1, seconds=0.0), Resources("cpu"))


def test_both_sides_name_the_same_fields() -> None:
    assert set(RequestCheck.__struct_fields__) == set(plan_of.CombinationCheck.__struct_fields__)
    specification = get_specification(IMAGE)
    inputs = {"pixel_values": np.zeros((1, 3, 224, 224), np.float32)}
    cell, _ = cell_of(NullEngine(specification, EngineSettings(kind="null")), inputs)
    assert set(cell) == set(Measured.__struct_fields__) - {"kernels", "generated"}
    measured = msgspec.convert(json.loads(msgspec.json.encode(cell)), Measured)
    assert measured.fault == "the null engine computes no model"
    assert set(Ready.__struct_fields__) == {"import_seconds", "load_seconds", "conversions", "description", "item"}


@pytest.mark.parametrize(("slow_calls", "timed"), [(1, MIN_REPEATS_PER_ROUND), (9, 1)])
@again
def test_a_first_call_that_compiles_does_not_make_a_batch_slow(
    slow_calls: int, timed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("servers.measuring.measurement.SLOW_SECONDS", 0.05)
    made: list[None] = []

    class Compiles(NullEngine):
        def infer(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
            made.append(None)
            time.sleep(0.1 if len(made) <= slow_calls else 0.0)
            return super().infer(inputs)

    specification = get_specification(IMAGE)
    inputs = {"pixel_values": np.zeros((1, 3, 224, 224), np.float32)}
    cell, _ = cell_of(Compiles(specification, EngineSettings(kind="null")), inputs)
    assert len(cell["calls_ns"]) == timed
    assert cell["first_call_ns"] > 0.1e9


def test_a_process_compiles_into_a_folder_of_its_own_unless_the_user_has_chosen_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "chosen")
    with private_compile_cache():
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "chosen"
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.delenv(PLANS_FOLDER)
    with private_compile_cache():
        folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        assert list(folder.iterdir()) == []
        assert folder in Path(os.environ[PLANS_FOLDER]).parents
    assert not folder.exists()
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.delenv(PLANS_FOLDER)


@pytest.mark.parametrize("checks", [["--check"], ["--offers", "cpu"]])
def test_a_check_imports_no_library_of_an_engine(checks: list[str]) -> None:
    program = (
        "import runpy, sys\nsys.argv = ['worker', *sys.argv[1:]]\n"
        "try: runpy.run_module('servers.measuring.worker', run_name='__main__')\n"
        "except SystemExit as end: code = end.code\n"
        "assert code == 0 and not {'torch', 'onnxruntime', 'transformers'} & set(sys.modules)\n"
    )
    asked = json.dumps([msgspec.to_builtins(request(model="open_clip:ViT-B-32"))])
    done = subprocess.run(
        [sys.executable, "-c", program, *checks], input=asked, capture_output=True, text=True, env=ENVIRONMENT
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)


def test_a_request_that_cannot_be_read_is_an_error_in_one_line() -> None:
    for arguments, status in (([], 2), (["{"], 1), (['{"model": 1}'], 1), (["--offers", "gpu"], 1)):
        done = subprocess.run([*WORKER, *arguments], capture_output=True, text=True, env=ENVIRONMENT)
        assert done.returncode == status
        assert list(json.loads(done.stdout)) == ["error"]
        assert done.stdout.count("\n") == 1


# The model's own answers


def test_references_are_made_once_and_only_those_of_this_model_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[object] = []

    def references_of(*given: Any) -> list[Reference]:
        made.append(given)
        x = np.arange(STORED_ITEMS * 2, dtype=np.float32).reshape(STORED_ITEMS, 2)
        return [Reference({"a/b": x}, {"y": x * n}, 7 if n else None, sizes) for n, sizes in enumerate(given[2])]

    monkeypatch.setattr("servers.measuring.measurement.references_of", references_of)
    specification, path = get_specification(TEXT), tmp_path / "folder" / "r.npz"
    sizes: list[Mapping[str, int]] = [{"sequence": 8}, {"sequence": 16}]
    first = stored_references(specification, RandomWeights(0), sizes, path)
    second = stored_references(specification, RandomWeights(0), sizes, path)
    assert len(made) == 1
    for reference, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(reference.inputs["a/b"], other.inputs["a/b"])
        assert reference.answers is not None
        assert other.answers is not None
        np.testing.assert_array_equal(reference.answers["y"], other.answers["y"])
        assert (reference.flops_per_item, reference.sizes) == (other.flops_per_item, other.sizes)
    stored_references(specification, RandomWeights(1), sizes, path)
    stored_references(specification, RandomWeights(1), sizes[:1], path)
    assert len(made) == 3
    path.write_bytes(b"PK broken")
    stored_references(specification, RandomWeights(1), sizes[:1], path)
    assert len(made) == 4
    assert [each_path.name for each_path in path.parent.iterdir()] == ["r.npz"]


# Resources


def test_energy_is_read_from_one_step_of_the_counter_to_another() -> None:
    """The counter steps by 10 J every fourth run; the runs before its first step are not counted."""
    runs: list[None] = []

    def read() -> float:
        return 1000.0 + len(runs) // 4 * 10

    runs.append(None)
    energy = joules_of(read, lambda: runs.append(None), 0.0)
    assert energy is not None
    joules, runs_of_them, seconds_per_run = energy
    assert joules / runs_of_them == 10 / 4
    assert seconds_per_run > 0


@pytest.mark.parametrize("readings", [[None], [5.0, 5.0], [5.0, 6.0, None]])
def test_energy_that_cannot_be_read_is_none(readings: list[float | None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("servers.measuring.resources.EDGE_SECONDS", 0.0)
    left = list(readings)
    assert joules_of(lambda: left.pop(0) if len(left) > 1 else left[0], lambda: None, 0.0) is None


def test_the_counters_of_all_packages_are_added_and_wrap(tmp_path: Path) -> None:
    for number, largest in enumerate((1000, 5000)):
        package = tmp_path / f"intel-rapl:{number}"
        package.mkdir()
        (package / "max_energy_range_uj").write_text(f"{largest}\n")
        (package / "energy_uj").write_text("900\n")
    (tmp_path / "intel-rapl:0:0").mkdir()  # a part of the package, which must not count twice
    joules = rapl_counter(tmp_path)
    assert joules() == 0.0
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("100\n")
    (tmp_path / "intel-rapl:1" / "energy_uj").write_text("950\n")
    assert joules() == pytest.approx(250e-6)
    (tmp_path / "intel-rapl:1" / "energy_uj").unlink()
    assert joules() is None
    assert rapl_counter(tmp_path / "none")() is None


def test_memory_of_the_host_is_known_and_that_of_a_device_that_is_not_used_is_not() -> None:
    resources = Resources("cpu")
    resources.begin()
    memory = resources.memory()
    assert memory["rss_bytes"] == pytest.approx(peak_rss_bytes(), rel=0.1)
    assert (memory["allocated_bytes"], memory["reserved_bytes"], memory["process_device_bytes"]) == (None, None, None)
    resources.close()
    assert peak_rss_bytes(Path("/no/such/file")) is None


class ScriptedReader:
    """The processes on a GPU, before this one and with it."""

    def __init__(self, processes: list[dict[int, int]]) -> None:
        self._left = processes

    def connect(self) -> Any:
        return type("Connection", (), {"devices": (type("Device", (), {"index": 3}),)})

    def edge(self, index: int) -> EdgeReading:
        assert index == 3
        return EdgeReading(processes=tuple(GpuProcess(*process) for process in self._left.pop(0).items()))

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        ({7: 100, os.getpid(): 200}, 200),
        ({7: 100, 12345: 300}, 300),  # a container, whose process IDs the driver does not know
        ({7: 100, 8: 1, 9: 2}, None),
        ({7: 100}, None),
    ],
)
def test_the_memory_of_this_process_on_a_gpu(
    after: dict[int, int], expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("servers.measuring.resources.device_uuid", lambda _: "GPU-1")
    monkeypatch.setattr("servers.gpu.nvml.NvmlReader", lambda _: ScriptedReader([{7: 100}, after]))
    assert Resources("cuda:0").memory()["process_device_bytes"] == expected


# Buckets


def test_engines_prepare_only_the_sizes_that_were_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The graphs themselves need a GPU."""
    seen: dict[str, object] = {}

    def graphs(session: object, specification: object, device: object, buckets: object, *_: object) -> None:
        seen["onnxruntime"] = buckets

    monkeypatch.setattr("servers.engines.onnxruntime.GraphExecution", graphs)
    specification = get_specification(TEXT)
    settings = EngineSettings(device="cpu", max_batch_size=32, buckets=(1, 32), pad_to=(64,))
    OnnxRuntimeEngine(specification, settings)._captured(None, 0)

    class Tower:
        build, parameters = None, ()

    class Recording(TorchEngine):
        _mode = "graph"

        def _start(self, build: object, rows: object, *_: object, **__: object) -> None:
            seen["torch"] = rows

        def _check(self, *_: object) -> None:
            pass

    monkeypatch.setattr("servers.engines.torch.engine.fast_form", lambda *_, **__: Tower)
    monkeypatch.setattr("servers.engines.torch.engine.expected_answers", lambda *_: {"y": np.zeros((1, 1), np.float32)})
    monkeypatch.setattr("servers.engines.torch.engine.executed_module", lambda _, module: module)
    Recording(specification, settings)._prepare(torch.nn.Linear(1, 1), torch.device("cpu"), torch.float32)
    assert seen == {"onnxruntime": (1, 32), "torch": (1, 32)}
    with pytest.raises(EngineError, match="buckets"):
        EngineSettings(max_batch_size=8, buckets=(1, 16)).check()
