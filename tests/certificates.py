"""Certificates for tests, made by the openssl command: an authority, and what it signs."""

from __future__ import annotations

import subprocess
from pathlib import Path


class Authority:
    """An authority in a folder. Files hold a certificate with its key."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "authority.pem"
        _openssl(
            "req", "-x509", *_KEY, "-subj", "/CN=test authority", "-days", "2", "-keyout", self._part("key"),
            "-out", self._part("crt"), "-addext", "basicConstraints=critical,CA:TRUE",
        )  # fmt: skip
        self.file.write_bytes(self._part("crt").read_bytes())

    def sign(self, name: str, hosts: str = "IP:127.0.0.1,IP:::1,DNS:localhost", *, expired: bool = False) -> Path:
        """A file with a certificate for these hosts and its key."""
        request, signed, key, extension = (self.folder / f"{name}.{end}" for end in ("csr", "crt", "key", "ext"))
        extension.write_text(f"subjectAltName={hosts}\n")
        _openssl("req", *_KEY, "-subj", f"/CN={name}", "-keyout", key, "-out", request)
        days = "-1" if expired else "2"
        _openssl(
            "x509", "-req", "-in", request, "-CA", self._part("crt"), "-CAkey", self._part("key"), "-CAcreateserial",
            "-days", days, "-extfile", extension, "-out", signed,
        )  # fmt: skip
        both = self.folder / f"{name}.pem"
        both.write_bytes(signed.read_bytes() + key.read_bytes())
        return both

    def _part(self, end: str) -> Path:
        return self.folder / f"authority.{end}"


_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def _openssl(*arguments: str | Path) -> None:
    done = subprocess.run(["openssl", *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
