"""Which model an arm serves and what is sent to it: names, payloads, lengths, and options of the servers."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadgen.cli.output import default_out
from loadgen.experiment.plan import PlanError
from loadgen.experiment.settings import ExperimentSettings
from loadgen.launch.deployment import Deployment
from loadgen.measure.planning import plan_experiment
from loadgen.measure.preparation import model_name
from loadgen.records.payloads import implied_payload, served_name
from loadgen.records.run import MODEL_WEIGHTS, Experiment

URLS = {"a": "http://127.0.0.1:1", "b": "http://127.0.0.1:2"}


def planned(**settings: object) -> Experiment:
    return plan_experiment(ExperimentSettings.model_validate(settings)).runs[0][1]


@pytest.mark.parametrize(
    ("model", "payload", "name"),
    [
        ("open_clip:ViT-B-32", "fp32", "openclip_vit_b32"),
        ("openclip_vit_b32_jpeg", "jpeg", "openclip_vit_b32_jpeg"),
        ("torchvision:resnet50", "fp32", None),
        ("transformers:bert-base-uncased", "tensors", None),
        ("bert", "tensors", "bert"),
    ],
)
def test_a_model_implies_its_payload_and_perhaps_a_name(model: str, payload: str, name: str | None) -> None:
    assert (implied_payload(model), served_name(model, payload)) == (payload, name)


def test_a_list_of_lengths_is_an_axis_of_a_surface() -> None:
    with pytest.raises(PlanError, match="add --surface"):
        planned(model="bert", sequence_length=[32, 128], **URLS)
    names = [w.name for w in planned(model="bert", sequence_length=[32, 128], surface=True, **URLS).workloads]
    for name in ("surface(1, batch 1, length 32)", "surface(16, batch 1, length 128)"):
        assert name in names
    single_length = planned(model="bert", sequence_length=32, **URLS)
    assert (single_length.lengths, single_length.sequence_length) == ((), "32")
    with pytest.raises(ValueError, match="sequence_length"):
        planned(sequence_length="32,x")


def test_a_url_needs_the_models_name_there_unless_another_arm_tells_it() -> None:
    with pytest.raises(PlanError, match="is not a name on a server; add --a-model NAME"):
        planned(model="torchvision:resnet50", **URLS)
    experiment = planned(model="torchvision:resnet50", a="native", b="http://127.0.0.1:2")
    started = Deployment()
    started.model = "resnet50"
    assert model_name(experiment.arms[1], experiment, {"a": started, "b": Deployment()}) == "resnet50"
    named = planned(model="bert", a=URLS["a"], b={"target": URLS["b"], "model": "bert_large"})
    assert [model_name(arm, named, {}) for arm in named.arms] == ["bert", "bert_large"]


def test_inputs_are_checked_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="does not exist"):
        planned(inputs=str(tmp_path / "none.npz"))
    (tmp_path / "data.json").write_text("{}")
    given = str(tmp_path / "data.json")
    with pytest.raises(PlanError, match="leave --sequence-length out"):
        planned(inputs=given, sequence_length=8)
    with pytest.raises(PlanError, match="give one --payload"):
        planned(inputs=given, payload="fp32,jpeg")
    assert planned(inputs=given).inputs == given


def test_unset_weights_are_the_models_and_padding_is_a_list() -> None:
    assert planned().weights == MODEL_WEIGHTS
    assert planned(weights="random:1").weights == "random:1"
    assert [planned(pad_to=value).pad_to for value in (None, "none", "64,32", [16])] == [None, (), (32, 64), (16,)]


def test_a_folder_is_named_after_the_model_without_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = [
        default_out(model).name.partition("-")[2] for model in ("open_clip:ViT-B-32", "/home/me/my model.py:make", "..")
    ]
    assert names == ["open_clip-ViT-B-32", "my-model.py-make", "model"]
