"""Base images for a machine that cannot pull any: a Debian, in a registry of this machine, pinned by its digest there.

The Python and Prometheus in them are Debian's, so they test our files and programs and not the vendors' images. This
machine's CA certificates and pip configuration are in the stand-ins, so that our own files need not know of them.
"""

from __future__ import annotations

import configparser
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MIRROR = "http://deb.debian.org/debian"
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
PULL_SECONDS = 300
PYTHON_PACKAGES = "python3,python3-venv,python3-pip,libpython3.11,ca-certificates"
PROMETHEUS_PACKAGES = "prometheus,wget,ca-certificates"


class StandInError(Exception):
    """A base image can neither be pulled nor made; the message says what is missing."""


def pinned_images() -> dict[str, str]:
    """The defaults of docker-compose.yml, by setting: each reference a tag with its digest."""
    return dict(re.findall(r"\$\{(\w+_IMAGE):-([^}]+)\}", (ROOT / "docker-compose.yml").read_text()))


@dataclass(frozen=True, slots=True)
class BaseImages:
    """What the settings of the base images must be here, and where each image came from."""

    settings: dict[str, str]
    origins: dict[str, str]
    registry: Registry | None
    """Holds the stand-ins; None where all images could be pulled."""


class Registry:
    """Debian's docker-registry on a free port, with its files in `folder`: it gives a stand-in a digest."""

    def __init__(self, folder: Path) -> None:
        if shutil.which("docker-registry") is None:
            raise StandInError("the base images cannot be pulled, and stand-ins need docker-registry (apt-get install)")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"localhost:{free.getsockname()[1]}"
        configuration = {
            "version": 0.1,
            "storage": {"filesystem": {"rootdirectory": str(folder)}},
            "http": {"addr": self.address},
        }
        file = folder / "registry.yml"
        file.write_text(json.dumps(configuration))
        with (folder / "registry.log").open("wb") as log:
            self._process = subprocess.Popen(["docker-registry", "serve", str(file)], stdout=log, stderr=log)

    def push(self, image: str, name: str) -> str:
        """`image` under `name`, a repository with a tag; returns the reference to pull it by: tag and digest."""
        reference = f"{self.address}/{name}"
        _docker("tag", image, reference)
        for _ in range(100):
            done = _docker("push", reference)
            if done.returncode == 0:
                found = re.search(r"digest: (sha256:[0-9a-f]{64})", done.stdout)
                assert found is not None
                return f"{reference}@{found[1]}"
            time.sleep(0.1)  # it has just been started
        raise StandInError(f"{reference} could not be pushed: {done.stderr.strip()[-300:]}")

    def close(self) -> None:
        """End it; the engine keeps the images, without the names that lead here."""
        self._process.terminate()
        self._process.wait(timeout=20)
        form = "{{.Repository}}:{{.Tag}} {{.Repository}}@{{.Digest}}"
        for line in _docker("image", "ls", "--digests", "--format", form).stdout.splitlines():
            for reference in line.split():
                if reference.startswith(f"{self.address}/") and "<none>" not in reference:
                    _docker("image", "rm", reference)


def ensure_base_images(folder: Path) -> BaseImages:
    """Every base image of the cpu profile, pulled or made. `folder` is for the registry. Raises `StandInError`."""
    wanted = pinned_images()
    images = BaseImages({}, {}, None)
    for setting, packages, entrypoint in (
        ("PYTHON_IMAGE", PYTHON_PACKAGES, None),
        ("PROMETHEUS_IMAGE", PROMETHEUS_PACKAGES, '["/usr/bin/prometheus"]'),
    ):
        reference = wanted[setting]
        if _docker("image", "inspect", reference).returncode == 0:
            images.origins[setting] = "present"
        elif _pull(reference):
            images.origins[setting] = "pulled"
        else:
            name = reference.partition("@")[0]
            stand_in = f"stand-in/{name}"
            if _docker("image", "inspect", stand_in).returncode != 0:
                _make(stand_in, packages, entrypoint)
            if images.registry is None:
                images = replace(images, registry=Registry(folder))
            assert images.registry is not None
            reference = images.registry.push(stand_in, name)
            images.origins[setting] = "stand-in"
        images.settings[setting] = reference
    return images


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
