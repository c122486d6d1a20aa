"""Which transports with which payloads: the runs that `abserve compare` is made of, each comparing like with like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from loadgen.experiment.plan import PlanError
from loadgen.records.payloads import PAYLOADS, implied_payload
from loadgen.records.run import ArmRequest, Transport, option_of
from loadgen.transport.grpc import parse_grpc_address
from loadgen.transport.requests import Address, AddressError
from loadgen.transport.transports import TRANSPORTS


@dataclass(frozen=True, slots=True)
class Combination:
    """One transport with one payload, for every arm."""

    transport: Transport
    payload: str

    @property
    def folder(self) -> str:
        """Below the folder of the matrix."""
        return f"{self.transport}-{self.payload}"

    @property
    def title(self) -> str:
        """For people: "jpeg over grpc"."""
        return f"{self.payload} over {self.transport}"


def plan_combinations(
    arms: Sequence[ArmRequest],
    model: str,
    transports: Sequence[str] | None,
    payloads: Sequence[str] | None,
    *,
    matrix: bool,
) -> tuple[Combination, ...]:
    """Every transport with every payload, in the order given. None means all of them in a matrix, else http and what
    the model's name says. Raises `PlanError` for what does not exist or cannot be asked of an arm."""
    chosen = transports if transports is not None else TRANSPORTS if matrix else ("http",)
    images = payloads if payloads is not None else PAYLOADS if matrix else (implied_payload(model),)
    known = [name for name in TRANSPORTS if name in chosen]
    _refuse_unknown("--transport", chosen, TRANSPORTS)
    _refuse_unknown("--payload", images, PAYLOADS)
    for arm in arms:
        if arm.payload is not None:
            _refuse_unknown(option_of(arm.label, "payload"), (arm.payload,), PAYLOADS)
            if len(images) > 1:
                raise PlanError(
                    f"{option_of(arm.label, 'payload')} and several payloads contradict each other; give one --payload"
                )
        for transport in known:
            _check_reachable(arm, transport)
    ordered = [next(name for name in known if name == wanted) for wanted in chosen]
    return tuple(Combination(transport, payload) for transport, payload in product(ordered, images))


def _refuse_unknown(option: str, given: Sequence[str], known: Sequence[str]) -> None:
    unknown = [name for name in given if name not in known]
    if unknown or not given:
        raise PlanError(f"{option} {','.join(unknown) or '(empty)'}: there are {', '.join(known)}")


def _check_reachable(arm: ArmRequest, transport: Transport) -> None:
    if arm.embedded:
        return
    option = option_of(arm.label)
    try:
        address = Address.parse(arm.target)
        if arm.grpc is not None:
            parse_grpc_address(arm.grpc)
    except AddressError as exc:
        raise PlanError(f"arm {arm.label}: {exc}") from None
    if transport == "grpc" and arm.grpc is None:
        raise PlanError(f"{option} {arm.target} says nothing about gRPC; add {option_of(arm.label, 'grpc')} HOST:PORT")
    if transport == "shm" and not address.is_local:
        raise PlanError(
            f"{option} {arm.target} is not on this machine, whose memory it cannot share; use --transport http"
        )
