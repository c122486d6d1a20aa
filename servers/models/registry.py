"""Finds a model by its reference: SOURCE:NAME, a path, or the name under which it is served.

A model of images has three forms in which an image can travel to it, all derived from its FP32 specification:

    M         pixel_values  FP32  [-1,3,s,s]   normalised by the client
    M_uint8   pixel_values  UINT8 [-1,s,s,3]   RGB bytes, resized and cropped by the client, normalised with the model
    M_jpeg    image         BYTES [-1,1]       a JPEG file of any size; decoded, resized and cropped by the server

Every other model has one, its own tensors.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import NoReturn

from servers.models import descriptions, sources
from servers.models.modules import measure_size
from servers.models.sources import module_file, open_clip
from servers.models.specification import PAYLOADS, ModelSpecification, choose_from, closest
from servers.models.specification import UnknownModelError as UnknownModelError
from servers.protocol.tensors import TensorSpec

DEFAULT_MODEL = f"open_clip:{open_clip.ARCHITECTURE}"
SOURCES: tuple[str, ...] = tuple(sorted(module.name for module in pkgutil.iter_modules(sources.__path__)))


def source_module(name: str) -> ModuleType:
    """Import the module of a source, which itself imports no library of models."""
    return import_module(f"{sources.__name__}.{name}")


def payload_variants(specification: ModelSpecification) -> tuple[ModelSpecification, ...]:
    """The model itself and, for one of images, its UINT8 and its JPEG variant."""
    if specification.payload != "fp32" or specification.image is None:
        return (specification,)
    size = specification.image.size
    uint8 = replace(
        specification,
        name=f"{specification.name}_uint8",
        title=f"{specification.title}, UINT8 pixels",
        inputs=(TensorSpec(specification.inputs[0].name, "UINT8", (-1, size, size, 3)),),
        payload="uint8",
        base_name=specification.name,
    )
    jpeg = replace(
        uint8,
        name=f"{specification.name}_jpeg",
        title=f"{specification.title}, JPEG files",
        inputs=(TensorSpec("image", "BYTES", (-1, 1)),),
        payload="jpeg",
        decodes_to=uint8,
    )
    return specification, uint8, jpeg


_NAME = open_clip.OF_DEFAULT_MODEL["name"]
_SERVED = MappingProxyType({f"{_NAME}": "fp32", f"{_NAME}_uint8": "uint8", f"{_NAME}_jpeg": "jpeg"})
"""The default model's variants may also be named as they are served."""


@cache
def _variants(reference: str) -> Mapping[str, ModelSpecification]:
    """The variants of a model by payload. Raises `UnknownModelError`."""
    if reference in _SERVED:
        return _variants(DEFAULT_MODEL)
    identity = _identity(reference)
    known = None if identity is None else descriptions.known(identity)
    if identity is None or known is None:
        specification = describe(reference)
        if identity is not None:
            descriptions.keep(identity, specification)
    else:
        specification = known.specification(identity, partial(describe, reference))
        maker = getattr(_source_of(reference)[0], "item_maker", None)
        specification = replace(specification, make_items=maker(known.description) if maker else None)
    return MappingProxyType({variant.payload: variant for variant in payload_variants(specification)})


def _source_of(reference: str) -> tuple[ModuleType | None, str]:
    """The source that takes a reference, and the name that it takes. Raises `OSError` for a path that nobody may read,
    or that is too long."""
    source, separator, name = reference.partition(":")
    if separator and source in SOURCES:
        return source_module(source), name
    taking = (module for module in map(source_module, SOURCES) if hasattr(module, "takes"))
    return next((module for module in taking if module.takes(reference)), None), reference


def _identity(reference: str) -> descriptions.Identity | None:
    """By what a model's description is kept; None for one that is described every time, which takes no library of
    models."""
    with suppress(OSError):
        module, name = _source_of(reference)
        identity: descriptions.Identity | None = getattr(module, "identity", lambda _: None)(name)
        if identity is not None:
            return identity
        if hasattr(module, "names"):
            return descriptions.Identity(reference)
    return None


def model_size(reference: str, announce: Callable[[], object]) -> tuple[int, int | None]:
    """Parameters, and operations per item, of a model itself. Where they are not kept, `announce` is called and they
    are counted, which takes seconds. Raises `UnknownModelError`."""
    specification = get_base(reference)
    identity = _identity(specification.reference)
    kept = None if identity is None else descriptions.known(identity)
    if kept is not None and kept.size is not None:
        return kept.size
    announce()
    size = measure_size(specification)
    if identity is not None:
        descriptions.keep(identity, specification, size)
    return size


def model_files(reference: str) -> tuple[Path, ...]:
    """The files of a user from which a model is described; none for one that a library has."""
    identity = _identity(reference)
    return () if identity is None else identity.files


def forget_models() -> None:
    """Describe every model from its files as they are now."""
    _variants.cache_clear()
    describe.cache_clear()
    module_file.forget()


@cache
def describe(reference: str) -> ModelSpecification:
    """The model as its library describes it now. Raises `UnknownModelError`."""
    source, separator, name = reference.partition(":")
    if source == "language":
        raise UnknownModelError(
            f"{reference} is a language model; this command takes models that answer with tensors, and abserve serve "
            "and abserve compare take both"
        )
    if separator and source in SOURCES:
        specification = source_module(source).specify(name)
        if specification is None:
            _refuse(reference, name, {name: f"{source}:{name}" for name in all_names(source)}, f" {source}")
    else:
        try:
            module, name = _source_of(reference)
            specification = None if module is None else module.specify(name)
        except OSError as exc:  # a path that nobody may read, or that is too long
            raise UnknownModelError(f"{reference:.200}: {exc.strerror or exc}") from exc
        if specification is None and "/" in reference:
            raise UnknownModelError(
                f"unknown model {reference!r}: give FILE.py:FUNCTION, FILE.onnx, or a folder with a config.json of "
                "transformers or a config.pbtxt of Triton"
            )
        if specification is None:
            references = [*_SERVED, *known_references()]
            by_name = {name.partition(":")[2]: name for name in references}
            _refuse(reference, reference, by_name | {name: name for name in references})
    return specification  # type: ignore[no-any-return]


def _refuse(reference: str, name: str, references: Mapping[str, str], source: str = "") -> NoReturn:
    """Raises `UnknownModelError` with the references of the known names that are closest to `name`."""
    close = " or ".join(dict.fromkeys(references[name] for name in closest(name, references)))
    hint = f"did you mean {close}? List" if close else "list"
    raise UnknownModelError(f"unknown model {reference!r}; {hint} all names with: abserve models{source}")


def known_references() -> Iterator[str]:
    """The well-known models of every source; others exist."""
    for source in SOURCES:
        names = getattr(source_module(source), "names", tuple)
        yield from (f"{source}:{name}" for name in names())


def lists_names(source: str) -> bool:
    """Whether a source has names; the others take files and folders."""
    return any(hasattr(source_module(source), function) for function in ("all_names", "names"))


def all_names(source: str) -> tuple[str, ...]:
    """Every name that a source knows; those of a large library take seconds."""
    module = source_module(source)
    names: tuple[str, ...] = getattr(module, "all_names", getattr(module, "names", tuple))()
    return names


def get_specification(reference: str) -> ModelSpecification:
    """The specification of a model. Raises `UnknownModelError`."""
    return get_variant(reference, "")


def get_base(reference: str) -> ModelSpecification:
    """The specification of a model itself, whichever of its variants is named. Raises `UnknownModelError`."""
    return next(iter(_variants(reference).values()))


def get_variant(reference: str, payload: str) -> ModelSpecification:
    """The variant of a model for `payload`; empty: the one that `reference` names. Raises `UnknownModelError`."""
    if payload and payload not in PAYLOADS:
        raise UnknownModelError(f"unknown payload {payload!r}; {choose_from(payload, PAYLOADS)}")
    variants = _variants(reference)
    payload = payload or _SERVED.get(reference) or next(iter(variants))
    if payload not in variants:
        raise UnknownModelError(
            f"{reference} has no payload {payload}; use {' or '.join(variants)}, or leave the payload out"
        )
    return variants[payload]


def get_variants(reference: str, payloads: str) -> tuple[ModelSpecification, ...]:
    """The variants for a list such as `fp32,uint8`, in its order; empty: only the one that `reference` names. Raises
    `UnknownModelError`."""
    names = dict.fromkeys(payload.strip() for payload in payloads.split(",") if payload.strip())
    return tuple(get_variant(reference, payload) for payload in names or ("",))
