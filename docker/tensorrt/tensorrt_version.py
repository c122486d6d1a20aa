"""tensorrt_version.py FILE: writes the version of the TensorRT library in this image, as the library reports it.

Runs in Triton's image with Python's standard library only; the TensorRT library loads without a GPU.
"""

import ctypes
import json
import re
import sys
from pathlib import Path

FOLDERS = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/opt/tritonserver/lib",
    "/usr/local/tensorrt/lib",
)


def candidates() -> list[str]:
    """Paths of the libraries, the newest major version first, then names for the loader's search."""
    found = {str(path) for folder in FOLDERS for path in Path(folder).glob("libnvinfer.so.*")}

    def major(path: str) -> int:
        number = re.search(r"\.so\.(\d+)", path)
        return int(number.group(1)) if number else 0

    return sorted(found, key=major, reverse=True) + [f"libnvinfer.so.{number}" for number in (12, 11, 10)]


def read_version(name: str) -> str:
    """The version as in `11.2.1.2`. Raises OSError if the library is missing, AttributeError if it is older than 10."""
    library = ctypes.CDLL(name)
    parts = ("Major", "Minor", "Patch", "Build")
    return ".".join(str(getattr(library, f"getInferLib{part}Version")()) for part in parts)


def main() -> int:
    """Exit status 1 if no library loads."""
    reasons = []
    for name in candidates():
        try:
            version = read_version(name)
        except (OSError, AttributeError) as exc:
            reasons.append(f"{name}: {exc}")
            continue
        target = Path(sys.argv[1])
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps({"tensorrt": version, "library": name}) + "\n", encoding="utf-8")
        sys.stdout.write(f"this image serves with TensorRT {version} ({name})\n")
        return 0
    sys.stderr.write("no TensorRT library loads in this image:\n  " + "\n  ".join(reasons) + "\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
