"""What can be asked of a comparison on a running compose stack: its servers' settings are its own, in .env."""

from __future__ import annotations

from collections.abc import Sequence

from loadgen.experiment.plan import PlanError
from loadgen.records.run import ArmRequest, DeploymentKind, option_of

DEFAULT_PROJECT = "abserve"
DEFAULT_WEIGHTS = "random:0"
AS_SERVED = "as in the stack's .env"
"""Stands for the weights: a run does not choose them."""


def parse_deployment(text: str, project: str | None) -> DeploymentKind:
    """Raises `PlanError` for another word, and for a project where there is no stack."""
    if text == "embedded":
        if project is not None:
            raise PlanError("--compose-project has no effect without --deployment compose")
        return "embedded"
    if text == "compose":
        return "compose"
    raise PlanError(f"--deployment {text}: there are embedded and compose")


def check_stack_request(
    arms: Sequence[ArmRequest],
    *,
    transports: Sequence[str],
    scenarios: Sequence[str],
    weights: str,
    threads: int,
) -> None:
    """Raises `PlanError` for whatever a running stack cannot honour, with the remedy."""
    if sorted(arm.target for arm in arms) != ["native", "triton"]:
        raise PlanError("--deployment compose compares native with triton; for a URL leave --deployment out")
    for arm in arms:
        if arm.settings:
            raise PlanError(
                f"{option_of(arm.label, 'option')} has no effect with --deployment compose: set it in .env, then "
                "docker compose up --detach --wait"
            )
    for option, name, changed in (
        ("--weights", "WEIGHTS", weights != DEFAULT_WEIGHTS),
        ("--threads", "THREADS", threads != 0),
    ):
        if changed:
            raise PlanError(
                f"{option} has no effect with --deployment compose: set {name} in .env, then "
                "docker compose up --detach --wait"
            )
    if "shm" in transports:
        raise PlanError("containers share no memory with this process; use --transport http or grpc")
    if "cold-start" in scenarios and set(transports) != {"http"}:
        raise PlanError(
            "cold starts of containers are measured over HTTP; leave cold-start out of --scenarios or use "
            "--transport http"
        )
