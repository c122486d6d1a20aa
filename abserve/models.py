"""What a user's model file imports to describe its module (docs/models.md); the same objects as in `servers.models`."""

from abserve.packages import own_packages

with own_packages():
    from servers.models import Input, Output, Preprocessing, UserModel

__all__ = ["Input", "Output", "Preprocessing", "UserModel"]
