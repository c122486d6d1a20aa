"""Descriptions of models that are known without the models' libraries, which take seconds to import.

Those of the well-known models are shipped in catalogue.json, which `make reference` writes, for one version of each
library. Others are kept in $XDG_CACHE_HOME/abserve/descriptions, for the content of the user's files, the state of
their folder, and the versions of the libraries. Who loads a model describes it again, and refuses one that differs.
"""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import msgspec

from servers.models.files import file_sha256, keep_file, user_cache
from servers.models.modules import measure_size
from servers.models.specification import ModelDescription, ModelSpecification, UnknownModelError
from servers.models.weights import WeightsError, WeightsSource
from servers.options.libraries import import_library, installed_version
from servers.options.stages import stage

PACKAGES: Mapping[str, str] = {"open_clip": "open_clip_torch"}
"""By source, the package whose models it has, where that has another name."""
LIBRARIES = ("open_clip", "timm", "torchvision", "transformers")
CATALOGUE = Path(__file__).with_name("catalogue.json")

log = logging.getLogger("abserve.models")
version = cache(installed_version)


class Identity(NamedTuple):
    """Which model a reference names, wherever it is read, and the user's files that define it."""

    text: str
    files: tuple[Path, ...] = ()


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """A model without its library."""

    description: ModelDescription
    tags: tuple[str, ...] = ()
    size: tuple[int, int | None] | None = None
    """Parameters, and operations per item, as `measure_size` counts them."""

    @classmethod
    def of(cls, specification: ModelSpecification, *, measured: bool = False) -> Known:
        """What is known of a model that its library has described."""
        size = measure_size(specification) if measured else None
        return cls(description=specification.described, tags=specification.pretrained_tags(), size=size)

    def specification(self, identity: Identity, live: Callable[[], ModelSpecification]) -> ModelSpecification:
        """The model; `live` describes it with its library, which happens when it is loaded."""
        described = self.description

        def load_module(source: WeightsSource) -> object:
            try:
                with stage("import"), suppress(ImportError):
                    import_library(identity.text.partition(":")[0])
                with stage("describe"):
                    specification = live()
            except UnknownModelError as exc:
                raise WeightsError(str(exc)) from exc
            if specification.described != described:
                keep(identity, specification)
                raise WeightsError(
                    f"{described.label} is no longer as it was described before; its description is renewed, start "
                    "the server again"
                )
            return specification.load_module(source)

        def find_pretrained(source: object) -> object:
            find = live().find_pretrained
            assert find is not None
            return find(source)  # type: ignore[arg-type]

        return ModelSpecification(
            **{known.name: getattr(described, known.name) for known in fields(described)},
            load_module=load_module,  # type: ignore[arg-type]
            pretrained_tags=lambda: self.tags,
            find_pretrained=find_pretrained if self.tags else None,  # type: ignore[arg-type]
        )


class Catalogue(msgspec.Struct, frozen=True, kw_only=True):
    """The well-known models by reference, as these versions of the libraries have them, by source."""

    versions: dict[str, str]
    models: dict[str, Known]


class _Kept(msgspec.Struct, frozen=True, kw_only=True):
    key: str
    known: Known
    imported: dict[str, str] = {}
    """By path, the SHA-256 of the files beside the user's that it imports."""


def known(identity: Identity) -> Known | None:
    """What is known of a model without importing anything for it. None: nothing that is still true."""
    path = _path(identity)
    with suppress(OSError):  # there is none, or it cannot be read
        content = path.read_bytes()
        try:
            kept = msgspec.json.decode(content, type=_Kept)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            log.warning("%s is damaged, so the model is described again", path)
        else:
            if kept.key == _key(identity) and all(
                file_sha256(Path(file)) == sha for file, sha in kept.imported.items()
            ):
                return kept.known
    return shipped(identity.text)


def shipped(reference: str) -> Known | None:
    """A well-known model, if its library has the version that the catalogue was made with, or is not installed."""
    source = reference.partition(":")[0]
    installed = versions([source]).get(source)
    fits = source in catalogue().versions and installed in (None, catalogue().versions[source])
    return catalogue().models.get(reference) if fits else None


def keep(identity: Identity, specification: ModelSpecification, size: tuple[int, int | None] | None = None) -> None:
    """Keep what a library says of a model, and its size, where a file of the user's cache can be written."""
    if specification.samples is not None:  # items of its author: they are in the file
        return
    with suppress(OSError):  # a file has gone since
        known = msgspec.structs.replace(Known.of(specification), size=size)
        kept = _Kept(key=_key(identity), known=known, imported=_imported(identity.files))
        keep_file(_path(identity), msgspec.json.encode(kept))


@cache
def catalogue() -> Catalogue:
    """The descriptions that are shipped."""
    return msgspec.json.decode(CATALOGUE.read_bytes(), type=Catalogue)


def versions(names: Iterable[str] = LIBRARIES) -> dict[str, str]:
    """The versions of libraries, by the names of their sources; without those that are not installed."""
    return {name: installed for name in names if (installed := version(PACKAGES.get(name, name)))}


def _path(identity: Identity) -> Path:
    return user_cache() / "descriptions" / f"{hashlib.sha256(identity.text.encode()).hexdigest()[:32]}.json"


def _key(identity: Identity) -> str:
    """A hash of what a description depends on. Raises `OSError`. Of abserve itself the time of its last change counts,
    which a checkout's version hides."""
    changed = max(path.stat().st_mtime_ns for path in Path(__file__).parent.rglob("*.py"))
    parts = [identity.text, str(sorted(versions(("abserve", "torch", *LIBRARIES)).items())), str(changed)]
    parts += [file_sha256(file) for file in identity.files]
    for folder in {file.parent: None for file in identity.files}:  # where weights that the file reads usually are
        states = {path.name: path.stat() for path in folder.glob("[!.]*") if path.is_file()}
        parts += [f"{name} {state.st_size} {state.st_mtime_ns}" for name, state in sorted(states.items())]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _imported(files: Iterable[Path]) -> dict[str, str]:
    """By path, the SHA-256 of the modules that lie beside files."""
    folders = {folder for file in files for folder in (file.parent, file.resolve().parent)}
    beginnings = tuple(f"{folder}".rstrip("/") + "/" for folder in folders)
    within = {
        Path(place)
        for module in list(sys.modules.values())
        if isinstance(module, ModuleType)
        and isinstance(place := vars(module).get("__file__"), str)
        and place.startswith(beginnings)
    }
    return {str(place): file_sha256(place) for place in within if not place.is_relative_to(sys.prefix)}
