"""Which libraries are installed, and imports of those of models and engines without what no served model needs, which
takes seconds of every start.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module, metadata
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any


def installed_version(package: str) -> str | None:
    """None if it is not installed. What a package says of itself takes 2 ms to parse."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """The versions of those that are installed."""
    return {package: installed for package in packages if (installed := installed_version(package))}


def import_library(name: str) -> ModuleType:
    """A library of models or messages, or of an engine. Raises `ImportError`."""
    if name == "open_clip" and "open_clip" not in sys.modules:
        import_module("torch")
        with absent("timm", "transformers"):  # towers of timm import it when they are built; of the others are texts'
            defer("open_clip", "torchvision", "torchvision.ops")
            import_module("open_clip.model")
    elif name == "torchvision" and "torchvision" not in sys.modules:
        import_module("torch")
        with _without_compiler():
            import_module("torchvision")
    elif name == "tritonclient.grpc" and name not in sys.modules:  # its messages need no grpcio
        defer(name)
        for messages in ("model_config_pb2", "service_pb2"):
            import_module(f"{name}.{messages}")
    return import_module(name)


def defer(*packages: str) -> None:
    """Execute a package's own code when one of its names is first used; its modules can be imported before. A package
    that is already imported does not change."""
    for name in packages:
        spec = None if name in sys.modules else find_spec(name)
        if spec is None:
            continue
        package = sys.modules[name] = module_from_spec(spec)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, package)

        def execute(attribute: str, package: ModuleType = package, spec: Any = spec) -> Any:
            if attribute.startswith("__") and attribute != "__version__":  # what Python asks of every module
                raise AttributeError(attribute)
            del vars(package)["__getattr__"]
            spec.loader.exec_module(package)
            return getattr(package, attribute)

        vars(package)["__getattr__"] = execute


@contextmanager
def absent(*names: str) -> Iterator[None]:
    """Import others as where these optional libraries are not installed."""
    hidden = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


@contextmanager
def _without_compiler() -> Iterator[None]:
    """Import torchvision without torch's compiler, of which it takes one function, for RoIAlign in training. Anything
    else that is asked of the compiler in the meantime imports it."""
    names = ("torch._dynamo", "torch._dynamo.utils")
    if names[0] in sys.modules:
        yield
        return
    placeholders = {name: ModuleType(name) for name in names}

    def remove() -> None:
        for name, placeholder in placeholders.items():
            if sys.modules.get(name) is placeholder:
                del sys.modules[name]

    for name, placeholder in placeholders.items():

        def imported(attribute: str, name: str = name) -> Any:
            if attribute == "is_compile_supported":
                return lambda device: import_module(name).is_compile_supported(device)
            if attribute.startswith("__") and (name, attribute) != (names[0], "__path__"):
                raise AttributeError(attribute)
            remove()
            return getattr(import_module(name), attribute)

        vars(placeholder)["__getattr__"] = imported
    sys.modules.update(placeholders)
    try:
        yield
    finally:
        remove()
