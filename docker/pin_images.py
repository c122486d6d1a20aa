"""Writes the digest of each image's tag into docker-compose.yml, or another file: `python pin_images.py [FILE]`.

Rewrites only the defaults ${NAME_IMAGE:-TAG[@DIGEST]}, and the lines NAME_IMAGE=TAG[@DIGEST] of a settings file. The
files beside it that name the same images (`COPIES`) get the same digests.
`docker buildx` asks the registry; the engine knows images that were pulled before. Exit status 1 with one sentence for
every image without a known digest.
"""

import re
import subprocess
import sys
from pathlib import Path

IMAGE = re.compile(r"(?:^|(?<=\$\{))(\w+_IMAGE)(?:=|:-)([^@\s}]+)(?:@(sha256:[0-9a-f]{64}))?(?=\}|$)", re.MULTILINE)
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
COPIES = ("docker/kubernetes/gpu/triton.yaml", "servers/export/tensorrt.py")


def digest_of(tag: str) -> str | None:
    """The digest of the tag's index or only manifest; None if neither registry nor engine knows it."""
    told = output("docker", "buildx", "imagetools", "inspect", "--format", "{{.Manifest.Digest}}", tag)
    if DIGEST.fullmatch(told):
        return told
    names = output("docker", "image", "inspect", "--format", '{{join .RepoDigests "\\n"}}', tag).split()
    repository = tag.rpartition(":")[0]
    return next((digest for name, _, digest in (n.partition("@") for n in names) if name == repository), None)


def output(*command: str) -> str:
    """The command's output; empty if it fails or is not installed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def main() -> int:
    """Write every known digest. Exit status 1 if one is unknown."""
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "docker-compose.yml")
    if not path.is_file():
        sys.stderr.write(f"{path} does not exist; name docker-compose.yml or your .env\n")
        return 1
    text = path.read_text(encoding="utf-8")
    missing = 0
    for name, tag, before in IMAGE.findall(text):
        now = digest_of(tag)
        if now is None:
            missing += 1
            sys.stderr.write(f"{name}: the digest of {tag} cannot be read; check the network, or docker pull {tag}\n")
            continue
        change = "as before" if now == before else f"it was {before or 'not pinned'}"
        sys.stdout.write(f"{name}: {tag} is {now}, {change}\n")
        place = re.compile(rf"((?:^|(?<=\$\{{)){name}(?:=|:-)){re.escape(tag)}(?:@sha256:\w+)?", re.MULTILINE)
        text = place.sub(rf"\g<1>{tag}@{now}", text)
        for copy in filter(Path.is_file, (path.parent / name for name in COPIES)):
            repeated = re.sub(rf"\b{re.escape(tag)}@sha256:\w+", f"{tag}@{now}", copy.read_text(encoding="utf-8"))
            copy.write_text(repeated, encoding="utf-8")
    path.write_text(text, encoding="utf-8")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
