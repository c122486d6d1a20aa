"""TLS for https:// and grpcs:// connections: their settings, their socket, and sentences about failures.

The `ssl` module encrypts a connection and copies every byte; connections without TLS use the plain socket.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

from loadgen.records.run import Access

AlpnProtocol = Literal["http/1.1", "h2"]
"""The application protocol to negotiate (ALPN, RFC 7301)."""
_RECORD_BYTES = 16 * 1024
_MOST_BYTES = 16 * _RECORD_BYTES
"""Most bytes per call, after which a deadline can be checked."""
_NOT_TLS = {
    "WRONG_VERSION_NUMBER",
    "HTTP_REQUEST",
    "RECORD_LAYER_FAILURE",
    "PACKET_LENGTH_TOO_LONG",
    "UNKNOWN_PROTOCOL",
}
_OTHER_HOST = "is not for {host}; give a host name that it is for, or do not verify it (option insecure)"
_UNKNOWN_AUTHORITY = (
    "is signed by an unknown authority; give that authority's certificate (option ca), or do not verify it (option "
    "insecure)"
)
_UNVERIFIED: Mapping[int, str] = {
    9: "is not valid yet; correct the clock, or do not verify it (option insecure)",
    10: "has expired; renew it, or do not verify it (option insecure)",
    **dict.fromkeys((62, 64), _OTHER_HOST),
    **dict.fromkeys((2, 18, 19, 20, 21), _UNKNOWN_AUTHORITY),
}
"""Why a certificate is not accepted, by OpenSSL's codes X509_V_ERR_…"""


class TlsError(OSError):
    """The files of a connection cannot be used, or a handshake failed; the message says why and what to do."""


class TlsSocket(ssl.SSLSocket):
    """A TLS socket that sends parts, notices a close and reads without waiting, as the clients do with a plain one."""

    def sendmsg(self, parts: Sequence[bytes | memoryview], *_: Any) -> int:  # type: ignore[override]  # without ancillary data
        """Send the first bytes of the parts: small ones together in one record, a large one without joining."""
        data: bytes | memoryview = parts[0]
        if len(data) < _RECORD_BYTES:
            room, joined = _RECORD_BYTES, []
            for part in parts:
                joined.append(memoryview(part)[:room])
                room -= len(joined[-1])
                if room == 0:
                    break
            data = b"".join(joined)
        try:
            return self.send(memoryview(data)[:_MOST_BYTES]) if data else 0
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None
        except ssl.SSLEOFError:
            raise BrokenPipeError from None

    def recv(self, size: int = 1024, flags: int = 0) -> bytes:
        """With MSG_PEEK the bytes are lost: nobody reads on after a connection was found unusable."""
        try:
            return super().recv(size, flags & ~socket.MSG_PEEK)
        except ssl.SSLWantReadError:
            raise BlockingIOError from None

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        """Read decrypted bytes."""
        try:
            return super().recv_into(buffer, nbytes, flags)
        except ssl.SSLWantReadError:
            raise BlockingIOError from None


def tls_context(access: Access, protocol: AlpnProtocol) -> ssl.SSLContext:
    """The context of connections with these files. Raises `TlsError` when one cannot be used."""
    return _context(access.ca, access.insecure, access.cert, access.key, protocol)


@lru_cache(maxsize=16)
def _context(ca: str | None, insecure: bool, cert: str | None, key: str | None, protocol: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.sslsocket_class = TlsSocket
    context.set_alpn_protocols([protocol])
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    elif ca is None:
        context.load_default_certs()
    else:
        try:
            context.load_verify_locations(ca)
        except OSError as exc:
            raise TlsError(f"{ca} is not a file of CA certificates in PEM form ({_words(exc)})") from None
    if cert is not None:
        try:
            context.load_cert_chain(cert, key, password=lambda: "")  # else OpenSSL would ask on the terminal
        except OSError as exc:
            files = cert if key is None else f"{cert} with {key}"
            raise TlsError(
                f"{files} is not a client certificate with its unencrypted key in PEM form ({_words(exc)})"
            ) from None
    return context


def wrapped_socket(
    connection: socket.socket, context: ssl.SSLContext, host: str, protocol: AlpnProtocol
) -> ssl.SSLSocket:
    """The connection after its handshake; it is closed when that fails. Raises `TlsError`, `TimeoutError`."""
    try:
        made = context.wrap_socket(connection, server_hostname=host)
    except TimeoutError:
        connection.close()
        raise TimeoutError(
            "no answer to the TLS handshake; if the server does not speak TLS, give its address with http://"
        ) from None
    except (OSError, ValueError) as exc:
        connection.close()
        raise TlsError(failure_reason(exc, host)) from None
    if protocol == "h2" and made.selected_alpn_protocol() != "h2":
        made.close()
        raise TlsError("it does not offer HTTP/2 over TLS (ALPN h2), which gRPC needs; give its gRPC address")
    return made


def speaks_tls(host: str, port: int, timeout_s: float) -> bool:
    """Whether a server answers a TLS handshake, whatever its certificate."""
    try:
        with socket.create_connection((host, port), timeout=timeout_s) as connection:
            wrapped_socket(connection, _context(None, True, None, None, "http/1.1"), host, "http/1.1").close()
    except TlsError as exc:
        return "TLS alert" in str(exc)
    except OSError:
        return False
    return True


def failure_reason(exc: Exception, host: str = "the server") -> str:
    """Why a connection failed, in a few words; for failures of TLS with the remedy."""
    if isinstance(exc, ssl.SSLCertVerificationError):
        words = _UNVERIFIED.get(exc.verify_code, f"cannot be verified: {exc.verify_message}")
        return f"the server's certificate {words.replace('{host}', host)}"
    if not isinstance(exc, ssl.SSLError):
        return (exc.strerror if isinstance(exc, OSError) else None) or str(exc)
    ssl_reason = exc.reason or ""
    if ssl_reason in _NOT_TLS:
        return "the server does not speak TLS; give its address with http:// or grpc://"
    if "CERTIFICATE_REQUIRED" in ssl_reason or ssl_reason.endswith("ALERT_HANDSHAKE_FAILURE"):
        return "TLS alert: the server refuses the handshake; it may want a client certificate (options cert and key)"
    if "ALERT" in ssl_reason and ("CERTIFICATE" in ssl_reason or "UNKNOWN_CA" in ssl_reason):
        return "TLS alert: the server does not accept the client certificate (options cert and key)"
    if isinstance(exc, ssl.SSLEOFError):
        return "the server closed the connection in the TLS handshake; it may not speak TLS"
    return f"TLS alert: {_words(exc)}" if "ALERT" in ssl_reason else f"TLS failed: {_words(exc)}"


def _words(exc: OSError) -> str:
    """OpenSSL's reason in words, or the operating system's."""
    if isinstance(exc, ssl.SSLError) and exc.reason:
        return exc.reason.lower().replace("_", " ")
    return exc.strerror or str(exc)
