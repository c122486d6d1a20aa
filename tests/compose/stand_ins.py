"""Base images for a machine that cannot pull any: a Debian under the names that our Dockerfile and compose file use.

    python tests/compose/stand_ins.py        makes what is missing and cannot be pulled

The Python and Prometheus in them are Debian's, so they test our files and programs and not the vendors' images. This
machine's CA certificates and pip configuration are in the stand-ins, so that our own files need not know of them.
"""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MIRROR = "http://deb.debian.org/debian"
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
PULL_SECONDS = 300
PYTHON_PACKAGES = "python3,python3-venv,python3-pip,libpython3.11,ca-certificates"
PROMETHEUS_PACKAGES = "prometheus,wget,ca-certificates"


class StandInError(Exception):
    """A base image can neither be pulled nor made; the message says what is missing."""


def python_image() -> str:
    """What the Dockerfile builds on."""
    found = re.search(r"^ARG PYTHON_IMAGE=(\S+)$", (ROOT / "docker/Dockerfile").read_text(), re.MULTILINE)
    assert found is not None
    return found.group(1)


def prometheus_image() -> str:
    """What the compose file names."""
    found = re.search(r"image: (prom/prometheus:\S+)", (ROOT / "docker-compose.yml").read_text())
    assert found is not None
    return found.group(1)


def ensure_base_images() -> dict[str, str]:
    """Every base image of the cpu profile → "present", "pulled" or "stand-in". Raises `StandInError`."""
    made = {}
    for image, packages, entrypoint in (
        (python_image(), PYTHON_PACKAGES, None),
        (prometheus_image(), PROMETHEUS_PACKAGES, '["/usr/bin/prometheus"]'),
    ):
        if _docker("image", "inspect", image).returncode == 0:
            made[image] = "present"
        elif _pull(image):
            made[image] = "pulled"
        else:
            _make(image, packages, entrypoint)
            made[image] = "stand-in"
    return made


def _pull(image: str) -> bool:
    try:
        return _docker("pull", "--quiet", image, timeout=PULL_SECONDS).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def _make(image: str, packages: str, entrypoint: str | None) -> None:
    if shutil.which("debootstrap") is None or os.geteuid() != 0:
        raise StandInError(f"{image} cannot be pulled, and making a stand-in needs root and debootstrap")
    with tempfile.TemporaryDirectory(prefix="abserve-stand-in-") as name:
        root = Path(name) / "root"
        command = ["debootstrap", "--variant=minbase", f"--include={packages}", "bookworm", str(root), MIRROR]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise StandInError(f"debootstrap: {(done.stderr or done.stdout).strip()[-300:]}")
        shutil.rmtree(root / "var/cache/apt", ignore_errors=True)
        shutil.rmtree(root / "var/lib/apt/lists", ignore_errors=True)
        shutil.copyfile(CERTIFICATES, root / "etc/ssl/certs/ca-certificates.crt")
        (root / "etc/pip.conf").write_text(pip_configuration())
        if entrypoint is not None:  # as in the vendor's image, so that a volume over it belongs to this user
            (root / "prometheus").mkdir()
            os.chown(root / "prometheus", 65534, 65534)
        _import(root, image, entrypoint)


def _import(root: Path, image: str, entrypoint: str | None) -> None:
    changes = [] if entrypoint is None else ["--change", f"ENTRYPOINT {entrypoint}", "--change", "USER 65534:65534"]
    files = ["tar", "-C", str(root), "--one-file-system", *(f"--exclude=./{name}/*" for name in ("proc", "sys", "dev"))]
    with subprocess.Popen([*files, "-c", "."], stdout=subprocess.PIPE) as archive:
        into = ["docker", "import", *changes, "-", image]
        subprocess.run(into, stdin=archive.stdout, check=True, capture_output=True)
    if archive.returncode != 0:
        raise StandInError(f"the files of {image} could not be packed")


def pip_configuration() -> str:
    """This machine's, for builds: which index, which certificates. Folders of this machine mean nothing in there."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    section = {}
    for line in listed.stdout.splitlines():
        key, _, value = line.partition("=")
        name = key.rpartition(".")[2]
        values = [word for word in value.strip("'\"").split() if not word.startswith(("file:", "/opt", "~"))]
        if name in {"index-url", "extra-index-url", "timeout", "default-timeout", "trusted-host"} and values:
            section["timeout" if name == "default-timeout" else name] = " ".join(values)
    parser = configparser.ConfigParser(interpolation=None)
    parser["global"] = {"cert": str(CERTIFICATES), **section}
    with tempfile.TemporaryFile("w+") as file:
        parser.write(file)
        file.seek(0)
        return file.read()


def _docker(*arguments: str, timeout: float | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["docker", *arguments], capture_output=True, text=True, check=False, timeout=timeout)


if __name__ == "__main__":
    for name, how in ensure_base_images().items():
        sys.stdout.write(f"{name}: {how}\n")
