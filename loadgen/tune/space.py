"""The space of a target: narrowed by `--tune` and `--fix`, its contenders and their number. Pure: see
`loadgen.tune.declared` for where it comes from.

`canonical` keeps of a contender's settings those that apply and differ from the default, so that two contenders are
the same server exactly if their canonical settings are equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from typing import TypeVar

import msgspec

from loadgen.experiment.plan import PlanError, unknown
from loadgen.records.run import setting_key
from loadgen.records.tuning import Space, TunableSetting

_BATCHING, _INSTANCES, _SLOTS = "batching", "instances", "slots"
_BY_LOAD = ("max-batch-size", "batch-multiple", _BATCHING, _INSTANCES, _SLOTS)
"""Settings whose values depend on how many requests there are at once."""
TUNE, FIX = "--tune", "--fix"

T = TypeVar("T")
Conditions = Mapping[str, Sequence[str]]
"""By setting, the values with which something applies."""


def values_of(text: str) -> list[str]:
    """The values that `--tune NAME=…` names: commas separate them, and + joins a value that is a list itself, as in
    32+64,none."""
    return [value.strip().replace("+", ",") for value in text.split(",")]


def as_text(values: Sequence[str]) -> str:
    """These values as `--tune` takes them."""
    return ",".join(value.replace(",", "+") for value in values)


def check_lists(name: str, values: Sequence[str], setting: TunableSetting) -> None:
    """Raise `PlanError` if numbers are given as values by themselves where the setting takes lists of them."""
    numbers = [value for value in values if value.isdecimal()]
    if len(numbers) > 1 and not any("," in value for value in values) and any("," in value for value in setting.values):
        given, rest = as_text(values), [value for value in values if value not in numbers]
        meant = as_text([",".join(numbers), *rest])
        raise PlanError(f"{TUNE} {name}={given} separates values; join the numbers of one with +: {name}={meant}")


def for_load(space: Space, outstanding: int) -> Space:
    """The space for a load of at most `outstanding` requests at once, of one item each.

    Batch sizes above that are all alike, so that one of them is left: the default if it is one. More instances than
    requests wait for nothing, and a single request is never merged with another one. A language model gets
    as many slots as there are requests by default and never needs more: the others are a half and a quarter of them.
    """

    def adapted(setting: TunableSetting) -> TunableSetting:
        if setting.name == _BATCHING:
            return setting if outstanding > 1 else msgspec.structs.replace(setting, values=(setting.default,))
        default, sizes = int(setting.default), sorted(map(int, setting.values))
        others = [size for size in sizes if size < outstanding]
        if setting.name == _SLOTS:
            default, others = outstanding, [count for count in (outstanding // 4, outstanding // 2) if count]
        elif setting.name == _INSTANCES:
            others = [size for size in sizes if size <= outstanding]
        elif default < outstanding:
            others += [size for size in sizes if size >= outstanding][:1]
        values = tuple(map(str, sorted({default, *others})))
        return msgspec.structs.replace(setting, values=values, default=str(default))

    settings = tuple(adapted(setting) if setting.name in _BY_LOAD else setting for setting in space.settings)
    return msgspec.structs.replace(space, settings=settings)


def narrowed(spaces: Sequence[Space], tune: Mapping[str, Sequence[str]], fix: Mapping[str, str]) -> tuple[Space, ...]:
    """The spaces in which the settings of `tune` have only these values and the default, and those of `fix` only one. A
    key is NAME, for every target that has such a setting, or TARGET.NAME, which comes first. A name that no target
    searches can be fixed too, then for all of them. Raises `PlanError`. Does not ask the servers: see `read_spaces`."""
    tuned, fixed = by_target(TUNE, tune, spaces), by_target(FIX, fix, spaces)
    for space in spaces:
        if both := tuned[space.target].keys() & fixed[space.target].keys():
            name = min(both)
            raise PlanError(f"{TUNE} {name} and {FIX} {name} contradict each other; give one of them")
    result = tuple(_narrowed(space, tuned[space.target], fixed[space.target]) for space in spaces)
    for before, after in zip(spaces, result, strict=True):
        searched = {setting.name for setting in after.settings}
        for name, values in tuned[after.target].items():
            if name not in searched and set(values) - {declared(before)[name].default}:
                fixed_here = ", ".join(f"{option} {value}" for option, value in after.fixed.items())
                beside = f" with {fixed_here}" if fixed_here else ""
                raise PlanError(f"{TUNE} {name} has no effect on {after.target}{beside}; leave it out")
    return result


def _narrowed(space: Space, tune: Mapping[str, Sequence[str]], fix: Mapping[str, str]) -> Space:
    def limited(setting: TunableSetting) -> TunableSetting:
        if setting.name not in tune:
            return setting
        values = tuple(dict.fromkeys((*tune[setting.name], setting.default)))
        return msgspec.structs.replace(setting, values=_sorted(values, setting))

    asked = [setting for setting in space.on_request if setting.name in tune]
    settings = tuple(limited(setting) for setting in (*space.settings, *asked) if setting.name not in fix)
    left = tuple(setting for setting in space.on_request if setting.name not in {*tune, *fix})
    searched = declared(space)
    fixed = {**fix, **space.fixed, **{name: value for name, value in fix.items() if name in searched}}
    simple = _simplified(msgspec.structs.replace(space, settings=settings, on_request=left, fixed=fixed))
    said = set(map(_on_request, space.on_request))
    other = (clause for clause in space.not_searched if clause not in said)
    return msgspec.structs.replace(simple, not_searched=(*other, *map(_on_request, simple.on_request)))


def _on_request(setting: TunableSetting) -> str:
    return f"{setting.name}: it changes the answers; search it with {TUNE} {setting.name}={as_text(setting.values)}"


def _sorted(values: Sequence[str], setting: TunableSetting) -> tuple[str, ...]:
    if not setting.ordered:
        return tuple(sorted(values, key=lambda value: (value not in setting.values, value != setting.default)))
    if wrong := next((value for value in values if not value.isdecimal()), None):
        raise PlanError(f"{TUNE} {setting.name}={wrong}: it must be a whole number")
    return tuple(sorted(values, key=int))


def declared(space: Space) -> dict[str, TunableSetting]:
    return {setting.name: setting for setting in (*space.settings, *space.on_request)}


def by_target(flag: str, given: Mapping[str, T], spaces: Sequence[Space]) -> dict[str, dict[str, T]]:
    """By target, the values of its settings. Raises `PlanError` for a name or a target that does not exist."""
    general: dict[str, dict[str, T]] = {space.target: {} for space in spaces}
    special: dict[str, dict[str, T]] = {space.target: {} for space in spaces}
    for key, value in given.items():
        target, dot, name = key.partition(".") if "." in key else ("", "", key)
        name = setting_key(name).replace("_", "-")
        if dot and target not in general:
            raise PlanError(unknown(f"{flag} {key}", target, list(general), "target"))
        asked = [space for space in spaces if not dot or space.target == target]
        having = [space for space in asked if name in declared(space) or (flag == FIX and name in space.fixed)]
        if not having and flag == TUNE:
            known = dict.fromkeys(chain.from_iterable(declared(space) for space in asked))
            fixed = next((space.fixed[name] for space in asked if name in space.fixed), None)
            if fixed is not None:
                raise PlanError(f"{flag} {key}: {name} is {fixed} for every contender; leave one of the two out")
            raise PlanError(unknown(f"{flag} {key}", name, list(known), "setting"))
        for space in having or asked:
            (special if dot else general)[space.target][name] = value
    return {target: {**general[target], **special[target]} for target in general}


def _simplified(space: Space) -> Space:
    """Without settings that never apply or have one value, and without conditions that always hold."""
    known, kept = dict(space.fixed), dict[str, TunableSetting]()

    def left(conditions: Conditions) -> dict[str, tuple[str, ...]] | None:
        """The conditions that are still open; None if they cannot hold."""
        opened = {}
        for name, values in conditions.items():
            possible = kept[name].values if name in kept else (known[name],) if name in known else ()
            holding = tuple(value for value in possible if value in values)
            if not holding:
                return None
            if len(holding) < len(possible) or (name in kept and kept[name].when):
                opened[name] = holding
        return opened

    def simplified(setting: TunableSetting) -> TunableSetting | None:
        if (when := left(setting.when)) is None:
            return None
        by_value = {value: left(setting.values_when.get(value, {})) for value in setting.values}
        by_value[setting.default] = {}
        values = tuple(value for value, conditions in by_value.items() if conditions is not None)
        values_when = {value: conditions for value, conditions in by_value.items() if conditions}
        return msgspec.structs.replace(setting, when=when, values=values, values_when=values_when)

    for setting in space.settings:
        if (simple := simplified(setting)) is None:
            continue
        if len(simple.values) == 1 and not simple.when:
            known[simple.name] = simple.default
        else:
            kept[simple.name] = simple
    on_request = tuple(
        simple for setting in space.on_request if (simple := simplified(setting)) is not None and len(simple.values) > 1
    )
    return msgspec.structs.replace(space, settings=tuple(kept.values()), on_request=on_request)


# A contender's settings


def canonical(space: Space, values: Mapping[str, str]) -> dict[str, str]:
    """A contender's settings: the values of the settings that apply and that differ from the default, in the order of
    the space. What is missing has its default. Raises `ValueError` for a setting or a value that the space lacks."""
    if unknown_names := values.keys() - {setting.name for setting in space.settings}:
        raise ValueError(f"{space.target} has no setting {min(unknown_names)} to search")
    effective, chosen = dict(space.fixed), dict[str, str]()
    for setting in space.settings:
        value = values.get(setting.name, setting.default)
        if value not in setting.values:
            raise ValueError(f"{setting.name} of {space.target} has no value {value}")
        if not _holds(setting.when, effective):
            continue
        if not _holds(setting.values_when.get(value, {}), effective):
            value = setting.default
        effective[setting.name] = value
        if value != setting.default:
            chosen[setting.name] = value
    return chosen


def _holds(conditions: Conditions, effective: Mapping[str, str]) -> bool:
    """Whether the conditions hold; a setting that does not apply meets none."""
    return all(effective.get(name) in values for name, values in conditions.items())


def every_contender(space: Space) -> Iterator[dict[str, str]]:
    """The canonical settings of all contenders, each once; the first is the defaults."""

    def following(index: int, effective: Mapping[str, str], chosen: Mapping[str, str]) -> Iterator[dict[str, str]]:
        if index == len(space.settings):
            yield dict(chosen)
            return
        setting = space.settings[index]
        if not _holds(setting.when, effective):
            yield from following(index + 1, effective, chosen)
            return
        for value in sorted(setting.values, key=lambda value: value != setting.default):
            if _holds(setting.values_when.get(value, {}), effective):
                more = {} if value == setting.default else {setting.name: value}
                yield from following(index + 1, {**effective, setting.name: value}, {**chosen, **more})

    return following(0, space.fixed, {})


def size(space: Space) -> int:
    """The number of different contenders, counted without making them."""
    conditional = {
        name
        for setting in space.settings
        for conditions in (setting.when, *setting.values_when.values())
        for name in conditions
    }

    @cache
    def following(index: int, known: frozenset[tuple[str, str]]) -> int:
        if index == len(space.settings):
            return 1
        setting, effective = space.settings[index], dict(known)
        if not _holds(setting.when, effective):
            return following(index + 1, known)
        values = [value for value in setting.values if _holds(setting.values_when.get(value, {}), effective)]
        if setting.name not in conditional:
            return len(values) * following(index + 1, known)
        return sum(following(index + 1, frozenset({**effective, setting.name: value}.items())) for value in values)

    return following(0, frozenset(space.fixed.items()))


def condition_in_words(setting: TunableSetting) -> str:
    """When a setting applies, as a clause such as "with engine torch or onnxruntime"; empty: always."""
    parts = [f"{name} {' or '.join(values)}" for name, values in setting.when.items()]
    return f"with {' and '.join(parts)}" if parts else ""
