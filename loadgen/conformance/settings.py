"""The states of a server that cases want, and the options of `abserve serve` that bring each about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from loadgen.conformance.records import SkippedError

SMALL_BODY_BYTES = 4_000_000
SMALL_QUEUE = 2
READ_SECONDS = 2


@dataclass(frozen=True, slots=True)
class Setting:
    """A server started in a certain way. `by_kind` holds the options for `serve KIND`: {} where that kind takes its
    cases as started by default, no entry where it has no such option; None stands for no options with any kind."""

    name: str
    by_kind: Mapping[str, Mapping[str, str]] | None = field(default=None, hash=False)
    anywhere: bool = True
    """Whether its cases can be tried on a server that is running already; they find out by asking."""
    own_servers: bool = False
    """The case starts and ends servers itself; the one that is running is stopped before."""

    def options(self, kind: str) -> Mapping[str, str]:
        """Options for `serve KIND`. Raises `SkippedError` where this kind has none."""
        found = {} if self.by_kind is None else self.by_kind.get(kind)
        if found is None:
            raise SkippedError(f"serve {kind} has no option for {self.name}")
        return found


_QUEUE, _PAYLOADS = {"queue-size": str(SMALL_QUEUE)}, {"payloads": "fp32,jpeg"}

AS_STARTED = Setting("its defaults")
SMALL_QUEUES = Setting("a small queue", {"native": _QUEUE, "triton": _QUEUE}, anywhere=False)
SMALL_BODIES = Setting("a small body limit", {"native": {"max-body-bytes": str(SMALL_BODY_BYTES)}})
SHORT_READS = Setting("a short read deadline", {"native": {"read-timeout-s": str(READ_SECONDS)}, "triton": {}})
WITH_IMAGES = Setting("a model of encoded images", {"native": _PAYLOADS, "triton": _PAYLOADS})
WITH_SHARED_MEMORY = Setting("shared memory allowed", {"native": {"allow-shared-memory": "true"}, "triton": {}})
WITH_MODEL_CONTROL = Setting("model control allowed", {"native": {"allow-model-control": "true"}})
OWN_SERVERS = Setting("servers of its own", anywhere=False, own_servers=True)
