"""Which fields of a config.pbtxt only affect speed, and the repository without them."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from servers.cli.defaults import TuningError
from servers.models.registry import get_specification
from servers.models.sources.triton_repository import read_config
from servers.triton.config import BatchingSettings, onnxruntime_config, python_config, tensorrt_config
from servers.triton.repository import apply, merge, tuning_of

SLOW = """
backend: "onnxruntime" max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 4 ] } ]
instance_group [ { kind: KIND_CPU count: 2 } ]
dynamic_batching {
  max_queue_delay_microseconds: 5000 preserve_ordering: true preferred_batch_size: [ 4, 8 ]
  default_queue_policy { max_queue_size: 9 }
  priority_levels: 2 default_priority_level: 1
}
optimization {
  gather_kernel_buffer_threshold: 7 input_pinned_memory { enable: false }
  execution_accelerators { gpu_execution_accelerator: [ { name: "cuda" parameters { key: "use_tf32" value: "0" } } ] }
}
parameters { key: "intra_op_thread_count" value: { string_value: "1" } }
parameters { key: "execution_mode" value: { string_value: "1" } }
response_cache { enable: true }
"""
FIELDS = {
    "dynamic_batching.max_queue_delay_microseconds": "5000",
    "dynamic_batching.preserve_ordering": "true",
    "dynamic_batching.preferred_batch_size": "[4, 8]",
    "dynamic_batching.default_queue_policy": "{ max_queue_size: 9 }",
    "dynamic_batching.priority_levels": "2",
    "optimization.gather_kernel_buffer_threshold": "7",
    "optimization.input_pinned_memory": "{ enable: false }",
    "parameters.execution_mode": "1",
    "response_cache": "{ enable: true }",
}


def add(models: Path, name: str, text: str) -> None:
    (models / name / "1").mkdir(parents=True)
    (models / name / "config.pbtxt").write_text(text)
    (models / name / "1" / "model.onnx").write_bytes(b"weights")


@pytest.fixture
def models(tmp_path: Path) -> Path:
    add(tmp_path / "models", "slow", SLOW)
    return tmp_path / "models"


def test_generated_configs_have_nothing_that_could_make_them_slow() -> None:
    specification = get_specification("openclip_vit_b32")
    batching = BatchingSettings(specification.max_batch_size)
    assert tuning_of(text_format.Parse(python_config(specification, batching, "cpu", {}), pb.ModelConfig())) == {}
    on_cpu = onnxruntime_config(specification, batching, "cpu", {"threads": "1"})
    assert tuning_of(text_format.Parse(on_cpu, pb.ModelConfig())) == {}


def test_what_the_gpu_configs_add_is_compared_with_the_servers_defaults() -> None:
    specification = get_specification("openclip_vit_b32")
    onnx = text_format.Parse(onnxruntime_config(specification), pb.ModelConfig())
    plan = text_format.Parse(tensorrt_config(specification), pb.ModelConfig())
    assert tuning_of(onnx) == {"parameters.cudnn_conv_algo_search": "1", "dynamic_batching": "{ }"}
    assert list(tuning_of(plan)) == ["optimization.cuda"]


def test_without_tuning_only_what_the_model_needs_is_left(models: Path, tmp_path: Path) -> None:
    before = (models / "slow" / "config.pbtxt").read_bytes()
    assert apply(models, ["slow"], "all", models) == FIELDS
    assert apply(models, ["slow"], "none", tmp_path / "plain") == {}
    config = read_config(tmp_path / "plain" / "slow")
    assert tuning_of(config) == {}
    assert config.HasField("dynamic_batching")
    assert not config.dynamic_batching.ListFields()
    assert (config.max_batch_size, config.instance_group[0].count) == (8, 2)
    assert set(config.parameters) == {"intra_op_thread_count"}, "as many threads as before"
    assert config.optimization.execution_accelerators.gpu_execution_accelerator[0].parameters["use_tf32"] == "0"
    assert (tmp_path / "plain" / "slow" / "1" / "model.onnx").read_bytes() == b"weights"
    assert (models / "slow" / "config.pbtxt").read_bytes() == before, "the user's repository stays as it is"


@pytest.mark.parametrize("field", FIELDS)
def test_each_setting_can_be_put_back_alone(models: Path, tmp_path: Path, field: str) -> None:
    assert apply(models, ["slow"], field, tmp_path / "one") == {field: FIELDS[field]}
    assert tuning_of(read_config(tmp_path / "one" / "slow")) == {field: FIELDS[field]}


def test_the_steps_of_an_ensemble_are_tuned_with_it(models: Path, tmp_path: Path) -> None:
    for outer, steps in (
        ("inner", '{ model_name: "slow" }'),
        ("outer", '{ model_name: "inner" }, { model_name: "bare" }'),
    ):
        add(models, outer, f'platform: "ensemble" max_batch_size: 8 ensemble_scheduling {{ step [ {steps} ] }}')
    add(models, "beside", SLOW)
    add(models, "bare", "")
    (models / "bare" / "config.pbtxt").unlink()  # Triton completes it from the file
    assert apply(models, ["outer"], "all", models) == FIELDS
    assert apply(models, ["outer"], "none", tmp_path / "plain") == {}
    assert sorted(path.name for path in (tmp_path / "plain").iterdir()) == ["bare", "inner", "outer", "slow"]
    assert not read_config(tmp_path / "plain" / "outer").HasField("dynamic_batching")


def test_a_model_that_could_batch_and_does_not_is_given_a_batcher(models: Path, tmp_path: Path) -> None:
    add(models, "serial", 'backend: "onnxruntime" max_batch_size: 8')
    assert apply(models, ["serial"], "all", models) == {"dynamic_batching": "absent"}
    assert apply(models, ["serial"], "none", tmp_path / "plain") == {}
    assert read_config(tmp_path / "plain" / "serial").HasField("dynamic_batching")
    add(models, "alone", 'backend: "onnxruntime" max_batch_size: 0')
    assert apply(models, ["alone"], "all", models) == {}


def test_a_batcher_of_onnxruntime_on_a_gpu_is_compared_with_none(models: Path, tmp_path: Path) -> None:
    add(models, "gpu", 'backend: "onnxruntime" max_batch_size: 8 dynamic_batching { }')
    assert apply(models, ["gpu"], "all", models) == {"dynamic_batching": "{ }"}
    assert apply(models, ["gpu"], "none", tmp_path / "plain") == {}
    assert not read_config(tmp_path / "plain" / "gpu").HasField("dynamic_batching")


def test_text_is_merged_into_a_config(models: Path) -> None:
    merge(models, "slow", "dynamic_batching { preferred_batch_size: 2 } instance_group [ { count: 3 } ]")
    config = read_config(models / "slow")
    assert list(config.dynamic_batching.preferred_batch_size) == [4, 8, 2]
    assert [group.count for group in config.instance_group] == [2, 3]
    with pytest.raises(TuningError, match="no field named"):
        merge(models, "slow", "dynamic_batching { speed: 9 }")


def test_a_setting_that_is_not_in_effect_is_refused_with_those_that_are(models: Path) -> None:
    with pytest.raises(TuningError, match=r"not a setting in effect; set here: dynamic_batching\.default_queue_policy"):
        apply(models, ["slow"], "optimization.cuda", models)
