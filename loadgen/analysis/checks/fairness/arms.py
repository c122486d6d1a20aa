"""Checks that the arms differ in what is compared and in nothing else; with those of their settings and the machine.

`check_before_load` is what a person is shown before the load begins; the analysis makes the same checks again from
what was stored.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from loadgen.analysis.checks.fairness.conditions import check_conditions
from loadgen.analysis.checks.fairness.settings import check_settings
from loadgen.analysis.checks.outcome import RUN, Check, CheckName, make_check
from loadgen.experiment.schedule import load_cells
from loadgen.records.conditions import Conditions
from loadgen.records.experiment import setting_key
from loadgen.records.payloads import base_name, without_backend
from loadgen.records.run import ArmRecord, Experiment
from loadgen.storage.stored_run import StoredRun

SAME = {
    CheckName.SAME_MODEL: "model",
    CheckName.SAME_WEIGHTS: "weights",
    CheckName.SAME_PRECISION: "precision",
    CheckName.SAME_DEVICE: "device",
    CheckName.SAME_THREADS: "threads",
    CheckName.SAME_MAX_BATCH_SIZE: "max_batch_size",
    CheckName.SAME_QUEUE_DELAY: "max_queue_delay_us",
    CheckName.SAME_INSTANCES: "instances",
}


def check_fairness(run: StoredRun) -> list[Check]:
    """Of a stored run."""
    host = run.environment.host if run.environment else {}
    cores = host.get("cpu_count")
    checks = check_before_load(run.experiment, run.arms, run.conditions, cores if isinstance(cores, int) else None)
    return [_payload(run.experiment, sent=bool(run.blocks or run.cold_starts)), *checks]


def check_before_load(
    experiment: Experiment, records: Sequence[ArmRecord], conditions: Conditions | None, cores: int | None
) -> list[Check]:
    """Arms as in effect against each other, against what was asked for and by themselves; the machine."""
    arms = {arm.label: arm for arm in records}
    checks = [_same(experiment, arms.get("a"), arms.get("b"), name, key) for name, key in SAME.items()]
    checks += [_in_effect(arm) for arm in records]
    checks += check_settings(experiment, records, cores)
    if load_cells(experiment.cells):
        checks += check_conditions(conditions, records)
    return checks


def _payload(experiment: Experiment, *, sent: bool) -> Check:
    a, b = experiment.payload_of(experiment.a), experiment.payload_of(experiment.b)
    detail = f"{a} over {experiment.transport}" if a == b else f"A is sent {a}, B {b}: not a comparison of servers"
    if a == b and not sent:
        return make_check(CheckName.SAME_PAYLOAD, None, value=a, threshold="equal", detail="nothing was sent")
    value = a if a == b else f"{a}, {b}"
    return make_check(CheckName.SAME_PAYLOAD, a == b, value=value, threshold="equal", detail=detail)


def asked_for(settings: dict[str, str], key: str) -> str | None:
    """A setting, whatever its spelling on the command line."""
    return next((value for name, value in settings.items() if setting_key(name) == key), None)


def _same(experiment: Experiment, a: ArmRecord | None, b: ArmRecord | None, name: CheckName, key: str) -> Check:
    """Different values are a fault, unless an arm was asked for them: then the arms differ on purpose, which the
    report says, and the comparison is one of settings and not of servers."""
    have_a, have_b = _told(a, key), _told(b, key)
    if key == "model" and experiment.payload_of(experiment.a) != experiment.payload_of(experiment.b):
        have_a, have_b = (None if have is None else base_name(str(have)) for have in (have_a, have_b))
    if key == "model" and experiment.deployment == "compose":
        have_a, have_b = (None if have is None else without_backend(str(have)) for have in (have_a, have_b))
    if key == "threads" and all(str(_told(arm, "device") or "").startswith("cuda") for arm in (a, b)):
        return make_check(name, True, threshold="equal", detail="both arms execute on a GPU: no threads to compare")
    if have_a is None or have_b is None:
        silent = " and ".join(label for label, value in (("A", have_a), ("B", have_b)) if value is None)
        verb = "do" if have_a is None and have_b is None else "does"
        return make_check(name, None, threshold="equal", detail=f"{silent} {verb} not tell")
    text = f"A {have_a}, B {have_b}"
    if _equal(str(have_a), have_b):
        return make_check(name, True, value=str(have_a), threshold="equal", detail=str(have_a))
    wanted_a = asked_for(experiment.a.settings, key)
    wanted_b = asked_for(experiment.b.settings, key)
    if wanted_a != wanted_b:
        detail = f"{key} differs ({text}), as asked for: this compares settings and not servers alone"
        check = make_check(name, False, scope=RUN, value=text, threshold="equal", detail=detail)
        return _deliberate(check)
    return make_check(
        name, False, value=text, threshold="equal", detail=f"{key} differs ({text}), and nobody asked for that"
    )


def _told(arm: ArmRecord | None, key: str) -> object:
    if arm is None:
        return None
    if key == "model" and "model" not in arm.in_effect:
        return (arm.model_config or {}).get("name")
    return arm.in_effect.get(key)


def _deliberate(check: Check) -> Check:
    return msgspec.structs.replace(check, severity="warns")


def _in_effect(arm: ArmRecord) -> Check:
    label = arm.label.upper()
    known = []
    for name, wanted in arm.settings.items():
        have = arm.in_effect.get(setting_key(name))
        if have is not None and wanted != "auto":
            known.append((name, wanted, have))
    if not known:
        return make_check(
            CheckName.SETTINGS_IN_EFFECT,
            None if arm.settings else True,
            threshold="as asked for",
            detail=f"{label} does not tell its settings" if arm.settings else f"{label} was asked for nothing special",
        )
    overridden = [f"{name} {wanted} became {have}" for name, wanted, have in known if not _equal(wanted, have)]
    detail = (
        f"{label}: {'; '.join(overridden)}"
        if overridden
        else f"{label} as asked for: {', '.join(n for n, _, _ in known)}"
    )
    return make_check(
        CheckName.SETTINGS_IN_EFFECT,
        not overridden,
        value=len(overridden),
        threshold="as asked for",
        detail=detail,
    )


def _equal(wanted: str, have: object) -> bool:
    """Compared as numbers where both are, as text otherwise."""
    try:
        return float(wanted) == float(str(have))
    except ValueError:
        return wanted.strip().lower() == str(have).strip().lower()
