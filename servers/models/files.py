"""Files of models and artefacts: folders that appear whole or not at all, the parts of an ONNX model with their hash,
and paths with letters beyond ASCII.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

SETTLED_NS = 2_000_000_000
_known: dict[Path, str] = {}
"""What `known_sha256` keeps in files, for a user without a cache."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def user_path(text: str | Path) -> Path:
    """The path with `~` and `~NAME` expanded; unchanged if the system does not know the user."""
    return Path(os.path.expanduser(text))  # noqa: PTH111  that of Path raises an error


def user_cache() -> Path:
    """Where abserve keeps what it would find out again without it. A user without a home, as in some containers, has no
    such folder: nothing can be read or written there."""
    cache = user_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return Path(os.devnull if cache.parts[:1] == ("~",) else cache, "abserve")


def keep_file(path: Path, content: bytes) -> OSError | None:
    """Write a file of a cache, whole or not at all: readers at the same time see the old one or the new one. One that
    cannot be written, as on a full disk, leaves nothing behind, and the reason is returned."""
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{path.stem}-", delete=False) as file:
            temporary = Path(file.name)
            file.write(content)
        temporary.replace(path)
    except OSError as exc:
        if temporary is not None:
            with suppress(OSError):
                temporary.unlink()
        return exc
    return None


class FolderError(Exception):
    """The folder cannot be written; the message names the remedy."""


@contextmanager
def atomic_folder(final: Path, needed_bytes: int = 0) -> Iterator[Path]:
    """Yields an empty folder beside `final` that takes its place when the block ends well and is removed otherwise.

    Readers see the old content, for a moment no folder, then the new content; never a part. Of two writers at once the
    later one wins. Raises `FolderError` when the disk is full (`needed_bytes` is checked before the work starts) or the
    place cannot be written.
    """
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        free_bytes = shutil.disk_usage(final.parent).free
        if free_bytes < needed_bytes:
            raise FolderError(
                f"no space left on the disk of {final.parent}: {needed_bytes / 1e6:.0f} MB are needed, "
                f"{free_bytes / 1e6:.0f} MB are free; free some, or choose another folder"
            )
        fresh = Path(tempfile.mkdtemp(prefix=f".{final.name}.", suffix=".part", dir=final.parent))
        fresh.chmod(0o755)
    except OSError as exc:
        raise _wrapped(exc, final) from exc
    try:
        yield fresh
        _replace(fresh, final)
    except OSError as exc:
        raise _wrapped(exc, final) from exc
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Hold a lock file beside `folder`; the system releases it when the process dies."""
    lock = folder.with_name(f".{folder.name}.lock")
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as exc:
        raise _wrapped(exc, lock.parent) from exc
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def remove_abandoned(final: Path) -> None:
    """Remove the temporary folders that killed writers of `final` left beside it. No other process may write it now."""
    left = re.compile(rf"\.{re.escape(final.name)}\.[a-z0-9_]{{8}}\.(part|old)")  # as mkdtemp names them
    for path in final.parent.glob(f".{glob.escape(final.name)}.*"):
        if left.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def file_sha256(*paths: Path) -> str:
    """Hexadecimal SHA-256 of the content of a file, or of several, one after the other."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while chunk := file.read(2**20):
                digest.update(chunk)
    return digest.hexdigest()


def known_sha256(*paths: Path) -> str:
    """`file_sha256` of large files, which are read again only when the inode, size or times of one are others than when
    they were hashed: models have many gigabytes, and every start asks. Raises `OSError`."""
    states = [path.stat() for path in paths]
    numbers = ((at.st_dev, at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns) for at in states)
    state = " ".join(str(number) for of_path in numbers for number in of_path)
    named = b"\0".join(os.fsencode(path.absolute()) for path in paths)
    kept = user_cache() / "hashes" / hashlib.sha256(named).hexdigest()
    with suppress(OSError, ValueError):
        before, _, sha256 = (_known.get(kept) or kept.read_text()).rpartition(" ")
        if before == state:
            return sha256
    hashed_ns, sha256 = time.time_ns(), file_sha256(*paths)
    # A file that was written within a tick of its clock may be written again and have the same times.
    newest_ns = max((max(at.st_mtime_ns, at.st_ctime_ns) for at in states), default=0)
    if hashed_ns - newest_ns > SETTLED_NS:
        _known[kept] = f"{state} {sha256}"
        keep_file(kept, _known[kept].encode())
    return sha256


def _replace(fresh: Path, final: Path) -> None:
    """A folder cannot be renamed onto one with content, so the old one is moved aside first."""
    aside = fresh.with_suffix(".old")
    for _ in range(8):
        try:
            fresh.rename(final)
        except OSError as exc:
            if exc.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        else:
            return
        try:
            final.rename(aside)
        except FileNotFoundError:
            continue  # another writer moved it aside in between
        shutil.rmtree(aside, ignore_errors=True)
    raise FolderError(f"another process keeps rewriting {final}; wait for it and try again")


def _wrapped(exc: OSError, final: Path) -> FolderError:
    if exc.errno in _FULL:
        return FolderError(f"no space left on the disk of {final.parent}: free some, or choose another folder")
    reason = os.strerror(exc.errno) if exc.errno else exc
    return FolderError(f"cannot write {final}: {reason}; make it writable, or choose another folder")


def onnx_parts(path: Path, model: Any = None) -> tuple[Path, ...]:
    """The file itself and those with its external data, which may not exist: beside the path, or beside the file that
    it links to. `model` is the file as it was loaded without them. Raises what `onnx.load` raises."""
    import onnx

    model = onnx.load(path, load_external_data=False) if model is None else model
    beside = {entry.value for tensor in _tensors(model) for entry in tensor.external_data if entry.key == "location"}
    places = ((place, *(place.parent / name for name in sorted(beside))) for place in (path, path.resolve()))
    named, real = places
    return real if all(part.exists() for part in real) and not all(part.exists() for part in named) else named


def named_path(text: str | Path) -> Path:
    """The absolute path of a file that the user names, without following links: what lies beside it is looked for
    beside this name, and its ending is that of this name. Hugging Face's cache has links to files named by a hash.
    Only as far as `..` goes back are links followed."""
    path = user_path(text).absolute()
    if ".." not in path.parts:
        return path
    end = len(path.parts) - path.parts[::-1].index("..")
    return Path(*path.parts[:end]).resolve().joinpath(*path.parts[end:])


def in_one_place(parts: tuple[Path, ...]) -> bool:
    """Whether the files that the parts of an ONNX model are, or link to, lie together: ONNX Runtime refuses weights
    outside the folder of the model's file."""
    model, *data = (part.resolve() for part in parts)
    return all(part.is_relative_to(model.parent) for part in data)


def place_parts(parts: tuple[Path, ...], folder: Path, name: str) -> None:
    """Put the parts of an ONNX model into a folder, the file itself under this name: as links if they lie together,
    else as files. Raises `OSError`."""
    together, origin = in_one_place(parts), parts[0].parent
    for part in parts:
        place = folder / (name if part is parts[0] else part.relative_to(origin))
        place.parent.mkdir(parents=True, exist_ok=True)
        if together:
            place.symlink_to(part.absolute())
            continue
        try:
            os.link(part.resolve(), place)
        except OSError:  # another file system, or another owner's file
            shutil.copyfile(part, place)


@contextmanager
def loadable_parts(path: Path) -> Iterator[Path]:
    """An ONNX file that ONNX Runtime can load with its external data: the user's, unless the parts are links to several
    folders, then a copy for as long as the block lasts. Raises what `onnx.load` raises."""
    linked = any(map(Path.is_symlink, (path, *path.parent.iterdir())))
    parts = onnx_parts(path) if linked else (path,)  # reading the whole model takes a while
    if in_one_place(parts):
        yield parts[0]
        return
    with tempfile.TemporaryDirectory(prefix="abserve-onnx-") as folder:
        place_parts(parts, Path(folder), path.name)
        yield Path(folder) / path.name


def load_onnx(path: Path) -> Any:
    """An ONNX model with its external data, which may be links: `onnx.load` refuses those."""
    import onnx

    model = onnx.load(path, load_external_data=False)
    folder = onnx_parts(path, model)[0].parent
    for tensor in _tensors(model):
        about = {entry.key: entry.value for entry in tensor.external_data}
        if "location" in about:
            with (folder / about["location"]).open("rb") as file:
                file.seek(int(about.get("offset", 0)))
                tensor.raw_data = file.read(int(about.get("length", -1)))
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")
    return model


def _tensors(model: Any) -> Iterator[Any]:
    """Every constant of a model: of its graph, of the graphs inside its nodes, and of its functions."""
    graphs, nodes = [model.graph], [node for function in model.functions for node in function.node]
    while graphs or nodes:
        while graphs:
            graph = graphs.pop()
            yield from graph.initializer
            for sparse in graph.sparse_initializer:
                yield from (sparse.values, sparse.indices)
            nodes += graph.node
        for attribute in nodes.pop().attribute if nodes else ():
            yield from (attribute.t, *attribute.tensors)
            for sparse in (attribute.sparse_tensor, *attribute.sparse_tensors):
                yield from (sparse.values, sparse.indices)
            graphs += [*([attribute.g] if attribute.HasField("g") else ()), *attribute.graphs]


def for_python(path: str) -> str:
    """A path from a text, such as a JSON file, as this process's Python opens it. Triton's python backend starts Python
    without a locale, whatever the environment says, so it takes ASCII for the encoding of file names. There Python's
    own functions take a path whose other bytes are surrogate escapes."""
    return os.fsdecode(path.encode("utf-8", "surrogateescape"))


def for_library(path: Path) -> str:
    """A path as a library in C++ takes it: as text in UTF-8."""
    return os.fsencode(path).decode("utf-8", "surrogateescape")
