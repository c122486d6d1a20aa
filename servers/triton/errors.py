"""What can go wrong with the embedded Triton, each message one sentence with its remedy.

TritonError
├── TritonUnavailableError   this machine or environment cannot run it as it is
├── PortTakenError           something else listens where it should
└── TritonDiedError          it, or the process that executes the model, ended by itself; carries its last log lines
"""

from __future__ import annotations


class TritonError(Exception):
    """Root of everything that the embedded Triton may fail with."""


class TritonUnavailableError(TritonError):
    """This machine or this Python environment cannot run the embedded Triton; the message names the remedy."""


class PortTakenError(TritonError):
    """A port that the server needs is not free; the message names the option that chooses another."""


class TritonDiedError(TritonError):
    """The server ended, or lost the process that executes its model; `log_lines` are the last that matter."""

    def __init__(self, message: str, log_lines: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.log_lines = log_lines
