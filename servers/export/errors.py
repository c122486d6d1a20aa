"""Errors of an export.

ExportError
└── ParityError    the file does not compute the same as torch; no artefact is kept
"""


class ExportError(Exception):
    """The artefact cannot be made; the message names the remedy where there is one."""


class ParityError(ExportError):
    """The exported file's answers differ from torch's; the message gives the measured value and the threshold."""
