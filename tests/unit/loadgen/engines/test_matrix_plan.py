"""From settings to configurations: the axes, what `auto` and `all` mean, refusals, and the order of the visits."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.engines.plan import (
    CombinationCheck,
    Offers,
    batches_of,
    difference,
    expand,
    make_plan,
    requests_of,
    schedule,
)
from loadgen.experiment.matrix import MatrixSettings
from loadgen.experiment.plan import PlanError
from loadgen.records.matrix import Configuration, MatrixPlan

MODES_OFFERED: dict[str, dict[str, tuple[str, ...]]] = {
    "torch": {"cpu": ("eager", "traced"), "cuda": ("graph", "eager")},
    "onnxruntime": {"cpu": ("session",), "cuda": ("graph", "session")},
    "tensorrt": {"cuda": ("graph",)},
    "null": {"cpu": ("eager",)},
}
PRECISIONS_OFFERED: dict[str, dict[str, tuple[str, ...]]] = {
    "torch": {"cpu": ("fp32",), "cuda": ("fp32", "fp16")},
    "onnxruntime": {"cpu": ("fp32", "fp16"), "cuda": ("fp32", "fp16")},
    "tensorrt": {"cuda": ("fp16", "fp32")},
    "null": {"cpu": ("fp32", "fp16")},
}
CPU, GPU = (Offers(device, MODES_OFFERED, PRECISIONS_OFFERED, {}) for device in ("cpu", "cuda:0"))


def checked(
    configuration: Configuration, offers: Offers, lengths: tuple[int | None, ...] = (None,)
) -> CombinationCheck:
    """As the worker answers, for these offers."""
    place = offers.place
    modes = MODES_OFFERED[configuration.engine].get(place, ())
    precision = {"auto": "fp32" if place == "cpu" else "fp16"}.get(configuration.precision, configuration.precision)
    threads = (configuration.threads or 2) if place == "cpu" else None
    mode = (*modes, "")[0] if configuration.mode == "auto" else configuration.mode
    bad = mode not in modes or precision not in PRECISIONS_OFFERED[configuration.engine].get(place, ())
    reason = f"{configuration.engine} does not offer {mode} {precision}; choose another" if bad else None
    return CombinationCheck(reason, False, precision, "" if bad else mode, offers.device, threads, lengths, None)


def planned(offers: Offers = CPU, lengths: tuple[int | None, ...] = (None,), **settings: Any) -> MatrixPlan:
    asked = MatrixSettings(**settings)
    wanted = expand(asked, offers)
    return make_plan(asked, offers, wanted, [checked(combination, offers, lengths) for combination in wanted])


def names(plan: MatrixPlan) -> list[str]:
    return [
        f"{configuration.engine}/{configuration.mode} {configuration.precision} {configuration.threads}"
        for configuration in plan.configurations
    ]


def test_the_defaults_are_a_small_matrix_on_each_device() -> None:
    plan = planned()
    assert names(plan) == ["torch/eager fp32 2", "onnxruntime/session fp32 2"]
    assert plan.batches == (1, 4, 8)
    assert plan.refused == ()
    plan = planned(GPU)
    assert names(plan) == ["torch/graph fp16 None", "onnxruntime/graph fp16 None", "torch/eager fp32 None"]
    assert plan.batches == (1, 8, 32, 128)
    assert {configuration.device for configuration in plan.configurations} == {"cuda:0"}


def test_the_baseline_is_measured_too_unless_there_is_none() -> None:
    assert names(planned(engines="onnxruntime")) == ["onnxruntime/session fp32 2", "torch/eager fp32 2"]
    assert names(planned(engines="onnxruntime", baseline="none")) == ["onnxruntime/session fp32 2"]
    plan = planned(engines="onnxruntime", threads="1,2", baseline="torch/traced")
    assert names(plan)[2:] == ["torch/traced fp32 1", "torch/traced fp32 2"]
    assert plan.baseline == "torch/traced"


def test_all_means_what_each_engine_offers_on_this_device() -> None:
    plan = planned(engines="all", modes="all", precisions="all")
    assert names(plan) == [
        "torch/eager fp32 2",
        "torch/traced fp32 2",
        "onnxruntime/session fp32 2",
        "onnxruntime/session fp16 2",
    ]
    assert plan.refused == ()
    assert "tensorrt/graph fp16 None" in names(planned(GPU, engines="all"))


def test_what_an_engine_cannot_honour_is_listed_and_not_run() -> None:
    plan = planned(engines="torch,onnxruntime,tensorrt", precisions="fp32,fp16")
    assert names(plan) == ["torch/eager fp32 2", "onnxruntime/session fp32 2", "onnxruntime/session fp16 2"]
    refused = [(refusal.configuration.engine, refusal.configuration.precision) for refusal in plan.refused]
    assert refused == [("torch", "fp16"), ("tensorrt", "fp32"), ("tensorrt", "fp16")]
    assert all(refusal.configuration.mode != "auto" for refusal in plan.refused)
    assert "does not offer" in plan.refused[0].reason


def test_a_baseline_that_was_not_asked_for_is_never_refused() -> None:
    plan = planned(engines="onnxruntime", baseline="tensorrt/graph")
    assert names(plan) == ["onnxruntime/session fp32 2"]
    assert plan.refused == ()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engines": "trch"}, "--engines: unknown value trch; did you mean torch?"),
        ({"modes": "egaer"}, "--modes: unknown value egaer; did you mean eager?"),
        ({"precisions": "fp23"}, "--precisions: unknown value fp23"),
        ({"baseline": "torhc/eager"}, "--baseline: unknown value torhc; did you mean torch?"),
        ({"baseline": "torch/graphs"}, "--baseline: unknown value graphs; did you mean graph?"),
        ({"engines": "tensorrt"}, "nothing can be measured: tensorrt does not offer"),
        ({"sequence_lengths": "8"}, "none of the models has an axis of variable size"),
    ],
)
def test_a_mistake_is_one_sentence(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message.replace("?", r"\?")):
        planned(**settings)


def test_a_model_that_does_not_exist_ends_the_plan() -> None:
    wanted = expand(settings := MatrixSettings(), CPU)
    wrong = CombinationCheck("unknown model", True, "", "", "", None, (), None)
    with pytest.raises(PlanError, match="--models open_clip:ViT-B-32: unknown model"):
        make_plan(settings, CPU, wanted, [wrong] * len(wanted))


def test_lengths_beyond_the_models_largest_are_listed_and_the_others_measured() -> None:
    settings = MatrixSettings(sequence_lengths=(8, 999))
    wanted = expand(settings, CPU)
    answers = [
        msgspec.structs.replace(checked(combination, CPU, (8,)), too_long="length 999: too long")
        for combination in wanted
    ]
    plan = make_plan(settings, CPU, wanted, answers)
    assert plan.lengths == {"open_clip:ViT-B-32": (8,)}
    assert {refusal.reason for refusal in plan.refused} == {"length 999: too long"}
    assert len(plan.configurations) == 2


def test_requests_have_what_the_worker_needs() -> None:
    settings = MatrixSettings(models=("m",), batches=(4, 1, 4), sequence_lengths=(8,), weights="random:1")
    (first, *_) = requests_of(settings, expand(settings, CPU), CPU)
    assert first["batches"] == batches_of(settings, CPU) == (1, 4)
    assert (first["model"], first["engine"], first["weights"], first["lengths"]) == ("m", "torch", "random:1", (8,))


NAMES = st.lists(st.sampled_from(["torch", "onnxruntime", "tensorrt", "null", "all"]), min_size=1, max_size=4)
MODES = st.lists(st.sampled_from(["auto", "all", "eager", "graph", "session"]), min_size=1, max_size=3)
PRECISIONS = st.lists(st.sampled_from(["auto", "all", "fp32", "fp16"]), min_size=1, max_size=3)


@given(NAMES, MODES, PRECISIONS, st.sets(st.integers(0, 4), min_size=1), st.sampled_from([CPU, GPU]))
def test_every_combination_is_measured_once_or_refused(
    engines: list[str], modes: list[str], precisions: list[str], threads: set[int], offers: Offers
) -> None:
    settings: dict[str, Any] = {"engines": engines, "modes": modes, "precisions": precisions, "threads": list(threads)}
    wanted = expand(MatrixSettings(models=("m", "n"), **settings), offers)
    answers = [checked(combination, offers) for combination in wanted]
    if not any(
        combination.reason is None and asked for asked, combination in zip(wanted.values(), answers, strict=True)
    ):
        with pytest.raises(PlanError, match="nothing can be measured"):
            planned(offers, models=("m", "n"), **settings)
        return
    plan = planned(offers, models=("m", "n"), **settings)
    assert len(set(plan.configurations)) == len(plan.configurations)
    assert not {refusal.configuration for refusal in plan.refused} & set(plan.configurations)
    for configuration in plan.configurations:
        assert configuration.mode in MODES_OFFERED[configuration.engine][offers.place]
        assert configuration.precision in PRECISIONS_OFFERED[configuration.engine][offers.place]
        assert (configuration.threads is None) == (offers is GPU)
        assert configuration.threads != 0
    assert "auto" not in {
        value for configuration in plan.configurations for value in (configuration.mode, configuration.precision)
    }


@given(st.integers(1, 4), st.sampled_from(["fresh", "kept"]), st.integers(0, 5))
def test_every_round_has_every_cell_of_every_configuration_once(rounds: int, processes: str, seed: int) -> None:
    plan = planned(
        models=("m", "n"), modes="all", batches=(1, 4), rounds=rounds, processes=processes, seed=seed, lengths=(8, 16)
    )
    turns = schedule(plan)
    assert turns == schedule(plan)
    assert [turn.number for turn in sorted(turns)] == list(range(rounds * len(plan.configurations)))
    assert Counter((turn.round, turn.configuration) for turn in turns) == Counter(
        product(range(rounds), range(len(plan.configurations)))
    )
    for turn in turns:
        assert sorted(turn.cells) == [(b, n) for b in (1, 4) for n in (8, 16)]
    models = [plan.configurations[turn.configuration].model for turn in turns]
    if processes == "kept":
        assert models == sorted(models)
    else:
        assert [turn.round for turn in turns] == sorted(turn.round for turn in turns)


def test_another_seed_is_another_order() -> None:
    orders = {schedule(planned(modes="all", seed=seed, rounds=3)) for seed in range(5)}
    assert len(orders) == 5


def test_the_difference_of_two_plans_is_named() -> None:
    before, now = (MatrixSettings(rounds=rounds, batches=(1, rounds)).content() for rounds in (3, 5))
    assert difference(before, now) == "batches 1,3 instead of 1,5, rounds 3 instead of 5"
