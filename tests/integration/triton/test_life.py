"""Starting, dying and stopping: what is noticed and what is left behind. `own_triton` is conftest's `Running`."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tritonclient.http as http_client

from servers.models.specification import ModelSpecification
from servers.models.weights import RandomWeights
from servers.options.defaults import OptionError
from servers.options.launch import LaunchPlan
from servers.triton.installation import TritonDiedError
from servers.triton.launch import prepare
from servers.triton.process import TritonProcess
from servers.triton.repository import PlacedModel
from servers.triton.settings import TritonSettings
from tests.integration.triton.conftest import embedding
from tests.span_receiver import CALLER, PARENT, TRACE, receiving

pytestmark = pytest.mark.triton
MODEL = "openclip_vit_b32"


def await_true(condition: Callable[[], bool], seconds: float = 100) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def assert_dies(server: TritonProcess) -> TritonDiedError:
    def dead() -> bool:
        server.assert_alive()  # raises when it is
        return False

    with pytest.raises(TritonDiedError) as error:
        await_true(dead)
    return error.value


def version_folder(plan: LaunchPlan) -> Path:
    (option,) = (argument for argument in plan.argv if argument.startswith("--model-repository="))
    return Path(option.partition("=")[2]) / MODEL / "1"


def test_start_counts_no_inference_and_stop_leaves_nothing(
    own_triton: Any, own_settings: TritonSettings, specification: ModelSpecification
) -> None:
    with pytest.raises(OptionError, match=f"port {own_settings.http_port} .* --http-port"):
        prepare(own_settings, [PlacedModel(specification)], RandomWeights(0))  # a second server on this port
    client = http_client.InferenceServerClient(own_triton.url)
    (statistics,) = client.get_inference_statistics(MODEL)["model_stats"]
    client.close()
    assert (statistics["inference_count"], statistics["execution_count"]) == (0, 0)
    processes, regions = own_triton.processes(), own_triton.regions()
    assert len(processes) == 2
    assert len(regions) == 1
    assert own_triton.process.stop() == 0
    assert not any(process.is_running() for process in processes)
    assert not any(region.exists() for region in regions)


def test_a_request_is_a_part_of_its_callers_trace(
    own_settings: TritonSettings, specification: ModelSpecification, tmp_path: Path
) -> None:
    with receiving() as receiver:
        traced = own_settings.model_copy(update={"traces": receiver.url, "trace_share": 0.0})
        plan = prepare(traced, [PlacedModel(specification)], RandomWeights(0))
        with TritonProcess(plan, tmp_path / "log") as process:
            assert process.wait_ready(100)
            for headers in ({}, {"traceparent": CALLER}):
                embedding(plan, np.zeros((1, 3, 224, 224), np.float32), headers=headers)
            await_true(lambda: any(span.parent_span_id.hex() == PARENT for span in receiver.spans))
    assert {span.trace_id.hex() for span in receiver.spans} == {TRACE}


def test_a_dead_model_process_is_noticed_though_triton_says_ready(own_triton: Any) -> None:
    own_triton.process.assert_alive()
    own_triton.stub().kill()
    assert "executes the model" in str(assert_dies(own_triton.process))
    assert own_triton.process.is_ready(), "Triton itself notices by now: the watch on the stub is not needed any more"


def test_a_killed_server_is_named_and_cleaned_up(own_triton: Any) -> None:
    processes, regions = own_triton.processes(), own_triton.regions()
    own_triton.stub().kill()  # the last one of the two would remove the region itself
    os.kill(own_triton.process.pid, signal.SIGKILL)
    assert "SIGKILL" in str(assert_dies(own_triton.process))
    assert all(region.exists() for region in regions)
    own_triton.process.stop()
    assert not any(process.is_running() for process in processes)
    assert not any(region.exists() for region in regions)


def test_a_broken_artefact_is_the_reason_that_is_given(
    own_settings: TritonSettings, specification: ModelSpecification, tmp_path: Path
) -> None:
    artefact = tmp_path / "model.onnx"
    artefact.write_bytes(b"not an ONNX file")
    settings = own_settings.model_copy(update={"engine": "onnxruntime", "device": "cpu", "threads": 1})
    plan = prepare(settings, [PlacedModel(specification, artefact)], RandomWeights(0))
    with TritonProcess(plan, tmp_path / "log") as server:
        with pytest.raises(TritonDiedError, match=r"ended with status 1: .*cannot load model\.onnx") as error:
            server.wait_ready(60)
        assert error.value.log_lines == (), "the message has it all"
        pid = server.pid
    assert not psutil.pid_exists(pid)


def test_an_engine_that_is_not_what_the_config_says_does_not_load(own_plan: LaunchPlan, tmp_path: Path) -> None:
    config = version_folder(own_plan).parent / "config.pbtxt"
    config.write_text(config.read_text().replace('string_value: "none"', 'string_value: "better ones"'))
    server = TritonProcess(own_plan, tmp_path / "log")
    with server, pytest.raises(TritonDiedError, match="weights is 'none', the config says 'better ones'"):
        server.wait_ready(60)


def test_a_failing_batch_is_an_error_without_a_traceback_and_the_next_one_is_served(
    own_plan: LaunchPlan, tmp_path: Path
) -> None:
    """The engine is made to fail on one value: Triton's own answer to an exception would hold our file's path."""
    (version_folder(own_plan) / "model.py").write_text(
        "from servers.triton.python_backend import EngineModel\n"
        "class TritonPythonModel(EngineModel):\n"
        "    def initialize(self, args):\n"
        "        super().initialize(args)\n"
        "        infer = self._engine.infer\n"
        "        def failing(inputs):\n"
        "            if (inputs['pixel_values'] == 7).all():\n"
        "                raise RuntimeError('out of memory')\n"
        "            return infer(inputs)\n"
        "        self._engine.infer = failing\n"
    )
    log_file = tmp_path / "log"
    with TritonProcess(own_plan, log_file) as server:
        server.wait_ready(60)
        with pytest.raises(http_client.InferenceServerException) as error:
            embedding(own_plan, np.full((2, 3, 224, 224), 7, np.float32))
        assert error.value.message() == "the engine failed; the server's log has the cause"
        assert error.value.status() == "500"
        assert "out of memory" in log_file.read_text()
        answer = embedding(own_plan, np.ones((2, 3, 224, 224), np.float32))
        np.testing.assert_array_equal(answer, np.ones((2, 512), np.float32))
        server.assert_alive()


def test_each_instance_is_a_process_with_its_own_engine(
    own_settings: TritonSettings, specification: ModelSpecification, tmp_path: Path
) -> None:
    two = own_settings.model_copy(update={"instances": 2})
    plan = prepare(two, [PlacedModel(specification)], RandomWeights(0))
    with TritonProcess(plan, tmp_path / "log") as server:
        assert server.wait_ready(60)
        assert len(psutil.Process(server.pid).children(recursive=True)) == 2
        assert embedding(plan, np.zeros((3, 3, 224, 224), np.float32)).shape == (3, 512)
    assert (tmp_path / "log").read_text(errors="replace").count("engine ready: ") == 2
