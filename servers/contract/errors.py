"""What can go wrong with a request, in the protocol's terms.

    ContractError
    ├── InvalidRequestError      the request contradicts the protocol or the model     (INVALID_ARG)
    ├── NotFoundError            no such model, version, route or region               (NOT_FOUND)
    ├── TooLargeError            a limit of the server is exceeded                      (INVALID_ARG, own HTTP status)
    ├── UnavailableError         queue full, deadline passed, not ready, shutting down  (UNAVAILABLE)
    ├── UnsupportedError         known to the protocol, not offered here                (UNSUPPORTED)
    └── InternalError            the server's own fault                                 (INTERNAL)

They know nothing of HTTP or gRPC: each door holds one table from these types to its own status.
A message is one sentence for the client: never a path, a traceback or a shared-memory key.
"""


class ContractError(Exception):
    """Root of every error that a client may be told about; `str(error)` is what it is told."""


class InvalidRequestError(ContractError):
    """The request contradicts the protocol or the model's signature."""


class NotFoundError(ContractError):
    """The model, version, route or region that the request names does not exist."""


class TooLargeError(ContractError):
    """The request exceeds a limit of the server; the message names the limit and its value."""


class UnavailableError(ContractError):
    """The request was not executed and may be sent again: queue full, deadline passed, not ready."""


class UnsupportedError(ContractError):
    """The protocol knows this, the server does not offer it."""


class InternalError(ContractError):
    """The server failed; the cause is in its log, not in this message."""
