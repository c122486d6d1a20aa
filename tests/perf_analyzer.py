"""NVIDIA's own load generator, from the last wheel of tritonclient that runs on this glibc, kept in a cache folder.

    python tests/perf_analyzer.py     prints how to call it

The binary needs libb64 and a libcudart, both of which the wheel nvidia-pytriton brings.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from servers.triton.installation import TritonError
from servers.triton.wheel import find_wheel

WHEEL = "tritonclient==2.50.0"
MEMBER = "tritonclient-2.50.0.data/data/bin/perf_analyzer"
LIBRARIES = {"libb64.so.0d": "libb64-*.so.0d", "libcudart.so.12": "libcudart-*.so.12*"}
"""The name that the binary asks for → the file's name in nvidia_pytriton.libs."""
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "abserve" / "perf_analyzer-2.50.0"


class PerfAnalyzerUnavailableError(Exception):
    """It cannot be had here; the message says why."""


@dataclass(frozen=True)
class PerfAnalyzer:
    """A binary that runs."""

    binary: Path
    libraries: Path

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "LD_LIBRARY_PATH": str(self.libraries)}

    def run(self, *arguments: str, timeout: float = 120) -> str:
        """What it prints. Raises `AssertionError` when it fails."""
        done = subprocess.run(
            [str(self.binary), *arguments], env=self.environment, capture_output=True, text=True, timeout=timeout
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def find_perf_analyzer(cache: Path = CACHE) -> PerfAnalyzer:
    """Downloaded once. Raises `PerfAnalyzerUnavailableError`."""
    found = PerfAnalyzer(cache / "bin" / "perf_analyzer", cache / "lib")
    if not found.binary.exists():
        _download(found.binary)
    _link_libraries(found.libraries)
    done = subprocess.run([str(found.binary), "--version"], env=found.environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise PerfAnalyzerUnavailableError(f"perf_analyzer does not run here: {done.stderr.strip()}")
    return found


def _download(binary: Path) -> None:
    binary.parent.mkdir(parents=True, exist_ok=True)
    folder = binary.parent.parent
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), WHEEL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    wheel = next(folder.glob("tritonclient-2.50.0-*.whl"), None)
    if done.returncode != 0 or wheel is None:
        raise PerfAnalyzerUnavailableError(f"pip cannot download {WHEEL}: {(done.stderr.splitlines() or ['?'])[-1]}")
    with zipfile.ZipFile(wheel) as archive:
        if MEMBER not in archive.namelist():
            raise PerfAnalyzerUnavailableError(f"{wheel.name} has no perf_analyzer for this machine")
        temporary = binary.with_suffix(".part")
        temporary.write_bytes(archive.read(MEMBER))
    temporary.chmod(0o755)
    temporary.rename(binary)
    wheel.unlink()


def _link_libraries(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    try:
        brought = find_wheel().libraries
    except TritonError:
        return  # the system may have them
    assert brought is not None
    for name, pattern in LIBRARIES.items():
        source = next(brought.glob(pattern), None)
        link = folder / name
        if source is not None and (not link.is_symlink() or link.readlink() != source):
            link.unlink(missing_ok=True)
            link.symlink_to(source)


if __name__ == "__main__":
    analyzer = find_perf_analyzer()
    sys.stdout.write(f"LD_LIBRARY_PATH={analyzer.libraries} {analyzer.binary}\n")
