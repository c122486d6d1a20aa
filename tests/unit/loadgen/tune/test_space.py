"""The contenders of a space: which settings apply, how many there are, and what `--tune` and `--fix` leave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from loadgen.experiment.plan import PlanError
from loadgen.records.tuning import Space, TunableSetting
from loadgen.tune.space import canonical, condition_in_words, every_contender, for_load, narrowed, size

Key = tuple[tuple[str, str], ...]


def setting(
    name: str, *values: str, when: Mapping[str, tuple[str, ...]] | None = None, **more: object
) -> TunableSetting:
    return TunableSetting(name=name, default=values[0], values=values, when=when or {}, **more)  # type: ignore[arg-type]


ENGINE = setting("engine", "torch", "openvino", "jax")
MODE = setting("mode", "auto", "eager", "traced", when={"engine": ("torch", "jax")}, values_when={
    "traced": {"engine": ("torch",)}
})  # fmt: skip
THREADS = TunableSetting(name="threads", default="4", values=("1", "2", "4"), ordered=True)
INSTANCES = TunableSetting(
    name="instances",
    default="1",
    values=("1", "2", "4"),
    ordered=True,
    when={"threads": ("1", "2")},
    values_when={"4": {"threads": ("1",)}},
)
PRECISION = setting("precision", "fp32", "int8", "fp16", when={"engine": ("openvino",)})
NATIVE = Space(target="native", settings=(ENGINE, MODE, THREADS), on_request=(PRECISION,))
TRITON = Space(target="triton", settings=(THREADS, INSTANCES))


@st.composite
def spaces(draw: st.DrawFn) -> Space:
    """Up to five settings, each with conditions on those before it."""
    settings: list[TunableSetting] = []
    for index in range(draw(st.integers(1, 5))):
        values = tuple(f"{index}{letter}" for letter in "abc"[: draw(st.integers(1, 3))])

        def conditions() -> dict[str, tuple[str, ...]]:
            others = (
                draw(st.lists(st.sampled_from(settings), max_size=2, unique_by=lambda s: s.name)) if settings else []
            )
            return {
                other.name: tuple(draw(st.lists(st.sampled_from(other.values), min_size=1, unique=True)))
                for other in others
            }

        default = draw(st.sampled_from(values))
        values_when = {value: conditions() for value in values if value != default and draw(st.booleans())}
        settings.append(
            TunableSetting(name=f"s{index}", default=default, values=values, when=conditions(), values_when=values_when)
        )
    return Space(target="t", settings=tuple(settings))


def key(settings: Mapping[str, str]) -> Key:
    return tuple(sorted(settings.items()))


def brute(space: Space) -> set[Key]:
    """The canonical settings of every assignment of values."""
    names = [setting.name for setting in space.settings]
    return {
        key(canonical(space, dict(zip(names, values, strict=True))))
        for values in product(*(setting.values for setting in space.settings))
    }


@given(spaces())
def test_every_contender_is_named_once_and_counted(space: Space) -> None:
    listed = [key(contender) for contender in every_contender(space)]
    assert listed[0] == ()
    assert len(set(listed)) == len(listed) == size(space)
    assert set(listed) == brute(space)


@given(spaces())
def test_canonical_settings_apply_and_stay(space: Space) -> None:
    by_name = {setting.name: setting for setting in space.settings}
    for contender in every_contender(space):
        assert canonical(space, contender) == contender
        for name, value in contender.items():
            assert value != by_name[name].default
            for conditions in (by_name[name].when, by_name[name].values_when.get(value, {})):
                for other, values in conditions.items():
                    assert contender.get(other, by_name[other].default) in values


@given(spaces())
def test_narrowing_by_nothing_keeps_the_contenders(space: Space) -> None:
    (same,) = narrowed([space], {}, {})
    assert brute(same) == brute(space)
    assert narrowed([same], {}, {}) == (same,)


@given(spaces(), st.data())
def test_a_fixed_value_leaves_the_contenders_that_have_it(space: Space, data: st.DataObject) -> None:
    free = [setting for setting in space.settings if not setting.when]
    assume(free)
    chosen = data.draw(st.sampled_from(free))
    value = data.draw(st.sampled_from(chosen.values))
    having = {
        key({name: other for name, other in contender.items() if name != chosen.name})
        for contender in every_contender(space)
        if contender.get(chosen.name, chosen.default) == value
    }
    assume(not chosen.values_when.get(value))
    (fixed,) = narrowed([space], {}, {chosen.name: value})
    assert fixed.fixed == {chosen.name: value}
    assert {key(contender) for contender in every_contender(fixed)} == having
    assert size(fixed) == len(having)


@given(spaces(), st.data())
def test_tuned_values_leave_the_contenders_that_have_one_or_the_default(space: Space, data: st.DataObject) -> None:
    chosen = data.draw(st.sampled_from(space.settings))
    values = data.draw(st.lists(st.sampled_from(chosen.values), min_size=1, unique=True))
    assume({chosen.default, *values} == {chosen.default} or chosen in narrowed([space], {}, {})[0].settings)
    try:
        (tuned,) = narrowed([space], {chosen.name: values}, {})
    except PlanError:  # the setting never applies
        assert chosen.name not in {setting.name for setting in narrowed([space], {}, {})[0].settings}
        return
    having = {key(c) for c in every_contender(space) if c.get(chosen.name, chosen.default) in {*values, chosen.default}}
    assert {key(contender) for contender in every_contender(tuned)} == having


def test_what_does_not_apply_is_left_out() -> None:
    asked = {"engine": "openvino", "mode": "eager", "threads": "4"}
    assert canonical(NATIVE, asked) == {"engine": "openvino"}
    assert canonical(NATIVE, {"engine": "jax", "mode": "traced"}) == {"engine": "jax"}
    assert canonical(NATIVE, {"engine": "jax", "mode": "eager"}) == {"engine": "jax", "mode": "eager"}
    assert canonical(NATIVE, {}) == {}
    assert (size(NATIVE), size(TRITON)) == ((3 + 1 + 2) * 3, 3 + 2 + 1)


@pytest.mark.parametrize("values", [{"egnine": "torch"}, {"engine": "tensorrt"}, {"precision": "int8"}])
def test_a_setting_that_the_space_lacks_is_an_error(values: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=next(iter(values))):
        canonical(NATIVE, values)


def test_a_setting_on_request_is_searched_only_then() -> None:
    (plain,) = narrowed([NATIVE], {}, {})
    assert "precision" not in {setting.name for setting in plain.settings}
    assert any("--tune precision=" in clause for clause in plain.not_searched)
    (asked,) = narrowed([NATIVE], {"precision": ["int8"]}, {})
    assert canonical(asked, {"engine": "openvino", "precision": "int8"})["precision"] == "int8"
    assert canonical(asked, {"engine": "torch", "precision": "int8"}) == {}
    assert asked.not_searched == ()


def test_names_are_for_all_targets_that_have_them_or_for_one() -> None:
    native, triton = narrowed([NATIVE, TRITON], {"threads": ["2"], "triton.threads": ["1"]}, {})
    assert [s.values for s in native.settings if s.name == "threads"] == [("2", "4")]
    assert [s.values for s in triton.settings if s.name == "threads"] == [("1", "4")]
    native, triton = narrowed([NATIVE, TRITON], {}, {"engine": "openvino", "triton.threads": "1"})
    assert (native.fixed, triton.fixed) == ({"engine": "openvino"}, {"threads": "1"})
    assert [s.name for s in native.settings] == ["threads"]
    assert [(s.name, s.values, s.when) for s in triton.settings] == [("instances", ("1", "2", "4"), {})]
    native, triton = narrowed(
        [NATIVE, TRITON], {}, {"queue_size": "9"}
    )  # no search varies it, and a server may have it
    assert (native.fixed, triton.fixed) == ({"queue-size": "9"}, {"queue-size": "9"})


def test_a_stated_default_gives_way() -> None:
    stated = msgspec.structs.replace(NATIVE, fixed={"engine": "torch"})
    (searched,) = narrowed([stated], {}, {})
    assert size(searched) == size(NATIVE)
    assert canonical(searched, {"engine": "openvino", "mode": "eager"}) == {"engine": "openvino"}
    (fixed,) = narrowed([stated], {}, {"engine": "openvino"})
    assert fixed.fixed == {"engine": "openvino"}
    assert size(fixed) == 3


def test_ordered_values_are_sorted_by_number() -> None:
    (native,) = narrowed([NATIVE], {"--threads": ["16", "2"]}, {})
    assert [s.values for s in native.settings if s.name == "threads"] == [("2", "4", "16")]


@pytest.mark.parametrize(
    ("tune", "fix", "words"),
    [
        ({"egnine": ["torch"]}, {}, ("--tune egnine", "did you mean engine")),
        ({"triton.engine": ["torch"]}, {}, ("--tune triton.engine", "threads")),
        ({"vllm.threads": ["1"]}, {}, ("vllm", "native", "triton")),
        ({}, {"trito.threads": "1"}, ("--fix trito.threads", "did you mean triton")),
        ({"threads": ["1", "2"]}, {"threads": "1"}, ("--tune threads", "--fix threads", "contradict")),
        ({"threads": ["many"]}, {}, ("threads=many", "number")),
        ({"mode": ["eager"]}, {"engine": "openvino"}, ("--tune mode", "no effect", "engine openvino")),
        ({"instances": ["2"]}, {"triton.threads": "4"}, ("--tune instances", "no effect", "threads 4")),
    ],
)
def test_a_wrong_choice_is_one_sentence(
    tune: Mapping[str, Sequence[str]], fix: Mapping[str, str], words: Sequence[str]
) -> None:
    with pytest.raises(PlanError) as error:
        narrowed([NATIVE, TRITON], tune, fix)
    message = str(error.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


def test_a_load_bounds_batches_and_slots() -> None:
    batch = TunableSetting(name="max-batch-size", default="32", values=("4", "8", "16", "32"), ordered=True)
    slots = TunableSetting(name="slots", default="16", values=("4", "8", "16", "32"), ordered=True)
    space = Space(target="native", settings=(batch, slots, ENGINE))

    def at(outstanding: int) -> dict[str, tuple[tuple[str, ...], str]]:
        (loaded,) = narrowed([for_load(space, outstanding)], {}, {})
        return {s.name: (s.values, s.default) for s in loaded.settings if s.ordered}

    assert at(16) == {"max-batch-size": (("4", "8", "32"), "32"), "slots": (("4", "8", "16"), "16")}
    assert at(10) == {"max-batch-size": (("4", "8", "32"), "32"), "slots": (("2", "5", "10"), "10")}
    assert at(64) == {"max-batch-size": (("4", "8", "16", "32"), "32"), "slots": (("16", "32", "64"), "64")}
    assert at(1) == {}
    assert canonical(for_load(space, 1), {}) == {}
    small = msgspec.structs.replace(space, settings=(msgspec.structs.replace(batch, default="8"),))
    assert for_load(small, 16).settings[0].values == ("4", "8", "16")


def test_a_load_bounds_instances_and_what_is_merged() -> None:
    instances = TunableSetting(name="instances", default="2", values=("1", "2", "4"), ordered=True)
    multiple = TunableSetting(name="batch-multiple", default="1", values=("1", "8", "16", "32"), ordered=True)
    space = Space(target="triton", settings=(setting("batching", "dynamic", "none"), multiple, instances))

    def at(outstanding: int) -> dict[str, tuple[str, ...]]:
        (loaded,) = narrowed([for_load(space, outstanding)], {}, {})
        return {setting.name: setting.values for setting in loaded.settings}

    assert at(1) == {"instances": ("1", "2")}
    assert at(3) == {"batching": ("dynamic", "none"), "batch-multiple": ("1", "8"), "instances": ("1", "2")}
    assert at(16)["batch-multiple"] == ("1", "8", "16")
    assert at(64) == {setting.name: setting.values for setting in space.settings}


def test_conditions_in_words() -> None:
    assert condition_in_words(MODE) == "with engine torch or jax"
    assert condition_in_words(ENGINE) == ""
