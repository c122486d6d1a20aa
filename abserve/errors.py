"""The one error of this package."""

from __future__ import annotations


class AbserveError(Exception):
    """What was asked for cannot be done. The message is the sentence with which the command would end."""
