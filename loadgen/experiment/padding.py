"""Decides once for all arms, before a server starts, how servers pad batches of items of different lengths.

Padding decides which requests share a batch and how much each computes, so the arms pad alike: to the same sizes where
every arm can, else not at all. An arm's own option `pad-to` is a difference that was asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from loadgen.experiment.plan import PlanError
from loadgen.records.run import ArmRequest, Experiment, Label, asked_for, option_of, shown

PAD_TO = (32, 64, 128, 256, 512)
"""Sizes to which batches of texts are padded where no others are asked for."""


def decide_padding(
    experiment: Experiment, cannot_pad: Mapping[Label, str], pads_to: Mapping[Label, tuple[int, ...]]
) -> Experiment:
    """The experiment with the padding that every arm can do; the sizes follow from the samples where none are set here.

    `cannot_pad` says why an arm does not take `pad-to`; `pads_to` has the sizes of servers that run already. Raises
    `PlanError` for sizes that an arm which abserve starts cannot pad to.
    """
    if experiment.deployment != "embedded":
        return experiment
    common = [arm for arm in experiment.arms if own_padding(arm) is None]
    if experiment.pad_to:
        _require_padding(experiment, common, cannot_pad)
    starts = any(arm.embedded and not arm.own_repository for arm in experiment.arms)
    if experiment.pad_to is not None or not starts or not has_mixed_lengths(experiment):
        return experiment
    fixed = {arm.label: cannot_pad[arm.label] for arm in common if arm.label in cannot_pad}
    sizes = {pads_to.get(label, ()) for label in fixed}
    if len(sizes) == 1 and (same := sizes.pop()):
        return msgspec.structs.replace(experiment, pad_to=same)
    return msgspec.structs.replace(experiment, cannot_pad=fixed)


def _require_padding(experiment: Experiment, arms: Sequence[ArmRequest], cannot_pad: Mapping[Label, str]) -> None:
    if not any(arm.embedded for arm in experiment.arms):
        raise PlanError("--pad-to has no effect, because abserve starts no server; leave it out")
    unable = next((arm for arm in arms if arm.embedded and arm.label in cannot_pad), None)
    if unable is None:
        return
    able = next((arm for arm in arms if arm.label not in cannot_pad), None)
    alone = "" if able is None else f", or pad on {shown(able.label)} alone: {_option(able, experiment.pad_to or ())}"
    raise PlanError(
        f"--pad-to: {shown(unable.label)} ({unable.target}) cannot pad batches, because {cannot_pad[unable.label]}; "
        f"leave --pad-to out, and no arm pads{alone}"
    )


def own_padding(arm: ArmRequest) -> str | None:
    """The arm's own sizes, which replace those of the experiment; None without."""
    return asked_for(arm.settings, "pad_to")


def has_mixed_lengths(experiment: Experiment) -> bool:
    """Whether the lengths are those of texts or of the user's inputs, not fixed ones."""
    return experiment.sequence_length in (None, "text")


def default_sizes(largest: int, lengths: Sequence[int]) -> tuple[int, ...]:
    """The sizes to pad to for items of these lengths and a model that takes `largest`."""
    last = max([min(PAD_TO[-1], largest), *lengths])
    return (*(size for size in PAD_TO if size < last), last)


def held_back(experiment: Experiment) -> tuple[ArmRequest, ...]:
    """The arms that could pad, and do not by default because another one cannot."""
    if experiment.pad_to != () or not experiment.cannot_pad:
        return ()
    return tuple(
        arm
        for arm in experiment.arms
        if arm.embedded and arm.label not in experiment.cannot_pad and own_padding(arm) is None
    )


def padding_in_words(experiment: Experiment, longest: int) -> str:
    """How the servers that abserve starts pad, in a sentence without a full stop; empty for a model without such an
    axis. `longest` is the length of the longest input."""
    if experiment.pad_to is None:
        return ""
    own = {shown(arm.label): asked for arm in experiment.arms if (asked := own_padding(arm)) is not None}
    words = [f"{label} has its own pad-to={sizes}" for label, sizes in own.items()]
    if len(own) < len(experiment.arms):
        words.insert(0, _common_rule(experiment, longest))
    return "; ".join(words)


def _common_rule(experiment: Experiment, longest: int) -> str:
    if experiment.pad_to:
        return f"batches are padded to {_listed(experiment.pad_to)}"
    alike = "only requests of equal lengths share a batch"
    able = held_back(experiment)
    if not able:
        running = [arm.label for arm in experiment.arms if not arm.embedded and arm.label in experiment.cannot_pad]
        return "; ".join([alike, *(f"{shown(label)}: {experiment.cannot_pad[label]}" for label in running)])
    sizes = default_sizes(longest, (longest or PAD_TO[2],))
    options = " ".join(_option(arm, sizes) for arm in able)
    unable = " and ".join(f"{shown(label)} ({why})" for label, why in experiment.cannot_pad.items())
    names = " and ".join(shown(arm.label) for arm in able)
    return (
        f"no arm is asked to pad batches, because abserve cannot make {unable} do so: {alike}; add {options} to let "
        f"{names} pad, and the report then names the difference"
    )


def _option(arm: ArmRequest, sizes: Sequence[int]) -> str:
    return f"{option_of(arm.label, 'option')} pad-to={_listed(sizes)}"


def _listed(sizes: Sequence[int]) -> str:
    return ",".join(map(str, sizes))
