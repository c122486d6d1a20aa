"""Model specifications: tensors, preprocessing, weights, sample input. Not in scope: executing them (`engines`).

A user's own file describes its module with `Input`, `Output` and `UserModel` of `abserve.models`, which are these
(docs/models.md).
"""

from servers.models.specification import Input, Output, Preprocessing, UserModel

__all__ = ["Input", "Output", "Preprocessing", "UserModel"]
