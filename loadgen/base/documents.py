"""Reads files and JSON from other programs within limits on size and depth, and makes every text in it printable.

The result is a value or a `DocumentError`, whatever the bytes are. Servers' documents and stored records are decoded
only here. A folder may have been made by another user: the functions `…_inside` read only regular files inside it,
follow no link, and never wait for a pipe or read a device.
"""

from __future__ import annotations

import errno
import gzip
import os
import secrets
import stat
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath
from typing import Any, BinaryIO, Literal

import msgspec

MOST_BYTES = 2**20
"""Limit of a server's document; Triton's configuration of an ensemble of 100 models is a tenth of it."""
MOST_RECORD_BYTES = 2**25
"""Limit of a stored record; the largest published one has 1.4 MB."""
MOST_VALUES = 2**20
"""Limit of a document's values, of which that one has 38,000: for two bytes of JSON Python may need 100."""
MOST_DEPTH = 32
MOST_CHARACTERS = 1000
_MOST_WORDS = 300
_GZIP_OR_ZLIB = 47
"""zlib's number for the largest window, with the header of either format."""


class DocumentError(ValueError):
    """A document cannot be used; the message says why, but not which document, unless a function says so."""


def one_line(words: str, most: int = _MOST_WORDS) -> str:
    """Make a text from another program fit for records and terminals: one line of at most `most` characters (0: any
    number). Control characters, escape codes and marks that change the direction of text are replaced."""
    line = " ".join(words[: 4 * most].split()) if most else " ".join(words.split())
    if most and len(line) > most:
        line = line[: most - 1] + "…"
    return printable(line)


def printable(text: str) -> str:
    """Replace every character that is not printable, also line breaks."""
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


def last_line(output: bytes) -> str:
    """Why a command of abserve failed: the last line that it printed."""
    lines = [line for line in output.decode("utf-8", "replace").splitlines() if line.strip()]
    return one_line(lines[-1].strip().removeprefix("error: "), 500) if lines else "it printed nothing"


def uncompressed(body: bytes, coding: str, most_bytes: int) -> bytes | None:
    """The beginning of a body without its compression; None if it is damaged or in another coding than gzip and
    deflate."""
    coding = coding.strip().lower()
    if coding in ("gzip", "x-gzip", "deflate"):
        with suppress(zlib.error):
            return zlib.decompressobj(_GZIP_OR_ZLIB).decompress(body, most_bytes)
    return body if coding in ("identity", "") else None


def open_inside(folder: Path, name: str) -> BinaryIO:
    """Open a regular file by its path relative to `folder`, no part of which may be a link. Raises `OSError`, and
    `DocumentError` for anything else."""
    with _directory_of(folder, name) as (directory, last):
        return _open_regular(last, os.O_NOFOLLOW, directory)


def open_named(path: Path) -> BinaryIO:
    """Open a regular file that the user has named, also by a link. Raises `OSError` and `DocumentError`."""
    return _open_regular(str(path), 0)


def read_inside(folder: Path, name: str, most_bytes: int = MOST_RECORD_BYTES) -> bytes:
    """The content of a file inside `folder`; see `open_inside`. Raises `OSError` and `DocumentError`."""
    with open_inside(folder, name) as file:
        return read_limited(file, most_bytes)


def read_named(path: Path, most_bytes: int = MOST_RECORD_BYTES) -> bytes:
    """The content of a file that the user has named; see `open_named`. Raises `OSError` and `DocumentError`."""
    with open_named(path) as file:
        return read_limited(file, most_bytes)


def read_limited(file: BinaryIO, most_bytes: int) -> bytes:
    """A whole regular file. Raises `DocumentError` if it is longer than the limit."""
    size = os.fstat(file.fileno()).st_size
    if size > most_bytes:
        raise DocumentError(f"it has {size:,} bytes, more than the limit of {most_bytes:,}")
    return file.read(size)


def list_inside(folder: Path, name: str) -> list[str]:
    """The entries of a directory inside `folder`, as sorted paths relative to `folder`; empty if there is no such
    directory. Raises `OSError`, and `DocumentError` if a part of its path is a link."""
    try:
        with _directory_of(folder, f"{name}/*") as (directory, _):
            return [f"{name}/{entry}" for entry in sorted(os.listdir(directory))]  # noqa: PTH208 (of an open directory)
    except FileNotFoundError:
        return []


@contextmanager
def _directory_of(folder: Path, name: str) -> Iterator[tuple[int, str]]:
    """The open directory that holds the file, and the file's name in it."""
    path = PurePath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
        raise DocumentError(f"{one_line(name)!r} leads out of the folder {folder}")
    *way, last = path.parts
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in way:
            try:
                inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
            except OSError as exc:
                raise _link_error(exc, part, directory) from exc
            os.close(directory)
            directory = inner
        yield directory, last
    finally:
        os.close(directory)


def _open_regular(name: str, flags: int, directory: int | None = None) -> BinaryIO:
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags, dir_fd=directory)
    except OSError as exc:
        raise _link_error(exc, name, directory) from exc
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DocumentError("it is not a regular file")
    return os.fdopen(descriptor, "rb")


def _link_error(error: OSError, name: str, directory: int | None) -> Exception:
    """What to raise for a part of a path that could not be opened."""
    if error.errno == errno.ENXIO:  # a socket
        return DocumentError("it is not a regular file")
    if directory is not None and error.errno in (errno.ELOOP, errno.ENOTDIR):
        if stat.S_ISLNK(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
            return DocumentError(f"{name} is a link, which may lead out of the folder; put the files in its place")
        return DocumentError(f"{name} is not a folder")
    return error


def indented(record: object) -> bytes:
    """Indented JSON, the same bytes for the same record."""
    return msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n"


def stored_path(path: Path) -> Path:
    """The file itself, or its compressed copy NAME.gz where only that exists, as in published runs."""
    packed = path.with_name(f"{path.name}.gz")
    return packed if packed.exists() and not path.exists() else path


def is_stored(folder: Path, name: str) -> bool:
    """Whether `folder` holds this file, a regular one."""
    try:
        open_inside(folder, name).close()
    except (OSError, DocumentError):
        return False
    return True


FolderKind = Literal["tuning", "engines", "comparison"]
FILES_OF: Mapping[FolderKind, tuple[str, ...]] = {
    "tuning": ("tuning.json",),
    "engines": ("matrix.json", "plan.json"),
    "comparison": ("result.json", "experiment.json"),
}
"""What each command leaves in its folder: `abserve tune`, `engines` and `compare`."""
CHOICE = "best.json"
"""What was chosen for a comparison whose folder it is in, with the runs that chose below it."""
FINAL = "final"
"""The folder in that of a tuning whose comparison is its answer."""


def kind_of(folder: Path) -> FolderKind | None:
    """What a folder holds; None also for a folder of such folders."""
    kinds = FILES_OF.items()
    return next((kind for kind, names in kinds if any(stored_path(folder / name).is_file() for name in names)), None)


def results_in(folder: Path) -> Iterator[Path]:
    """The folders of engine matrices and comparisons in a folder: itself, or those below it. Of a tuning that is its
    final comparison alone, and none of a comparison that still chooses: other runs chose, and the best of many looks
    better than it is."""
    kind = kind_of(folder)
    if kind is not None and kind != "tuning":
        yield folder
        return
    inner = [folder / FINAL] if kind == "tuning" else sorted(path for path in folder.iterdir() if path.is_dir())
    for path in inner if not (folder / CHOICE).exists() else ():
        if path.is_dir() and not path.is_symlink():
            yield from results_in(path)


def read_stored(path: Path, most_bytes: int = MOST_RECORD_BYTES) -> bytes:
    """Read a stored file that is not a link, unpacked if it is compressed. Raises `OSError` and `DocumentError`."""
    path = stored_path(path)
    with open_inside(path.parent, path.name) as file:
        if path.suffix != ".gz":
            return read_limited(file, most_bytes)
        try:
            with gzip.GzipFile(fileobj=file) as unpacked:
                content = unpacked.read(most_bytes + 1)
        except (EOFError, zlib.error, gzip.BadGzipFile) as exc:
            raise DocumentError(f"it is not a whole gzip file ({exc})") from exc
    if len(content) > most_bytes:
        raise DocumentError(f"it unpacks to more than the limit of {most_bytes:,} bytes")
    return content


def read_json(content: bytes | memoryview) -> Any:
    """Plain values, each text one line of at most MOST_CHARACTERS. Raises `DocumentError`."""
    return _clean(decode_json(content, Any, most_bytes=MOST_BYTES), MOST_DEPTH)


def decode_json(content: bytes | memoryview, kind: Any, *, most_bytes: int) -> Any:
    """A value of this type, with unchanged texts. Raises `DocumentError`."""
    if len(content) > most_bytes:
        raise DocumentError(f"it has {len(content):,} bytes, more than the limit of {most_bytes:,}")
    if isinstance(content, bytes) and content.count(b",") >= MOST_VALUES:
        raise DocumentError(f"it holds more than the limit of {MOST_VALUES:,} values")
    try:
        return msgspec.json.decode(content, type=kind)
    except RecursionError:
        raise DocumentError("it is nested too deeply") from None
    except ValueError as exc:  # msgspec's errors, and text that is not UTF-8
        raise DocumentError(one_line(str(exc))) from exc


def read_record(content: bytes, kind: Any) -> Any:
    """A stored record of this type, with printable texts. Raises `DocumentError`."""
    document = _clean(decode_json(content, Any, most_bytes=MOST_RECORD_BYTES), MOST_DEPTH, most=0)
    try:
        return msgspec.convert(document, kind, str_keys=True)
    except (ValueError, RecursionError) as exc:
        raise DocumentError(one_line(str(exc))) from exc


def _clean(value: Any, depth: int, most: int = MOST_CHARACTERS) -> Any:
    """The value with printable texts of at most `most` characters (0: any number). Raises `DocumentError` for a value
    nested deeper than `depth`, and for a number of more than 64 bits."""
    if isinstance(value, str):
        return value if value.isprintable() and (not most or len(value) <= most) else one_line(value, most)
    if isinstance(value, dict | list):
        if depth == 0:
            raise DocumentError(f"it is nested more than {MOST_DEPTH} levels deep")
        if isinstance(value, list):
            return [_clean(element, depth - 1, most) for element in value]
        return {_clean(key, 0, most): _clean(element, depth - 1, most) for key, element in value.items()}
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise DocumentError("it holds a number of more than 64 bits")
    return value


def user_path(text: str) -> Path:
    """The path with `~` and `~NAME` expanded; unchanged if the system does not know the user."""
    return Path(os.path.expanduser(text))  # noqa: PTH111  that of Path raises an error


def free_path(path: Path) -> Path:
    """This path, or the first of PATH-2, PATH-3 and so on that does not exist."""
    free, number = path, 1
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free


def write_atomically(path: Path, content: bytes) -> None:
    """Write under a temporary name and rename: a reader sees the old file or the new one, whole. Raises `OSError`."""
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    try:
        with part.open("xb") as file:  # follows no link in its place
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise
