"""What sentences call the arms: one function, from what was asked for and what their servers report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import chain, combinations

from loadgen.base.quantities import counted, join
from loadgen.records.run import ArmRecord, ArmRequest, Label, setting_key, shown
from loadgen.records.targets import TARGETS

ENGINE_TITLES = {
    "torch": "PyTorch",
    "onnxruntime": "ONNX Runtime",
    "openvino": "OpenVINO",
    "tensorrt": "TensorRT",
    "jax": "JAX",
}
"""Of engines whose name is another word than the one to write."""
LONGEST_NAME = 40


def names_of(requests: Sequence[ArmRequest], arms: Sequence[ArmRecord]) -> dict[Label, str]:
    """A short name for each arm, unlike those of the others, for every sentence: the user's own label, else the server
    or the host and port of its URL, with what differs between arms of the same server: "native with 4 fronts"."""
    records = {arm.label: arm for arm in arms}
    unasked = {label: shown(label) for label in records}
    names = {request.label: _server_name(request, records.get(request.label)) for request in requests}
    if "native" in names.values():  # the engine of one of them is not known
        names = {label: "native" if name.endswith("(native)") else name for label, name in names.items()}
    for name, count in Counter(names.values()).items():
        alike = [request for request in requests if names[request.label] == name]
        if count == 1:
            continue
        asked = {setting_key(option) for request in alike for option in request.settings}
        told = {request.label: _settings_told(request, records.get(request.label), asked) for request in alike}
        others = list(told.values())
        keys = _fewest_that_differ(others)
        for request in alike:
            own = told[request.label]
            said = [key for key in keys if key in own]
            shorter = (said[:count] for count in range(1, len(said)))
            said = next((some for some in shorter if _times(own, some, others) == 1), said)
            words = join([own[key] for key in said])
            base = TARGETS[request.target].title if request.embedded else name
            names[request.label] = f"{base} with {words}" if words else base
    short = {label: name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}…" for label, name in names.items()}
    counts = Counter(short.values())
    return unasked | {label: name if counts[name] == 1 else f"{name} ({shown(label)})" for label, name in short.items()}


def _fewest_that_differ(settings: Sequence[Mapping[str, str]]) -> Sequence[str]:
    """The fewest settings that no two arms have in common, three at most; else the first two that differ."""
    differing = [key for key in dict.fromkeys(chain(*settings)) if len({own.get(key) for own in settings}) > 1]
    choices = chain.from_iterable(combinations(differing, size) for size in (1, 2, 3))
    told = (keys for keys in choices if all(any(key in own for key in keys) for own in settings))
    return next((keys for keys in told if all(_times(own, keys, settings) == 1 for own in settings)), differing[:2])


def _times(own: Mapping[str, str], keys: Sequence[str], settings: Sequence[Mapping[str, str]]) -> int:
    """How many arms have the same of these settings."""
    return sum(all(other.get(key) == own.get(key) for key in keys) for other in settings)


def _server_name(request: ArmRequest, record: ArmRecord | None) -> str:
    if shown(request.label) == request.label:
        return request.label
    if not request.embedded:
        return request.target.partition("://")[2].partition("/")[0].rpartition("@")[2] or request.target
    title = TARGETS[request.target].title
    engine = str((record.in_effect if record is not None else {}).get("engine") or "")
    return f"{ENGINE_TITLES[engine]} ({title})" if request.target == "native" and engine in ENGINE_TITLES else title


def _settings_told(request: ArmRequest, record: ArmRecord | None, asked: Collection[str]) -> dict[str, str]:
    """The settings of an arm in words: those `asked` for of any of the arms, also where this one has its default."""
    told = {
        "model": f"the model {request.model}" if request.model else "",
        "version": f"version {request.access.version}" if request.access.version else "",
        "payload": f"{request.payload} payloads" if request.payload else "",
    }
    values = {key: value for key, value in (record.in_effect if record else {}).items() if key in asked}
    values |= {setting_key(option): value for option, value in request.settings.items()}
    told |= {key: _setting_in_words(key.replace("_", " "), str(value).lower()) for key, value in values.items()}
    return {key: words for key, words in told.items() if words}


def _setting_in_words(name: str, value: str) -> str:
    if value in ("true", "false"):
        return name if value == "true" else f"no {name}"
    if value.isdecimal() and name.endswith("s") and " " not in name:
        return counted(int(value), name.removesuffix("s"))
    return f"{name} {value.rpartition('/')[2]}"
