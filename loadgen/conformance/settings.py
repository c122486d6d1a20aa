"""The states of a server that cases want, and which option of `abserve serve` brings each about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

SMALL_BODY_BYTES = 4_000_000
SMALL_QUEUE = 2
READ_SECONDS = 2

OPTION_NAMES: Mapping[str, Mapping[str, str | None]] = {
    "queue-size": {"native": "queue-size", "triton": "queue-size"},
    "max-body-bytes": {"native": "max-body-bytes"},
    "read-timeout-s": {"native": "read-timeout-s", "triton": None},
    "payloads": {"native": "payloads", "triton": "payloads"},
    "allow-shared-memory": {"native": "allow-shared-memory", "triton": None},
    "allow-model-control": {"native": "allow-model-control"},
}
"""Wish → kind of server → its option. None: that server takes its cases as it is. No entry: it cannot be asked."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A server started in a certain way."""

    name: str
    wishes: tuple[tuple[str, str], ...] = ()
    anywhere: bool = True
    """Whether its cases can be tried on a server that somebody else has started; they find out by asking."""
    own_servers: bool = False
    """The probe starts and ends servers itself; the one that is running is stopped before."""

    def options(self, kind: str) -> dict[str, str] | str:
        """Options for `serve KIND`; a sentence when this kind has none for one of the wishes."""
        options = {}
        for wish, value in self.wishes:
            names = OPTION_NAMES[wish]
            if kind not in names:
                return f"serve {kind} has no option for {self.name}"
            name = names[kind]
            if name is not None:
                options[name] = value
        return options


AS_STARTED = Setting("its defaults")
SMALL_QUEUES = Setting("a small queue", (("queue-size", str(SMALL_QUEUE)),), anywhere=False)
SMALL_BODIES = Setting("a small body limit", (("max-body-bytes", str(SMALL_BODY_BYTES)),))
SHORT_READS = Setting("a short read deadline", (("read-timeout-s", str(READ_SECONDS)),))
WITH_IMAGES = Setting("a model of encoded images", (("payloads", "fp32,jpeg"),))
WITH_SHARED_MEMORY = Setting("shared memory allowed", (("allow-shared-memory", "true"),))
WITH_MODEL_CONTROL = Setting("model control allowed", (("allow-model-control", "true"),))
OWN_SERVERS = Setting("servers of its own", anywhere=False, own_servers=True)
