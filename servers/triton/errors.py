"""Errors of the embedded Triton; each message is one sentence with its remedy.

TritonError
├── TritonUnavailableError   this machine or Python environment cannot run it
├── TritonOptionError        an option cannot be honoured
└── TritonDiedError          the server, or the process that executes the model, ended, with the end of its log
"""

from __future__ import annotations


class TritonError(Exception):
    """Root of the errors of the embedded Triton."""


class TritonUnavailableError(TritonError):
    """This machine or this Python environment cannot run the embedded Triton."""


class TritonOptionError(TritonError):
    """An option cannot be honoured, such as a port in use; the message names the option."""


class TritonDiedError(TritonError):
    """The server ended, or lost the process that executes its model.

    `log_lines` are the relevant ones where the message has no cause.
    """

    def __init__(self, message: str, log_lines: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.log_lines = log_lines
