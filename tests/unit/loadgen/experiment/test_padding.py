"""How the arms pad batches is decided once for all of them, from what every one can do."""

from __future__ import annotations

import msgspec
import pytest

from loadgen.experiment.plan import PlanError, decide_padding, default_sizes, held_back, padding_in_words
from loadgen.experiment.settings import ExperimentSettings
from loadgen.launch.deployment import RemoteDeployment
from loadgen.measure.planning import plan_experiment
from loadgen.records.model_config import pad_sizes, reported_padding
from loadgen.records.run import Experiment

CANNOT = "Triton's onnxruntime backend does not pad"
URL = "http://127.0.0.1:1"


def planned(**settings: object) -> Experiment:
    return plan_experiment(ExperimentSettings.model_validate({"model": "bert", **settings})).runs[0][1]


def padding(experiment: Experiment, **cannot_pad: str) -> tuple[tuple[int, ...] | None, dict[str, str]]:
    """The sizes that are set, and the arms because of which no arm pads."""
    decided = decide_padding(experiment, cannot_pad, {})
    return decided.pad_to, decided.cannot_pad


def test_arms_that_all_can_pad_get_the_sizes_of_the_samples() -> None:
    assert padding(planned()) == (None, {})
    assert padding(planned(pad_to="64,32")) == ((32, 64), {})


def test_no_arm_pads_where_one_cannot() -> None:
    assert padding(planned(), b=CANNOT) == (None, {"b": CANNOT})
    assert padding(planned(pad_to="none"), b=CANNOT) == ((), {}), "asked for, so no other arm is the reason"
    assert padding(planned(sequence_length=32), b=CANNOT) == (None, {}), "requests of one length need no padding"


def test_sizes_that_an_arm_cannot_pad_to_are_refused_with_what_works() -> None:
    with pytest.raises(PlanError) as refused:
        decide_padding(planned(pad_to="32,64"), {"b": CANNOT}, {})
    for words in ("--pad-to: Triton cannot pad", CANNOT, "leave --pad-to out", "--a-option pad-to=32,64"):
        assert words in str(refused.value)
    with pytest.raises(PlanError) as refused:
        decide_padding(planned(pad_to="32,64"), {"a": CANNOT, "b": CANNOT}, {})
    assert "alone" not in str(refused.value)
    with pytest.raises(PlanError, match="abserve starts no server"):
        decide_padding(planned(a=URL, b=URL, pad_to=32), {}, {})


def test_an_arms_own_sizes_are_its_own_matter() -> None:
    padded_arm = {"target": "native", "options": {"pad-to": "16"}}
    assert padding(planned(a=padded_arm, pad_to="32"), a="unused") == ((32,), {})
    three = planned(a=padded_arm, c="native")
    assert padding(three, b=CANNOT) == (None, {"b": CANNOT}), "C does as B"


def test_a_running_server_that_pads_sets_the_sizes_of_the_others() -> None:
    experiment = planned(b=URL)
    decided = decide_padding(experiment, {"b": "its server pads to 16,48"}, {"a": (), "b": (16, 48)})
    assert (decided.pad_to, decided.cannot_pad) == ((16, 48), {})
    differ = {"b": "its server pads to 16", "c": "its server pads to 8"}
    decided = decide_padding(planned(b=URL, c=URL), differ, {"b": (16,), "c": (8,)})
    assert (decided.pad_to, decided.cannot_pad) == (None, differ)
    urls = planned(a=URL, b=URL)
    assert decide_padding(urls, differ | {"a": "its server pads to 4"}, {}) == urls, "there is nothing to decide"
    asked = planned(b=URL, pad_to=32)
    assert decide_padding(asked, {"b": "its server merges only equal lengths"}, {}) == asked


def test_a_compose_stack_pads_as_it_is_configured() -> None:
    stack = planned(model="open_clip:ViT-B-32", deployment="compose", scenarios="single")
    assert decide_padding(stack, {"b": CANNOT}, {}) == stack


@pytest.mark.parametrize(
    ("largest", "lengths", "sizes"),
    [
        (512, [6, 261], (32, 64, 128, 256, 512)),
        (2048, [6, 600], (32, 64, 128, 256, 512, 600)),
        (48, [6, 40], (32, 48)),
        (8192, [20], (32, 64, 128, 256, 512)),
        (0, [100], (32, 64, 100)),
    ],
)
def test_the_default_sizes_fit_the_model_and_the_longest_item(
    largest: int, lengths: list[int], sizes: tuple[int, ...]
) -> None:
    assert default_sizes(largest, lengths) == sizes


def changed(experiment: Experiment, pad_to: tuple[int, ...] | None, cannot_pad: dict[str, str]) -> Experiment:
    return msgspec.structs.replace(experiment, pad_to=pad_to, cannot_pad=cannot_pad)


def test_the_words_name_what_may_share_a_batch_and_how_the_others_can_pad() -> None:
    two = planned()
    assert padding_in_words(changed(two, None, {}), 261) == ""
    assert padding_in_words(changed(two, (32, 64), {}), 261) == "batches are padded to 32,64"
    assert padding_in_words(changed(two, (), {}), 261) == "only requests of equal lengths share a batch"
    alone = changed(two, (), {"b": CANNOT})
    assert [arm.label for arm in held_back(alone)] == ["a"]
    words = padding_in_words(alone, 261)
    assert f"cannot make Triton ({CANNOT}) do so" in words
    assert "add --a-option pad-to=32,64,128,256,261 to let native pad" in words
    neither = changed(two, (), {"a": "items of m cannot be padded", "b": CANNOT})
    assert held_back(neither) == ()
    assert padding_in_words(neither, 261) == "only requests of equal lengths share a batch"
    running = changed(planned(a="fastapi", b=URL), (), {"a": CANNOT, "b": "its server pads to 16"})
    assert padding_in_words(running, 261).endswith(f"share a batch; {URL.partition('//')[2]}: its server pads to 16")
    experiment = planned(a={"target": "native", "options": {"pad_to": "16"}})
    assert held_back(changed(experiment, (), {"b": CANNOT})) == (), "A pads already"
    assert padding_in_words(changed(experiment, (), {"b": CANNOT}), 261).endswith(" has its own pad-to=16")


@pytest.mark.parametrize(
    ("config", "rule"),
    [
        (None, None),
        ({}, None),
        ({"parameters": {"pad_to": {"string_value": "32,64"}}}, "32,64"),
        ({"backend": "onnxruntime", "input": [{"dims": [-1]}]}, "none"),
        ({"backend": "onnxruntime", "input": [{"dims": ["-1"]}]}, "none"),
        ({"backend": "onnxruntime", "input": [{"dims": [3]}]}, None),
        ({"backend": "python", "input": [{"dims": [-1], "allow_ragged_batch": True}]}, None),
        ({"platform": "ensemble", "input": [{"dims": [-1]}]}, None),
        ({"input": "nonsense"}, None),
    ],
)
def test_a_configuration_shows_what_may_share_a_batch(config: dict[str, object] | None, rule: str | None) -> None:
    assert reported_padding(config) == rule
    server = RemoteDeployment(URL)
    server._read_padding(config)
    assert server.pads_to == ((32, 64) if rule == "32,64" else ())
    assert server.cannot_pad is not None, "abserve does not configure it"


def test_only_a_list_of_sizes_is_one() -> None:
    assert [pad_sizes(rule) for rule in ("48, 16", "none", "", "8,x", "0", "-1")] == [(16, 48), (), (), (), (), ()]
