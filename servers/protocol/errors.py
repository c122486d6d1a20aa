"""What can go wrong with a request, in the protocol's terms. HTTP and gRPC map these errors to their own statuses.

A message is one sentence for the client: never a path, a traceback or a shared-memory key.
"""


class ContractError(Exception):
    """Root of every error that a client may see; `str(error)` is the message."""


class InvalidRequestError(ContractError):
    """The request contradicts the protocol or the model's signature."""


class NotFoundError(ContractError):
    """The model, version, route or region that the request names does not exist."""


class TooLargeError(ContractError):
    """The request exceeds a limit of the server; the message names the limit and its value."""


class UnavailableError(ContractError):
    """The request was not executed and may be sent again: queue full, deadline passed, not ready."""


class UnsupportedError(ContractError):
    """A feature of the protocol that the server does not offer."""


class InternalError(ContractError):
    """The server failed; the cause is in its log, not in this message."""
