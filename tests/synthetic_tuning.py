"""A tuning that never happened: planted speeds, seeded noise, and a simulated final with the same arms.

The records are made by hand, so that they do not change with the search: two targets, contenders with known settings,
four screenings, the finalists' run, the settings put back one at a time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from loadgen.records.run import ArmRecord, Experiment, Workload
from loadgen.records.tuning import Contender, Score, Space, Stage, TunableSetting, Tuning, TuningRun
from loadgen.verdict.result import Result, analyse
from tests.golden.synthetic_run import Plan, SimulatedArm, write_run

NATIVE = Space(
    target="native",
    settings=(
        TunableSetting(name="engine", default="torch", values=("torch", "onnxruntime")),
        TunableSetting(
            name="spinning", default="auto", values=("auto", "on", "off"), when={"engine": ("onnxruntime",)}
        ),
        TunableSetting(name="max-batch-size", default="32", values=("8", "16", "32"), ordered=True),
        TunableSetting(name="max-queue-delay-us", default="0", values=("0", "500", "2000"), ordered=True),
    ),
    not_searched=("precision: the answers would be others; give --precision", "threads: all arms have the same"),
)
TRITON = Space(
    target="triton",
    settings=(
        TunableSetting(name="max-batch-size", default="32", values=("8", "16", "32"), ordered=True),
        TunableSetting(name="max-queue-delay-us", default="0", values=("0", "500", "2000"), ordered=True),
    ),
    fixed={"backend": "python"},
    not_searched=("instances: two cores hold one",),
)
CONTENDERS: Mapping[str, Mapping[str, str]] = {
    "native-0": {},
    "native-1": {"max-batch-size": "16"},
    "native-2": {"engine": "onnxruntime"},
    "native-3": {"engine": "onnxruntime", "max-batch-size": "16"},
    "native-4": {"engine": "onnxruntime", "spinning": "off", "max-batch-size": "16"},
    "native-5": {"max-queue-delay-us": "2000"},
    "native-6": {"engine": "onnxruntime", "max-queue-delay-us": "2000"},
    "triton-0": {},
    "triton-1": {"max-batch-size": "16"},
    "triton-2": {"max-batch-size": "16", "max-queue-delay-us": "500"},
    "triton-3": {"max-queue-delay-us": "500"},
    "triton-4": {"max-batch-size": "8"},
}
WRONG = "native-4"
SCREENINGS: Sequence[Sequence[str]] = (
    ("native-0", "triton-0", "native-1", "triton-1", "native-2", "triton-2"),
    ("native-0", "native-3", "triton-3", "native-5", "triton-4"),
    ("native-0", "native-2", "triton-2", "native-6", "triton-1"),
    ("native-0", "native-3", "triton-2", "native-1", "triton-3"),
)
FINALISTS = ("native-0", "native-3", "native-2", "native-6", "triton-1", "triton-2", "triton-3")
PUT_BACK = ("native-0", "native-3", "native-2", "native-1", "triton-2", "triton-1", "triton-3")
SPEEDS = {"engine": 0.22, "max-batch-size": 0.09, "max-queue-delay-us": 0.002}
"""What a setting adds to the log of the throughput where it differs from its default."""
FINAL_ARMS = {
    "native-0": SimulatedArm(6.0, 9.0, 1.0),
    "triton-0": SimulatedArm(7.0, 11.0, 2.5, reports_http=False),
    "native-3": SimulatedArm(5.0, 7.2, 1.0),
    "triton-2": SimulatedArm(4.0, 6.4, 2.5, reports_http=False),
}
"""The baseline first, the winners last; milliseconds per batch and item."""


@dataclass(frozen=True)
class PlantedTuning:
    """What the records hold. `stages`: how far it got; `limit_ms`: a limit of p99."""

    stages: tuple[Stage, ...] = ("screening", "finalists", "settings", "final")
    state: Any = "finished"
    limit_ms: float | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    noise: float = 0.02
    arms: Mapping[str, SimulatedArm] = field(default_factory=lambda: FINAL_ARMS)
    more: Sequence[str] = ()
    """Further targets, each with its defaults, "-0", and what was chosen, "-1"."""


def settings_of(name: str) -> dict[str, str]:
    """What a contender changes; of further targets "-1" the batch size."""
    return dict(CONTENDERS.get(name, {"max-batch-size": "16"} if name.endswith("-1") else {}))


def speed(name: str) -> float:
    """The planted log of how many times as fast as native's defaults a contender is."""
    defaults, scale = (0.0, 0.7) if name.startswith("native") else (-0.2, 5.9)
    return defaults + scale * sum(SPEEDS.get(setting, 0.0) for setting in CONTENDERS[name])


def tuning(planted: PlantedTuning | None = None) -> Tuning:
    """The stored record."""
    planted = planted or PlantedTuning()
    rng = np.random.default_rng(3)
    limit = {} if planted.limit_ms is None else {"limit": f"p99={planted.limit_ms:g}ms"}
    runs: list[TuningRun] = []
    screenings = SCREENINGS if "finalists" in planted.stages else SCREENINGS[:2]
    for number, names in enumerate(screenings, 1):
        out = {WRONG: "Native-4 gives wrong answers: cosine 0.93 to the anchor is below 0.999."} if number == 2 else {}
        runs.append(_run(planted, rng, f"{number:02d}-screening", "screening", names, out))
    if "finalists" in planted.stages:
        runs.append(_run(planted, rng, "05-finalists", "finalists", FINALISTS))
    if "settings" in planted.stages:
        runs.append(_run(planted, rng, "06-settings", "settings", PUT_BACK))
    if "final" in planted.stages:
        runs.append(TuningRun(folder="final", stage="final", seconds=240.0))
    return Tuning(
        settings={
            "arms": ["native", "triton", *planted.more], "model": "openclip_vit_b32", "minutes": 20.0, "margin": 0.03,
            **limit, **planted.settings,
        },
        spaces=(NATIVE, TRITON, *(msgspec.structs.replace(TRITON, target=target, fixed={}) for target in planted.more)),
        contenders=tuple(
            Contender(name=name, target=name.partition("-")[0], settings=settings_of(name))
            for name in (*CONTENDERS, *(f"{target}-{number}" for target in planted.more for number in (0, 1)))
        ),
        runs=tuple(runs),
        winners=("native-3", "triton-2", *(f"{target}-1" for target in planted.more))
        if "finalists" in planted.stages
        else (),
        state=planted.state,
    )  # fmt: skip


def _run(
    planted: PlantedTuning,
    rng: np.random.Generator,
    folder: str,
    stage: Stage,
    names: Sequence[str],
    out: Mapping[str, str] | None = None,
) -> TuningRun:
    def score(name: str) -> Score:
        log = speed(name) + float(rng.normal(0.0, planted.noise))
        p99_ms = 170.0 * math.exp(-log) * (1.3 if CONTENDERS[name].get("max-queue-delay-us") == "2000" else 1.0)
        ratio = None if planted.limit_ms is None else p99_ms / planted.limit_ms
        return Score(
            contender=name, log_ratio=log, error=planted.noise, value=104.0 * math.exp(log), p99_ms=p99_ms,
            limits={} if ratio is None else {"latency_p99": (ratio, 0.96 * ratio, 1.04 * ratio)},
        )  # fmt: skip

    return TuningRun(
        folder=folder, stage=stage, scores=tuple(score(name) for name in names), out=dict(out or {}), seconds=66.0
    )


def write_final(folder: Path, planted: PlantedTuning | None = None, pairs: int = 10) -> Path:
    """The records of the final: the defaults and the winners of both targets at 16 users."""
    arms = (planted or PlantedTuning()).arms
    load = Workload(
        scenario="concurrent", batch_size=1, concurrency=16, requests=160, seconds=1.0, max_seconds=30.0, rounds=pairs
    )
    first, second, *others = arms.values()
    write_run(folder, Plan(first, second, tuple(others), workloads=(load,)))
    names = dict(zip("abcdefgh", arms, strict=False))
    for path in [*folder.glob("*.json"), *folder.glob("blocks/*.json")]:
        text = re.sub(r'"label":"([a-h])"', lambda match: f'"label":"{names[match[1]]}"', path.read_text())
        path.write_text(text)
    _rewrite(folder / "experiment.json", Experiment, lambda record: _with_arms(record))
    _rewrite(folder / "arms.json", list[ArmRecord], lambda records: [_as_target(record) for record in records])
    return folder


def final(folder: Path, planted: PlantedTuning | None = None) -> Result:
    """The result of the final."""
    return analyse(write_final(folder, planted))


def _with_arms(experiment: Experiment) -> Experiment:
    arms = tuple(
        msgspec.structs.replace(arm, target=arm.label.partition("-")[0], settings=settings_of(arm.label))
        for arm in experiment.arms
    )
    return msgspec.structs.replace(experiment, arms=arms)


def _as_target(record: ArmRecord) -> ArmRecord:
    target = record.label.partition("-")[0]
    settings = settings_of(record.label)
    title = "native torch 2.15.0 fp32" if target == "native" else "Triton 2.51, python backend, onnxruntime 1.31.1 fp32"
    in_effect = record.in_effect | {name.replace("-", "_"): value for name, value in settings.items()}
    return msgspec.structs.replace(record, target=target, settings=settings, title=title, in_effect=in_effect)


def _rewrite(path: Path, kind: Any, change: Any) -> None:
    path.write_bytes(msgspec.json.encode(change(msgspec.json.decode(path.read_bytes(), type=kind))))
