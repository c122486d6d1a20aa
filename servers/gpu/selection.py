"""Which of a machine's GPUs are read: those that somebody names, as CUDA_VISIBLE_DEVICES does or by `--gpu`.

A comparison that reads a GPU of somebody else pays for it (energy alone takes 3.7 ms of the driver's lock on an H200)
and records work that is not its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from servers.gpu.readings import Connection, DeviceIdentity

VARIABLE = "CUDA_VISIBLE_DEVICES"
ALL = "all"


def visible(environment: Mapping[str, str]) -> tuple[str, ...] | None:
    """The names in CUDA_VISIBLE_DEVICES, none where it is empty; None for all, where it is not set.

    CUDA ignores a name that means nothing and everything behind it.
    """
    text = environment.get(VARIABLE)
    if text is None:
        return None
    names: list[str] = []
    for name in (part.strip() for part in text.split(",")):
        if not (name.isdecimal() or name.startswith(("GPU-", "MIG-"))):
            break
        names.append(name)
    return tuple(names)


def matching(
    names: Sequence[str], devices: Sequence[DeviceIdentity], parent_of: Callable[[str], str | None]
) -> tuple[DeviceIdentity, ...]:
    """The devices that are named, each once, in their own order; a name of none is passed over.

    A name is an index, a UUID or the beginning of one, or a MIG instance, which is read as the GPU that `parent_of`
    tells. An index is NVML's, by PCI address. CUDA counts so with CUDA_DEVICE_ORDER=PCI_BUS_ID; by default the fastest
    card comes first, and only cards of one kind keep the order of their addresses. So `abserve compare` names UUIDs as
    soon as the servers have told theirs, and no finding rests on an index.
    """
    wanted: set[int] = set()
    for name in names:
        if name.isdecimal():
            wanted |= {device.index for device in devices if device.index == int(name)}
            continue
        uuid = _parent(name, parent_of) if name.startswith("MIG-") else name
        found = [device.index for device in devices if uuid and device.uuid.startswith(uuid)]
        wanted |= set(found if len(found) == 1 else ())
    return tuple(device for device in devices if device.index in wanted)


def _parent(name: str, parent_of: Callable[[str], str | None]) -> str | None:
    """MIG-GPU-UUID/INSTANCE/COMPUTE of drivers before 470 has the GPU in it; MIG-UUID only the driver knows."""
    if name.startswith("MIG-GPU-"):
        return name.removeprefix("MIG-").partition("/")[0]
    return parent_of(name)


def select_devices(
    connection: Connection, names: Sequence[str] | None, parent_of: Callable[[str], str | None]
) -> Connection:
    """The connection with the named devices alone; `names` None: with all. `device_count` stays that of the machine.

    A driver that answers for the named ones is `ok`, whatever becomes of the others; with none of them found there is
    no device, and `error` says why.
    """
    if names is None or not connection.devices:
        return connection
    chosen = matching(names, connection.devices, parent_of)
    if chosen:
        return replace(connection, status="ok", devices=chosen)
    named = ", ".join(names) or f"by an empty {VARIABLE}"
    error = connection.error or f"none of this machine's {connection.device_count} GPUs is named {named}"
    return replace(connection, error=error, devices=())
