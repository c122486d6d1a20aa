"""Default values that several servers share, and which settings that only affect a server's speed apply (`--tuning`).

`all` leaves a server as it is configured, `none` gives it its own defaults, and a list of names keeps only these.
`abserve compare` starts such servers beside an arm to see whether its configuration makes it slow. Imports no other
module of the project.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

HOST = "127.0.0.1"
PRECISION: Final = "auto"
MODE = "auto"
DEVICE = "auto"
MAX_BATCH_SIZE = 32
MAX_QUEUE_DELAY_US = 0
QUEUE_SIZE = 512
ARTEFACTS = ".artefacts"

ENGINES = "torch, onnxruntime, tensorrt, openvino, jax, another installed engine, or null (no model)"
PRECISIONS = "auto (fp16 on a GPU, fp32 on a CPU), fp32, tf32, fp16, bf16, int8 or fp8, as the engine offers them."
SPINNING = (
    "Whether the threads of torch and onnxruntime spin on the CPU while they wait for each other. auto: on, as both do "
    "by default; off suits cores that other programs use."
)
"""The help of `--engine`, `--precision` and `--spinning`."""


ALL = "all"
NONE = "none"


class OptionError(ValueError):
    """An option cannot be honoured, such as a port in use; the message names the option and what to do."""


def chosen_tuning(tuning: str, names: Iterable[str]) -> frozenset[str]:
    """Those of the set options `names` that the choice `tuning` leaves in effect. Raises `OptionError`."""
    have = frozenset(names)
    if tuning in (ALL, NONE):
        return have if tuning == ALL else frozenset()
    asked = frozenset(name.strip() for name in tuning.split(","))
    if unknown := asked - have:
        present = f"set here: {', '.join(sorted(have))}" if have else "none is set here"
        raise OptionError(f"--tuning {tuning}: {', '.join(sorted(unknown))} is not a setting in effect; {present}")
    return asked
