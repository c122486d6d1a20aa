"""Selects the GPUs to read: those that CUDA_VISIBLE_DEVICES or `--gpu` names.

Reading a GPU that the comparison does not use costs time (energy alone takes 3.7 ms of the driver's lock on an H200)
and records the work of others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from servers.gpu.readings import Connection, DeviceIdentity

VARIABLE = "CUDA_VISIBLE_DEVICES"
ALL = "all"


def visible(environment: Mapping[str, str]) -> tuple[str, ...] | None:
    """The names in CUDA_VISIBLE_DEVICES; None (all GPUs) if it is not set.

    CUDA ignores an invalid name and everything after it.
    """
    text = environment.get(VARIABLE)
    if text is None:
        return None
    names: list[str] = []
    for name in map(str.strip, text.split(",")):
        if not (name.isdecimal() or name.startswith(("GPU-", "MIG-"))):
            break
        names.append(name)
    return tuple(names)


def matching(
    names: Sequence[str], devices: Sequence[DeviceIdentity], parent_of: Callable[[str], str | None]
) -> tuple[DeviceIdentity, ...]:
    """The named devices, each once, in their own order; an unknown name is skipped.

    A name is an index, a UUID or an unambiguous beginning of one, or a MIG instance, which `parent_of` maps to its GPU.
    An index is NVML's, by PCI address. CUDA counts like that only with CUDA_DEVICE_ORDER=PCI_BUS_ID, or if all cards
    are of one kind. So `abserve compare` names UUIDs as soon as the servers report theirs.
    """
    wanted: set[int] = set()
    for name in names:
        if name.isdecimal():
            found = [device.index for device in devices if device.index == int(name)]
        else:
            uuid: str | None = name
            if name.startswith("MIG-GPU-"):  # MIG-GPU-UUID/INSTANCE/COMPUTE of drivers before 470
                uuid = name.removeprefix("MIG-").partition("/")[0]
            elif name.startswith("MIG-"):
                uuid = parent_of(name)
            found = [device.index for device in devices if uuid and device.uuid.startswith(uuid)]
        if len(found) == 1:
            wanted.add(found[0])
    return tuple(device for device in devices if device.index in wanted)


def select_devices(
    connection: Connection, names: Sequence[str] | None, parent_of: Callable[[str], str | None]
) -> Connection:
    """The connection with the named devices only; with `names` None, all. `device_count` stays that of the machine.

    The status is `ok` if the driver answers for the named devices, even if another one fails. Without a match there is
    no device, and `error` gives the reason.
    """
    if names is None or not connection.devices:
        return connection
    chosen = matching(names, connection.devices, parent_of)
    if chosen:
        return replace(connection, status="ok", devices=chosen)
    named = ", ".join(names) or f"in {VARIABLE}, which is empty"
    error = connection.error or f"this machine has {connection.device_count} GPUs, but no GPU named {named}"
    return replace(connection, error=error, devices=())
