"""What can go wrong while an artefact is made.

ExportError
└── ParityError    the file does not compute what torch computes; no artefact is kept
"""


class ExportError(Exception):
    """The artefact could not be made; the message names the remedy where there is one."""


class ParityError(ExportError):
    """The exported file's answers differ from torch's; the message gives the measured value and the threshold."""
