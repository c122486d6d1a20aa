"""What a search for the fastest settings tries: declared next to each setting, resolved for a model on this machine.

A settings class annotates a field with `Searched`. `abserve serve TARGET … --print-space` prints the resolved space:

    target         native, triton, …
    settings       name, default (the value in effect), values, when, values_when; each after those that it depends on
    on_request     the same, of settings that change the answers: searched only if the user asks for it
    fixed          what every contender is started with, unless it has another value: what is given as options
    not_searched   what could change the speed and is not tried, a clause each with its reason
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from typing import Any, Literal

import msgspec
from pydantic_settings import BaseSettings

from servers.options import defaults
from servers.options.defaults import SPINS

FEW_CORES = 8
"""With fewer, a core that the engine leaves to the rest of the server is much of the machine."""
Conditions = dict[str, tuple[str, ...]]
"""By the name of a setting, the values with which something applies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchContext:
    """The model and the machine, on which it depends what is tried."""

    device: Literal["cpu", "cuda"]
    cores: int
    """Those of one engine process."""
    language: bool = False
    payload: str = "tensors"
    largest_axis: int | None = None
    """The largest size of the axis along which batches may be padded; None without one."""
    engines: tuple[str, ...] = ()
    """Those that execute the model here, in this environment."""
    modes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By engine, besides the one that `auto` selects."""
    precisions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By engine."""
    backends: tuple[str, ...] = ()
    """Those of Triton that serve the model here."""

    @property
    def thread_counts(self) -> tuple[int, ...]:
        """All cores, a half and a quarter of them, and of few cores all but one."""
        some = (self.cores // 4, self.cores // 2, self.cores - 1 if self.cores < FEW_CORES else 0)
        return (*(count for count in some if count > 0), self.cores)


@dataclass(frozen=True, slots=True)
class Searched:
    """Annotates a field of a settings class whose values a search tries."""

    values: Callable[[SearchContext], Iterable[object]]
    """Here, besides the default; none: it is not searched here."""
    ordered: bool = False
    """Whether the values are numbers in whose order the speed may change."""
    applies: Mapping[str, Callable[[SearchContext, str, str], bool]] = field(default_factory=dict)
    """By the field of another option, whether a value (the second argument) changes anything beside a value of that
    option (the third). The default always applies."""
    on_request: bool = False
    """Whether it changes the answers too."""
    by_load: bool = False
    """Whether its best value depends on the load so much that a comparison is fair only with that value for each."""


def by_device(
    cpu: Iterable[object], cuda: Iterable[object], *, language: bool = False
) -> Callable[[SearchContext], Iterable[object]]:
    """The values for the device, of models of tensors or of language models only."""

    def values(here: SearchContext) -> Iterable[object]:
        if here.language != language:
            return ()
        return cuda if here.device == "cuda" else cpu

    return values


def each(values_by_engine: Mapping[str, Iterable[str]]) -> Iterable[str]:
    """The values of all engines, each once."""
    return dict.fromkeys(value for values in values_by_engine.values() for value in values)


ENGINE = Searched(lambda here: here.engines)
MODE = Searched(
    lambda here: (defaults.MODE, *each(here.modes)),
    applies={"engine": lambda here, mode, engine: mode in (defaults.MODE, *here.modes.get(engine, ()))},
)
PRECISION = Searched(
    lambda here: each(here.precisions),
    applies={"engine": lambda here, precision, engine: precision in here.precisions.get(engine, ())},
    on_request=True,
)
THREADS = Searched(lambda here: here.thread_counts if here.device == "cpu" else (), ordered=True)
SPINNING = Searched(
    lambda here: ("on", "off") if here.device == "cpu" else (),
    applies={
        "engine": lambda here, _spinning, engine: here.language or engine in SPINS,
        "threads": lambda _here, _spinning, threads: int(threads) > 1,  # a single one never waits
    },
)
MAX_BATCH_SIZE = Searched(by_device((4, 8, 16, 32), (8, 16, 32, 64, 128)), ordered=True)
MAX_QUEUE_DELAY_US = Searched(by_device((0, 5000), (0, 200, 1000)), ordered=True)
DECODE_THREADS = Searched(
    lambda here: (count for count in (1, 2, 4, 8) if here.payload == "jpeg" and count <= here.cores), ordered=True
)
SLOTS = Searched(by_device((4, 8, 16, 32), (16, 32, 64, 128, 256), language=True), ordered=True)
PREFILL_CHUNK = Searched(by_device((0, 16, 64, 256), (0, 64, 256, 512), language=True))
"""0 is what the engine chooses, which is no number in the order of the others."""
GRAPHS = Searched(by_device((), (True, False), language=True))


def space_json(
    target: str,
    settings: BaseSettings,
    here: SearchContext,
    in_effect: Mapping[str, object],
    given: Collection[str],
    not_searched: Sequence[str] = (),
    stated: Collection[str] = (),
) -> bytes:
    """The space of a target as one line of JSON.

    `in_effect` are the values that the server takes by default, by field, where they are not those of `settings`;
    `given` are the fields that the user has set, which are not searched. A clause of `not_searched` begins with the
    option, and is left out if that is given. Of `stated` fields every contender names its value, also the default:
    `auto` may choose another one later.
    """
    fields = type(settings).model_fields
    # Of several annotations the last one counts, which a server has added to that of a shared declaration.
    declared = {name: item for name, info in fields.items() for item in info.metadata if isinstance(item, Searched)}
    space = _Resolution(here, {name: _text(in_effect.get(name, getattr(settings, name))) for name in fields})
    graph = {name: [other for other in searched.applies if other in declared] for name, searched in declared.items()}
    for name in TopologicalSorter(graph).static_order():
        if name not in given:
            space.add(name, declared[name], fields[name].description or "")
    return _line(
        target=target,
        settings=[entry for name, entry in space.entries.items() if not declared[name].on_request],
        on_request=[entry for name, entry in space.entries.items() if declared[name].on_request],
        fixed={option_name(name): space.defaults[name] for name in declared if name in (*given, *stated)},
        not_searched=[clause for clause in not_searched if clause.partition(" ")[0] not in map(option_name, given)],
    )


def empty_space_json(target: str, why: str) -> bytes:
    """The space of a server of which nothing can be tuned."""
    return _line(target=target, settings=[], not_searched=[why])


def _line(**content: object) -> bytes:
    return msgspec.json.encode(content) + b"\n"


class _Resolution:
    """The settings resolved so far. A setting that has no other value than its default here is not in `entries`."""

    def __init__(self, here: SearchContext, defaults: Mapping[str, str]) -> None:
        self.here, self.defaults = here, defaults
        self.entries: dict[str, dict[str, Any]] = {}
        self._inapplicable: set[str] = set()

    def add(self, name: str, searched: Searched, about: str) -> None:
        """Resolve one setting, after those that it depends on."""
        default = self.defaults[name]
        if self._conditions(searched, default) is None:
            self._inapplicable.add(name)
            return
        values = list(dict.fromkeys(map(_text, searched.values(self.here))))
        possible = {value: self._conditions(searched, value) for value in values if value != default}
        applying = {value: conditions for value, conditions in possible.items() if conditions is not None}
        if not applying:
            return
        kept = [value for value in ([] if default in values else [default]) + values if value in (default, *applying)]
        when = _common(list(applying.values()))
        self.entries[name] = {
            "name": option_name(name),
            "default": default,
            "values": sorted(kept, key=int) if searched.ordered else kept,
            "ordered": searched.ordered,
            "when": when,
            "values_when": {
                value: more
                for value, conditions in applying.items()
                if (more := {other: some for other, some in conditions.items() if when.get(other) != some})
            },
            "about": about,
            **({"by_load": True} if searched.by_load else {}),
        }

    def _conditions(self, searched: Searched, value: str) -> Conditions | None:
        """With which values of other settings this one applies; without those of which all do. None: it never does."""
        conditions: Conditions = {}
        for other, applies in searched.applies.items():
            if other not in self.defaults:  # this server has no such option
                continue
            entry = self.entries.get(other)
            possible = (self.defaults[other],) if entry is None else tuple(entry["values"])
            some = tuple(beside for beside in possible if applies(self.here, value, beside))
            if not some or other in self._inapplicable:
                return None
            if entry is not None and (len(some) < len(possible) or entry["when"]):
                conditions[option_name(other)] = some
        return conditions


def _common(conditions: Sequence[Conditions]) -> Conditions:
    """What must hold for any of the values: the conditions that all have, each with the values of any."""
    names = [name for name in conditions[0] if all(name in other for other in conditions)]
    return {name: tuple(dict.fromkeys(value for some in conditions for value in some[name])) for name in names}


def option_name(name: str) -> str:
    """The option of a field, without the leading dashes."""
    return name.replace("_", "-")


def _text(value: object) -> str:
    """As `abserve serve` takes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
