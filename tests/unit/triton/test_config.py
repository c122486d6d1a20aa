"""Every generated config.pbtxt parses with Triton's own protobuf; its parameters are what the model reads back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import model_config_pb2 as pb

from servers.engines.interface import EngineDescription
from servers.engines.settings import EngineSettings
from servers.models.images import DecodingSettings
from servers.models.registry import DEFAULT_MODEL, get_specification, get_variant, payload_variants
from servers.models.specification import ModelSpecification
from servers.models.weights import CheckpointWeights, RandomWeights
from servers.protocol.tensors import Axis, TensorSpec
from servers.triton.config import (
    BATCHING,
    contradicting_parameters,
    contradictions,
    dynamic_batching,
    language_config,
    onnxruntime_config,
    parameters_from_model,
    parameters_from_settings,
    parameters_of_instance,
    python_config,
    quote,
    settings_from_parameters,
    tensorrt_config,
    vllm_config,
    write_model_repository,
)
from servers.triton.settings import resolve_engine

CHECKED_IN = Path(__file__).resolve().parents[3] / "triton_model_repo"
SPECIFICATION_LIST = list(payload_variants(get_specification(DEFAULT_MODEL)))
EXECUTED = [s for s in SPECIFICATION_LIST if s.executed is s]
JPEG = [s for s in SPECIFICATION_LIST if s.executed is not s]


def parse(text: str) -> Any:
    return text_format.Parse(text, pb.ModelConfig())


def generated_configs(specification: ModelSpecification) -> list[str]:
    """The configuration for each backend."""
    return [
        onnxruntime_config(specification),
        tensorrt_config(specification),
        python_config(specification, BATCHING, "cpu", {}),
    ]


def test_the_checked_in_repository_is_the_generated_one(tmp_path: Path) -> None:
    generated = {p.relative_to(tmp_path): p.read_text() for p in write_model_repository(tmp_path, SPECIFICATION_LIST)}
    checked_in = {
        path.relative_to(CHECKED_IN): path.read_text()
        for path in CHECKED_IN.rglob("*")
        if path.is_file() and path.name in ("config.pbtxt", ".gitkeep", "model.py")
    }
    assert checked_in == generated, "run: abserve triton-repo"
    assert len(checked_in) == 4 * len(EXECUTED) + 6 * len(JPEG)


@pytest.mark.parametrize("path", sorted(CHECKED_IN.rglob("config.pbtxt")), ids=lambda p: p.parent.name)
def test_a_folder_is_named_after_its_model(path: Path) -> None:
    assert parse(path.read_text()).name == path.parent.name


@pytest.mark.parametrize("specification", EXECUTED, ids=lambda s: s.name)
def test_every_config_merges_requests_and_has_one_instance(specification: ModelSpecification) -> None:
    for text in generated_configs(specification):
        config = parse(text)
        assert config.max_batch_size == specification.max_batch_size
        assert config.HasField("dynamic_batching")
        assert not config.dynamic_batching.ListFields(), "every field here makes Triton slower: docs/triton.md"
        assert not config.HasField("response_cache")
        assert len(config.instance_group) == 1
        assert config.instance_group[0].count == 1


def test_native_onnxruntime_is_on_the_gpu_without_settings_that_do_nothing(specification: ModelSpecification) -> None:
    config = parse(onnxruntime_config(specification))
    assert (config.name, config.backend) == (f"{specification.name}_onnx", "onnxruntime")
    assert config.instance_group[0].kind == pb.ModelInstanceGroup.KIND_GPU
    assert not config.optimization.HasField("cuda")  # graphs there are ignored by this backend
    (accelerator,) = config.optimization.execution_accelerators.gpu_execution_accelerator
    assert accelerator.name == "cuda"
    assert dict(accelerator.parameters) == {"use_tf32": "0"}  # the convolution key is overwritten when it stands here
    assert config.parameters["cudnn_conv_algo_search"].string_value == "1"
    assert [w.batch_size for w in config.model_warmup] == list(range(1, specification.max_batch_size + 1))


def test_warm_up_is_zeros_not_random_bits(specification: ModelSpecification) -> None:
    for text in (onnxruntime_config(specification), tensorrt_config(specification)):
        inputs = [tensor for sample in parse(text).model_warmup for tensor in sample.inputs.values()]
        assert inputs
        assert all(tensor.zero_data for tensor in inputs)


def test_python_backend_says_its_device_and_its_parameters(specification: ModelSpecification) -> None:
    specification, batching = replace(specification, max_batch_size=5), dynamic_batching(700, 9)
    on_cpu = parse(python_config(specification, batching, "cpu", {"engine": "onnxruntime"}))
    on_gpu = parse(python_config(specification, batching, "cuda:3", {}))
    assert on_cpu.name == specification.name
    assert on_cpu.instance_group[0].kind == pb.ModelInstanceGroup.KIND_CPU
    assert on_gpu.instance_group[0].kind == pb.ModelInstanceGroup.KIND_GPU
    assert list(on_gpu.instance_group[0].gpus) == [3]
    assert on_cpu.parameters["engine"].string_value == "onnxruntime"
    policy = on_cpu.dynamic_batching.default_queue_policy
    assert (on_cpu.max_batch_size, on_cpu.dynamic_batching.max_queue_delay_microseconds) == (5, 700)
    assert policy.max_queue_size == 9
    assert policy.timeout_action == pb.ModelQueuePolicy.REJECT


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_the_number_of_instances(specification: ModelSpecification, device: str) -> None:
    texts = [
        python_config(specification, BATCHING, device, {}, instances=3),
        onnxruntime_config(specification, BATCHING, device, {}, 3),
        *([tensorrt_config(specification, BATCHING, device, {}, 3)] if device != "cpu" else []),
    ]
    for (group,) in (parse(text).instance_group for text in texts):
        assert group.count == 3
        assert list(group.gpus) == ([] if device == "cpu" else [1])


def test_a_queue_limit_has_no_timeout_near_the_sleep_of_the_batcher(specification: ModelSpecification) -> None:
    """With a limit a request may bring its own timeout, which Triton ignores without a default one."""
    batching = dynamic_batching(queue_size=9)
    for text in (
        python_config(specification, batching, "cpu", {}),
        onnxruntime_config(specification, batching),
        tensorrt_config(specification, batching),
    ):
        policy = parse(text).dynamic_batching.default_queue_policy
        assert policy.allow_timeout_override
        assert policy.default_timeout_microseconds >= 60_000_000, "0: Triton ignores the request's own; 500,000: 503"


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_any_label_survives_the_text_format(label: str) -> None:
    text = f"parameters {{ key: {quote(label)} value: {{ string_value: {quote(label)} }} }}"
    assert dict(parse(text).parameters.items())[label].string_value == label


@pytest.mark.parametrize("specification", JPEG, ids=lambda s: s.name)
@pytest.mark.parametrize("backend", ["onnx", "tensorrt"])
def test_an_ensembles_steps_exist_and_fit_together(specification: ModelSpecification, backend: str) -> None:
    def checked_in(name: str) -> Any:
        return parse((CHECKED_IN / name / "config.pbtxt").read_text())

    ensemble = checked_in(f"{specification.name}_{backend}")
    assert ensemble.platform == "ensemble"
    steps = [(step, checked_in(step.model_name)) for step in ensemble.ensemble_scheduling.step]
    assert [config.backend for _, config in steps] == ["python", "onnxruntime" if backend == "onnx" else "tensorrt"]
    known = {t.name: (t.data_type, tuple(t.dims)) for t in ensemble.input}
    assert known == {"image": (pb.TYPE_STRING, (1,))}
    for step, config in steps:
        assert config.max_batch_size >= ensemble.max_batch_size
        for tensor in config.input:
            assert known[step.input_map[tensor.name]] == (tensor.data_type, tuple(tensor.dims))
        known |= {step.output_map[t.name]: (t.data_type, tuple(t.dims)) for t in config.output}
    for tensor in ensemble.output:
        assert known[tensor.name] == (tensor.data_type, tuple(tensor.dims))


def test_each_version_folder_wants_a_file_of_its_own_name() -> None:
    wanted = {s.name: parse(onnxruntime_config(s)).default_model_filename for s in EXECUTED}
    assert wanted == {"openclip_vit_b32": "model.onnx", "openclip_vit_b32_uint8": "model_uint8.onnx"}


def several() -> ModelSpecification:
    """A model such as a user may describe: two inputs along one axis without padding, one without it, three outputs."""
    return ModelSpecification(
        name="several",
        reference="/home/someone/models/several.py:build",
        title="several",
        version="1",
        inputs=(
            TensorSpec("words", "BYTES", (-1, -1)),
            TensorSpec("scores", "FP16", (-1, -1, 4)),
            TensorSpec("flag", "BOOL", (-1,)),
        ),
        outputs=(TensorSpec("label", "INT32", (-1, 1)), TensorSpec("all", "FP64", (-1, -1)), OTHER),
        axes=(Axis("length", 5, 40, {"words": 1, "scores": 1, "all": 1}),),
        max_batch_size=6,
        load_module=lambda _: pytest.fail("a configuration needs no module"),
    )


OTHER = TensorSpec("mean", "UINT64", (-1, 2))
ANY = [
    get_specification("transformers:bert-base-uncased"),
    get_specification("torchvision:resnet50"),
    several(),
    *EXECUTED,
]


@pytest.mark.parametrize("specification", ANY, ids=lambda s: s.name)
def test_any_model_has_a_config_that_triton_reads(specification: ModelSpecification) -> None:
    for text in generated_configs(specification):
        config = parse(text)
        for tensors, wanted in ((config.input, specification.inputs), (config.output, specification.outputs)):
            for found, tensor in zip(tensors, wanted, strict=True):
                datatype = "STRING" if tensor.datatype == "BYTES" else tensor.datatype
                assert (found.name, pb.DataType.Name(found.data_type)) == (tensor.name, f"TYPE_{datatype}")
                assert tuple(found.dims) == (tensor.item_shape or (1,))
                assert found.HasField("reshape") == (not tensor.item_shape)
                assert not tensor.item_shape or not found.reshape.shape
        for sample in config.model_warmup:
            for tensor in specification.inputs:
                assert all(size > 0 for size in sample.inputs[tensor.name].dims)
        assert "/home/someone" not in text


@pytest.mark.parametrize("specification", ANY, ids=lambda s: s.name)
def test_a_graph_of_tensorrt_is_of_one_size_along_an_axis_and_of_every_batch_size(
    specification: ModelSpecification,
) -> None:
    config = parse(tensorrt_config(specification))
    assert (config.name, config.backend) == (f"{specification.name}_tensorrt", "tensorrt")
    assert config.optimization.cuda.graphs
    covered: dict[tuple[tuple[int, ...], ...], set[int]] = {}
    for graph in config.optimization.cuda.graph_spec:
        shapes = tuple(tuple(graph.input[tensor.name].dim) for tensor in specification.inputs)
        smallest = graph.batch_size
        if graph.HasField("graph_lower_bound"):
            bound = graph.graph_lower_bound
            assert tuple(tuple(bound.input[tensor.name].dim) for tensor in specification.inputs) == shapes
            smallest = bound.batch_size
        covered.setdefault(shapes, set()).update(range(smallest, graph.batch_size + 1))
    assert all(sizes == set(range(1, specification.max_batch_size + 1)) for sizes in covered.values())
    first = sorted(shapes[0][:1] for shapes in covered)
    bert = [(16,), (32,), (64,), (128,), (256,), (512,)]
    assert first == {"bert_base_uncased": bert, "several": [(16,), (32,), (40,)]}.get(specification.name, first)
    warm = {tuple(tuple(w.inputs[t.name].dims) for t in specification.inputs) for w in config.model_warmup}
    assert warm == set(covered)
    assert {w.batch_size for w in config.model_warmup} == {g.batch_size for g in config.optimization.cuda.graph_spec}


def test_ragged_inputs_are_those_along_the_padded_axis() -> None:
    bert = ANY[0]
    ragged = replace(bert, inputs=(*bert.inputs, TensorSpec("task", "INT64", (-1, 1))))
    allowed = parse(python_config(ragged, BATCHING, "cpu", {}, ragged=True)).input
    assert [tensor.allow_ragged_batch for tensor in allowed] == [True] * len(bert.inputs) + [False]
    assert not any(tensor.allow_ragged_batch for tensor in parse(python_config(ragged, BATCHING, "cpu", {})).input)


def test_the_decoding_step_of_a_users_model_finds_it_by_a_path_that_its_config_does_not_show(tmp_path: Path) -> None:
    path = tmp_path / "mine" / "net.py"
    own = replace(get_specification("torchvision:resnet50"), reference=f"{path}:build")
    written = write_model_repository(tmp_path / "repository", payload_variants(own))
    config = parse((tmp_path / "repository/torchvision_resnet50_preprocess/config.pbtxt").read_text())
    assert config.parameters["model"].string_value == "net.py:build"
    holding = [file for file in written if str(tmp_path / "mine") in file.read_text()]
    assert [(file.parent.parent.name, file.name) for file in holding] == [
        ("torchvision_resnet50_preprocess", "reference.txt")
    ]
    assert holding[0].read_text() == own.reference


def test_the_decoding_step_names_a_model_that_it_can_find(tmp_path: Path) -> None:
    resnet = payload_variants(get_specification("torchvision:resnet50"))
    write_model_repository(tmp_path, resnet)
    config = parse((tmp_path / f"{resnet[0].name}_preprocess/config.pbtxt").read_text())
    assert get_variant(config.parameters["model"].string_value, "jpeg") == resnet[2]
    assert (
        "triton-repo --model torchvision:resnet50\n" in (tmp_path / f"{resnet[2].name}_onnx/config.pbtxt").read_text()
    )


ON_CPU = EngineSettings(kind="onnxruntime", precision="fp32", mode="session", device="cpu", threads=2, max_batch_size=8)
PARAMETERS = parameters_from_settings(ON_CPU, RandomWeights(3), Path("/some/where/model.onnx"), "ab12")
IN_EFFECT = EngineDescription(
    kind="onnxruntime",
    version="1",
    precision="fp32",
    mode="session",
    device="cpu",
    threads=2,
    max_batch_size=8,
    weights="random weights (seed 3)",
)


def test_the_config_shows_what_executes_and_no_path() -> None:
    assert PARAMETERS == {
        "engine": "onnxruntime",
        "precision": "fp32",
        "mode": "session",
        "device": "cpu",
        "weights": "random weights (seed 3)",
        "threads": "2",
        "artefact": "model.onnx",
        "artefact_sha256": "ab12",
    }
    checkpoint = parameters_from_settings(ON_CPU, CheckpointWeights(Path("/home/me/secret/a.pt")), None, None)
    assert not any("/" in value for value in checkpoint.values())


@pytest.mark.parametrize("settings", [ON_CPU, replace(ON_CPU, device="cuda:1", threads=0, precision="tf32")])
def test_settings_come_back(settings: EngineSettings) -> None:
    assert settings_from_parameters(parameters_from_settings(settings, RandomWeights(0), None, None), 8) == settings


@pytest.mark.parametrize(("pad_to", "shown"), [((32, 64), "32,64"), ((), "none")])
def test_the_sizes_to_pad_to_come_back(pad_to: tuple[int, ...], shown: str) -> None:
    bert = get_specification("transformers:distilbert-base-uncased")
    parameters = {**PARAMETERS, **parameters_from_model(bert, pad_to, DecodingSettings())}
    assert parameters["pad_to"] == shown
    assert settings_from_parameters(parameters, 8).pad_to == pad_to
    assert "pad_to" not in parameters_from_model(get_specification(DEFAULT_MODEL), (), DecodingSettings())


def test_clients_get_a_models_name_and_no_folder() -> None:
    bert = replace(get_specification("transformers:distilbert-base-uncased"), reference="/home/me/secret/bert.py:make")
    parameters = parameters_from_model(bert, (), DecodingSettings())
    assert parameters["model"] == "bert.py:make"
    assert not any("secret" in value for value in parameters.values())


def test_another_file_under_the_same_name_is_told_and_refused() -> None:
    told, loaded = (CheckpointWeights(Path("/models/a.pt"), digit * 64) for digit in "12")
    parameters = parameters_from_settings(ON_CPU, told, None, None)
    assert parameters["weights"] == f"checkpoint a.pt, SHA-256 {'1' * 64}"
    assert contradictions(parameters, 8, replace(IN_EFFECT, weights=told.label)) == ()
    (wrong,) = contradictions(parameters, 8, replace(IN_EFFECT, weights=loaded.label))
    assert "2" * 64 in wrong


def test_an_engine_that_is_what_the_config_says() -> None:
    assert contradictions(PARAMETERS, 8, IN_EFFECT) == ()


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "torch"},
        {"precision": "tf32"},
        {"mode": "graph"},
        {"device": "cuda:0"},
        {"threads": 1},
        {"threads": None},
        {"max_batch_size": 4},
        {"weights": "random weights (seed 0)"},
    ],
    ids=str,
)
def test_every_difference_is_named(change: dict[str, object]) -> None:
    (phrase,) = contradictions(PARAMETERS, 8, replace(IN_EFFECT, **change))  # type: ignore[arg-type]  # it fits
    assert "config says" in phrase


def test_instances_on_several_gpus_each_have_their_own_device() -> None:
    specification = get_specification(DEFAULT_MODEL)
    settings = replace(ON_CPU, device="cuda:0,cuda:2", threads=0)
    parameters = parameters_from_settings(settings, RandomWeights(0), None, None)
    config = parse(python_config(specification, "", settings.device, parameters, instances=2))
    (group,) = config.instance_group
    assert (pb.ModelInstanceGroup.Kind.Name(group.kind), list(group.gpus), group.count) == ("KIND_GPU", [0, 2], 2)
    assert config.parameters["device"].string_value == "cuda:0,cuda:2"
    own = parameters_of_instance(parameters, "2")
    assert settings_from_parameters(own, 8).device == "cuda:2"
    in_effect = replace(IN_EFFECT, device="cuda:2", threads=None, weights="random weights (seed 0)")
    assert contradictions(own, 8, in_effect) == ()
    assert contradictions(own, 8, replace(in_effect, device="cuda:0")) != ()
    alone = {**parameters, "device": "cuda:1"}
    assert parameters_of_instance(alone, "1") == alone


def test_auto_leaves_the_engine_its_mode() -> None:
    assert contradictions({**PARAMETERS, "mode": "auto"}, 8, replace(IN_EFFECT, mode="compile")) == ()


def test_spinning_is_verified_where_the_config_says_it() -> None:
    spins = replace(IN_EFFECT, spinning="on")
    assert contradictions(PARAMETERS, 8, spins) == ()
    (phrase,) = contradictions({**PARAMETERS, "spinning": "off"}, 8, spins)
    assert phrase == "spinning is 'on', the config says 'off'"


def test_nothing_is_left_to_choose() -> None:
    engine = resolve_engine(EngineSettings(kind="onnxruntime", device="cpu"))
    assert engine.mode == "session"
    assert engine.threads >= 1
    assert resolve_engine(replace(ON_CPU, threads=5)).threads == 5
    assert resolve_engine(replace(ON_CPU, device="cuda:1", threads=0)).device == "cuda:1"


@pytest.mark.parametrize(("device", "kind"), [("cpu", "KIND_CPU"), ("cuda:1", "KIND_GPU")])
def test_a_language_model_streams_and_triton_merges_nothing(device: str, kind: str) -> None:
    parameters = {"engine": "slots", "precision": "bf16", "device": device, "slots": "8"}
    config = parse(language_config("demo", device, parameters))
    assert config.model_transaction_policy.decoupled
    assert config.max_batch_size == 0
    assert config.WhichOneof("scheduling_choice") is None
    assert [(t.name, list(t.dims), t.optional) for t in config.input] == [
        ("input_ids", [-1], False), ("max_tokens", [1], False), ("ignore_eos", [1], True),
    ]  # fmt: skip
    (group,) = config.instance_group
    assert (pb.ModelInstanceGroup.Kind.Name(group.kind), list(group.gpus)) == (kind, [1] if kind == "KIND_GPU" else [])
    assert {key: value.string_value for key, value in config.parameters.items()} == parameters
    in_effect = {**parameters, "slots": 8, "threads": None}
    assert contradicting_parameters(parameters, in_effect) == ()
    (difference,) = contradicting_parameters(parameters, {**in_effect, "precision": "fp32"})
    assert difference == "precision is 'fp32', the config says 'bf16'"


def test_tritons_vllm_backend_gets_a_config_as_its_documentation_has_it() -> None:
    config = parse(vllm_config("demo", "cuda:0"))
    assert (config.backend, config.max_batch_size, config.model_transaction_policy.decoupled) == ("vllm", 0, True)
    assert [(t.name, t.optional) for t in config.input] == [
        ("text_input", False), ("stream", True), ("sampling_parameters", True),
    ]  # fmt: skip
    assert [t.name for t in config.output] == ["text_output"]
