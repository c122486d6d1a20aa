"""Exporting models other than the default: text with an axis, classifiers, several outputs, and files of the user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from servers.engines.factory import build_engine
from servers.engines.interface import EngineError
from servers.engines.settings import EngineSettings
from servers.export.artefacts import (
    Artefact,
    artefact_folder,
    ensure_artefact,
    executed_file,
    find_artefact,
    plan_request,
)
from servers.export.manifest import PLAIN, ExportError, FileForm, executed_form
from servers.export.torch_export import write_onnx
from servers.models.files import file_sha256
from servers.models.registry import get_specification, payload_variants
from servers.models.specification import ModelSpecification
from servers.models.weights import RandomWeights, WeightsSource
from servers.protocol.tensors import Array, Axis, TensorSpec

WEIGHTS = RandomWeights(0)
LONGEST = 40


def small_bert() -> ModelSpecification:
    """The specification of BERT with two small layers, whose mask is added as in the large one."""
    import transformers

    config = transformers.BertConfig(
        vocab_size=200,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=LONGEST,
    )

    class Encoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = transformers.BertModel(config)

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            states, pooled = self.model(input_ids=input_ids, attention_mask=attention_mask, return_dict=False)
            return states, pooled

    def load(_: WeightsSource) -> torch.nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return Encoder().eval().requires_grad_(False)

    def items(seed: int, lengths: Sequence[int]) -> Mapping[str, Array]:
        mask = (np.arange(max(lengths)) < np.asarray(lengths)[:, None]).astype(np.int64)
        return {"input_ids": np.random.default_rng(seed).integers(1, 200, mask.shape) * mask, "attention_mask": mask}

    names = ("input_ids", "attention_mask", "last_hidden_state")
    return ModelSpecification(
        name="small_bert",
        reference="transformers:small-bert",
        title="small BERT",
        version="1",
        inputs=tuple(TensorSpec(name, "INT64", (-1, -1)) for name in names[:2]),
        outputs=(TensorSpec(names[2], "FP32", (-1, -1, 32)), TensorSpec("pooled", "FP32", (-1, 32))),
        kinds={"pooled": "embedding"},
        axes=(Axis("sequence", 12, LONGEST, dict.fromkeys(names, 1), {"input_ids": 0, "attention_mask": 0}),),
        make_items=items,
        max_batch_size=8,
        load_module=load,
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the small BERT is exported once for all tests."""
    return tmp_path_factory.mktemp("artefacts")


@pytest.mark.parametrize("precision", ["fp32", pytest.param("fp16", marks=pytest.mark.slow)])
def test_text_of_any_length_padded_or_not_is_answered_as_by_torch(precision: str, root: Path) -> None:
    bert = small_bert()
    made = ensure_artefact(bert, WEIGHTS, root, form=executed_form("onnxruntime", precision))
    graph = onnx.load(made.path).graph
    dims = {
        value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.output)
    }
    assert dims == {
        "input_ids": ["batch", "sequence"],
        "attention_mask": ["batch", "sequence"],
        "last_hidden_state": ["batch", "sequence", 32],
        "pooled": ["batch", 32],
    }
    assert {tensor.data_type for tensor in graph.initializer if tensor.name.endswith("dense.weight")} <= {
        onnx.TensorProto.FLOAT if precision == "fp32" else onnx.TensorProto.FLOAT16
    }
    measured = [
        (measurement.batch, measurement.sizes["sequence"], measurement.padded) for measurement in made.manifest.parity
    ]
    assert measured == [(1, 12, False), (2, LONGEST, False), (7, 2, False), (7, 12, True)]
    assert made.manifest.operators == "standard"
    assert ensure_artefact(bert, WEIGHTS, root, form=FileForm(precision)) == replace(made, made_now=False)

    settings = EngineSettings(kind="onnxruntime", device="cpu", precision=precision)
    engine = build_engine(bert, WEIGHTS, settings, made.path)
    engine.load()
    engine.warm_up((1, 3))
    assert bert.make_items is not None
    items = bert.make_items(5, [1, 9, 33])
    answers = engine.infer(items)
    alone = engine.infer({name: array[1:2, :9] for name, array in items.items()})
    padded, single = (np.asarray(arrays["last_hidden_state"], np.float64) for arrays in (answers, alone))
    np.testing.assert_allclose(padded[1:2, :9], single, atol=0.02)
    assert np.isfinite(padded).all()
    engine.close()


def test_a_mask_that_is_lost_is_noticed(tmp_path: Path) -> None:
    bert = small_bert()

    def load(weights: WeightsSource) -> torch.nn.Module:
        module = bert.load_module(weights)
        forward = module.forward

        def forgetful(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            mask = torch.ones_like(attention_mask) if torch.compiler.is_exporting() else attention_mask
            answer: torch.Tensor = forward(input_ids, mask)
            return answer

        module.forward = forgetful
        return module

    with pytest.raises(ExportError, match="sequence 12, padded: last_hidden_state"):
        ensure_artefact(replace(bert, load_module=load), WEIGHTS, tmp_path)


@pytest.mark.parametrize("payload", ["fp32", "uint8"])
def test_a_classifier_is_compared_as_one(payload: str, tmp_path: Path) -> None:
    def load(_: WeightsSource) -> torch.nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            layers = (torch.nn.Conv2d(3, 8, 32, 32), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(392, 1000))
            return torch.nn.Sequential(*layers).eval().requires_grad_(False)

    classifier = replace(get_specification("torchvision:resnet18"), load_module=load)
    assert dict(classifier.kinds) == {"logits": "logits"}
    variant = payload_variants(classifier)[payload == "uint8"]
    made = ensure_artefact(variant, WEIGHTS, tmp_path, form=FileForm("fp16"))
    assert [measurement.batch for measurement in made.manifest.parity] == [1, 2, 7]
    assert all((measurement.relative_error or 1) < 0.01 for measurement in made.manifest.parity)
    assert made.path.name == {"fp32": "model_fp16.onnx", "uint8": "model_uint8_fp16.onnx"}[payload]


class Mixed(torch.nn.Module):
    """Two axes without padding and four datatypes."""

    def forward(
        self, image: torch.Tensor, ids: torch.Tensor, keep: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mean = image.float().mean(dim=(1, 2))
        return image.to(torch.int32) + 1, torch.where(keep, ids, -ids), mean * ids.sum(dim=1)


def mixed() -> ModelSpecification:
    return ModelSpecification(
        name="mixed",
        title="mixed",
        version="1",
        inputs=(
            TensorSpec("image", "UINT8", (-1, -1, -1)),
            TensorSpec("ids", "INT64", (-1, 3)),
            TensorSpec("keep", "BOOL", (-1, 3)),
        ),
        outputs=(
            TensorSpec("brighter", "INT32", (-1, -1, -1)),
            TensorSpec("signed", "INT64", (-1, 3)),
            TensorSpec("mean", "FP32", (-1,)),
        ),
        axes=(
            Axis("height", 8, 32, {"image": 1, "brighter": 1}),
            Axis("width", 8, 32, {"image": 2, "brighter": 2}),
        ),
        max_batch_size=4,
        load_module=lambda _: Mixed().eval(),
    )


def test_several_axes_and_datatypes_stay_free_and_equal(tmp_path: Path) -> None:
    made = ensure_artefact(mixed(), WEIGHTS, tmp_path)
    (image, *_) = onnx.load(made.path).graph.input
    assert [dim.dim_param for dim in image.type.tensor_type.shape.dim] == ["batch", "height", "width"]
    assert [measurement.sizes for measurement in made.manifest.parity][1] == {"height": 32, "width": 32}
    assert all(measurement.cosine_min is not None or measurement.max_abs == 0 for measurement in made.manifest.parity)


def test_a_model_that_fixes_an_axis_is_refused_with_the_reason(tmp_path: Path) -> None:
    class Fixed(Mixed):
        def forward(
            self, image: torch.Tensor, ids: torch.Tensor, keep: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            return super().forward(image if image.shape[1] == 8 else image * 2, ids, keep)

    with pytest.raises(ExportError, match=r"torch cannot export mixed to ONNX: .*height.*; use the engine torch"):
        ensure_artefact(replace(mixed(), load_module=lambda _: Fixed().eval()), WEIGHTS, tmp_path)


def test_weights_that_one_file_cannot_hold_are_refused_before_the_export(tmp_path: Path) -> None:
    """Also where they are buffers, as the constants of a frozen module are."""

    class Large(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.zeros(1).expand(2**29))

    with pytest.raises(ExportError, match=r"has 2\.1 GB of weights, and an ONNX file holds at most 2 GB"):
        write_onnx(small_bert(), Large(), tmp_path / "model.onnx", PLAIN)


def test_a_users_file_has_its_own_folder_and_is_exported_again_when_it_changes(tmp_path: Path) -> None:
    first, two = (tmp_path / name / "model.py" for name in ("one", "two"))
    for path in (first, two):
        path.parent.mkdir()
        path.write_text("# a module")
    model, root = mixed(), tmp_path / "artefacts"
    of_one, of_two = (
        replace(model, reference=f"{path}:build", definition_sha256=file_sha256(path)) for path in (first, two)
    )
    folders = {artefact_folder(root, specification, WEIGHTS) for specification in (model, of_one, of_two)}
    assert len(folders) == 3
    assert ensure_artefact(of_one, WEIGHTS, root).made_now
    assert not ensure_artefact(of_one, WEIGHTS, root).made_now
    first.write_text("# an edited module")
    edited = replace(of_one, definition_sha256=file_sha256(first))
    assert find_artefact(root, edited, WEIGHTS) is None
    assert ensure_artefact(edited, WEIGHTS, root).made_now


@pytest.fixture(scope="module")
def users_file(root: Path, tmp_path_factory: pytest.TempPathFactory) -> ModelSpecification:
    """The small BERT as a file from elsewhere: no metadata, no types of intermediate tensors, no module."""
    folder = tmp_path_factory.mktemp("user")
    bert = small_bert()
    model = onnx.load(ensure_artefact(bert, WEIGHTS, root).path)
    del model.graph.value_info[:], model.metadata_props[:]
    path = folder / "mine.onnx"
    onnx.save(model, path)

    def load(_: WeightsSource) -> torch.nn.Module:
        pytest.fail("a file has no module")

    return replace(
        bert, name="mine", reference=str(path), file=path, definition_sha256=file_sha256(path), load_module=load
    )


def test_a_users_onnx_file_is_executed_as_it_is(users_file: ModelSpecification, tmp_path: Path) -> None:
    path, manifest = executed_file("onnxruntime", "fp32", users_file, WEIGHTS, tmp_path)
    assert path == users_file.file
    assert manifest is not None
    assert manifest.sha256 == manifest.model_sha256
    assert (manifest.file, manifest.precision, manifest.parity) == ("mine.onnx", "fp32", ())
    assert list(tmp_path.iterdir()) == []
    plan = plan_request(tmp_path, users_file, WEIGHTS, Artefact(path, manifest, False), "fp32", 8, "10.13.3")
    assert plan.onnx == users_file.file
    assert plan.path.is_relative_to(tmp_path)


def test_fp16_of_a_users_file_is_a_converted_copy_that_was_compared(
    users_file: ModelSpecification, tmp_path: Path
) -> None:
    half = ensure_artefact(users_file, WEIGHTS, tmp_path, form=FileForm("fp16"))
    assert half.path.is_relative_to(tmp_path)
    assert len(half.manifest.parity) == 4
    weights = [tensor for tensor in onnx.load(half.path).graph.initializer if tensor.name.endswith("weight")]
    assert {tensor.data_type for tensor in weights} == {onnx.TensorProto.FLOAT16}
    assert not ensure_artefact(users_file, WEIGHTS, tmp_path, form=FileForm("fp16")).made_now

    stored = replace(users_file, reference=str(half.path), file=half.path)
    assert ensure_artefact(stored, WEIGHTS, tmp_path, form=FileForm("fp16")).path == half.path
    with pytest.raises(ExportError, match=r"model_fp16\.onnx holds fp16; use --precision fp16"):
        ensure_artefact(stored, WEIGHTS, tmp_path)
    engine = build_engine(stored, WEIGHTS, EngineSettings(kind="onnxruntime", device="cpu"), half.path)
    with pytest.raises(EngineError, match="use --precision fp16"):
        engine.load()


@pytest.mark.parametrize(("content", "message"), [(None, "cannot read"), (b"no protobuf", "is not an ONNX file")])
def test_a_file_that_is_no_model_is_refused(content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.onnx"
    if content is not None:
        path.write_bytes(content)
    broken = replace(mixed(), reference=str(path), file=path)
    with pytest.raises(ExportError, match=message):
        ensure_artefact(broken, WEIGHTS, tmp_path / "artefacts")


def test_only_the_named_tower_gets_fused_operators() -> None:
    fused = [get_specification(name).fused_tower for name in ("openclip_vit_b32", "torchvision:vit_b_16")]
    assert fused == [True, False]
