"""Asks the servers what can be tuned, by `abserve serve TARGET --print-space`, and whether they take what a user adds.

A value that is not declared is given to the command as an option, so that the server itself accepts or refuses it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import msgspec

from loadgen.base.child_process import ABSERVE
from loadgen.experiment.plan import PlanError
from loadgen.launch.deployment import DeploymentError
from loadgen.launch.embedded import ask_server
from loadgen.records.tuning import Space, TunableSetting
from loadgen.tune.space import FIX, TUNE, by_target, check_lists, declared, for_load, narrowed

_READ_SECONDS = 300.0
_PARALLEL = 4
_CHOSEN = ("print-launch", "print-space", "work-dir")
"""Options that abserve gives a server by itself, beside the ports."""
_OF_TUNING = ("model", "weights", "payloads")
"""Options that are the same for all servers, and options of the tuning."""


def read_spaces(
    targets: Sequence[str],
    options: Mapping[str, Mapping[str, str]],
    *,
    tune: Mapping[str, Sequence[str]] | None = None,
    fix: Mapping[str, str] | None = None,
    outstanding: int | None = None,
    abserve: Sequence[str] = ABSERVE,
) -> tuple[Space, ...]:
    """The spaces of the targets, in their order, narrowed by `--tune` and `--fix` (see `narrowed`).

    `options` are by target the options of `abserve serve` that the experiment gives to every contender, such as model
    and weights. An option that is given is not searched, so leave out those that have their default. `outstanding` is
    for `for_load`. Raises `PlanError` with one sentence: for a name that does not exist, and for what a server refuses.
    """
    tune, fix = dict(tune or {}), dict(fix or {})

    def read(target: str, more: Mapping[str, str]) -> Space:
        space = read_space(target, {**options.get(target, {}), **more}, abserve)
        return space if outstanding is None else for_load(space, outstanding)

    with ThreadPoolExecutor(_PARALLEL) as pool:
        spaces = tuple(pool.map(lambda target: read(target, {}), targets))
        if fix:
            fixed = by_target(FIX, fix, spaces)
            _check_fixed(chain.from_iterable(fixed.values()))
            spaces = tuple(pool.map(lambda target: read(target, fixed[target]), targets))
            spaces = tuple(
                msgspec.structs.replace(space, fixed={**fixed[space.target], **space.fixed}) for space in spaces
            )
        added = []
        for space, names in zip(spaces, by_target(TUNE, tune, spaces).values(), strict=True):
            for name, values in names.items():
                setting = declared(space)[name]
                check_lists(name, values, setting)
                added += [(space.target, name, value) for value in values if value not in setting.values]
        fixed = {space.target: space.fixed for space in spaces}
        answers = list(pool.map(lambda new: read(new[0], {**fixed[new[0]], new[1]: new[2]}), added))
    chosen = {
        f"{target}.{name}": list(values)
        for target, names in by_target(TUNE, tune, spaces).items()
        for name, values in names.items()
    }
    for (target, name, value), answer in zip(added, answers, strict=True):
        in_effect = answer.fixed.get(name, value)  # as 0 or auto stand for another value
        values = chosen[f"{target}.{name}"]
        values[values.index(value)] = in_effect
        spaces = tuple(
            _with_value(space, name, in_effect, answer) if space.target == target else space for space in spaces
        )
    return narrowed(spaces, chosen, fix)


def read_space(target: str, options: Mapping[str, str], abserve: Sequence[str] = ABSERVE) -> Space:
    """The space of a target with these options of `abserve serve`, which are not searched. Raises `PlanError`."""
    try:
        return ask_server("--print-space", target, options, Space, _READ_SECONDS, abserve=abserve)
    except DeploymentError as exc:
        raise PlanError(str(exc)) from exc


def _check_fixed(names: Iterable[str]) -> None:
    for name in names:
        if name in _CHOSEN or name.endswith("-port"):
            raise PlanError(f"{FIX} {name} has no effect, because abserve chooses ports and folders; leave it out")
        if name in _OF_TUNING:
            option = name.removesuffix("s") if name == "payloads" else name
            raise PlanError(f"{FIX} {name} would change what is compared; use --{option} for all servers")


def _with_value(space: Space, name: str, value: str, answer: Space) -> Space:
    """The space with a value that the server has accepted: `answer` is what it printed with the value as an option. The
    settings that apply there apply with this value."""
    applying = {setting.name for setting in (*answer.settings, *answer.on_request)}

    def extended(setting: TunableSetting) -> TunableSetting:
        if setting.name == name:
            return msgspec.structs.replace(setting, values=tuple(dict.fromkeys((*setting.values, value))))
        if name in setting.when and setting.name in applying:
            when = {**setting.when, name: tuple(dict.fromkeys((*setting.when[name], value)))}
            return msgspec.structs.replace(setting, when=when)
        return setting

    return msgspec.structs.replace(
        space, settings=tuple(map(extended, space.settings)), on_request=tuple(map(extended, space.on_request))
    )
