"""Which libraries are installed, and imports of those of models and engines without what no served model needs, which
takes seconds of every start.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
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


@contextmanager
def without_collections() -> Iterator[None]:
    """Import without looking for garbage, of which an import makes little: an eighth of torch's time goes there."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@without_collections()
def import_library(name: str) -> ModuleType:
    """A library of models or messages, or of an engine. Raises `ImportError`."""
    if name == "open_clip" and "open_clip" not in sys.modules:
        import_module("torch")
        with absent("timm", "transformers"):  # towers of timm import it when they are built; of the others are texts'
            defer("open_clip", "torchvision", "torchvision.ops")
            import_module("open_clip.model")
    elif name == "torchvision" and "torchvision" not in sys.modules:
        import_module("torch")
        with without_compiler():
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
            return getattr(sys.modules[package.__name__], attribute)  # it may put another module in its place

        vars(package)["__getattr__"] = execute


@contextmanager
def _in_place(modules: Mapping[str, ModuleType | None]) -> Iterator[None]:
    """Import others with these in place of the modules of their names, none of which is imported yet."""
    sys.modules.update(modules)  # type: ignore[arg-type]
    try:
        yield
    finally:
        _remove(modules)


def _remove(modules: Mapping[str, ModuleType | None]) -> None:
    """Take away those that are still in place of the real ones."""
    for name, module in modules.items():
        if name in sys.modules and sys.modules[name] is module:
            del sys.modules[name]


def absent(*names: str) -> AbstractContextManager[None]:
    """Import others as where these optional libraries are not installed."""
    return _in_place(dict.fromkeys(name for name in names if name not in sys.modules))


def called_later(name: str, *functions: str) -> AbstractContextManager[None]:
    """Import others with functions of an installed library that import it when they are called."""
    if name in sys.modules or find_spec(name) is None:
        return nullcontext()
    module = ModuleType(name)
    for function in functions:
        setattr(module, function, partial(_call, name, function))
    return _in_place({name: module})


def _call(library: str, function: str, *given: Any, **named: Any) -> Any:
    return getattr(import_module(library), function)(*given, **named)


COMPILER = ("torch._dynamo", "torch._dynamo.utils", "torch._dynamo._trace_wrapped_higher_order_op")
"""Modules of torch's compiler that libraries import for a few functions."""
CALLED_LATER = ("is_compile_supported", "TransformGetItemToIndex")
"""What they take of it and call when they execute, if at all."""
MARKS = ("allow_in_graph", "assume_constant_result")
"""What they tell the compiler of functions for FP8 experts."""


@contextmanager
def without_compiler() -> Iterator[None]:
    """Import libraries without torch's compiler, which takes seconds, although they name some of its functions: in
    RoIAlign of torchvision, in the masks and the paged attention of transformers. Who calls one imports it then, and
    anything else that is asked of the compiler in the meantime imports it at once."""
    if COMPILER[0] in sys.modules:
        yield
        return
    placeholders = {name: ModuleType(name) for name in COMPILER}

    def real(name: str) -> ModuleType:
        _remove(placeholders)
        return import_module(name)

    for name, placeholder in placeholders.items():

        def imported(attribute: str, name: str = name) -> Any:
            if attribute in CALLED_LATER:
                return lambda *given: getattr(real(name), attribute)(*given)
            if attribute in MARKS:
                return lambda function: function
            if (name, attribute) == (COMPILER[0], "disable"):
                return partial(_disabled_later, partial(real, name))
            if attribute.startswith("__") and (name, attribute) != (COMPILER[0], "__path__"):
                raise AttributeError(attribute)
            return getattr(real(name), attribute)

        vars(placeholder)["__getattr__"] = imported
    with _in_place(placeholders):
        yield


class _StandIn:
    def __init__(self, *_: object, **__: object) -> None:
        """Take whatever the real class takes."""


def stand_ins(*names: str) -> AbstractContextManager[None]:
    """Import others with stand-ins for these modules, which have a class for whatever name is asked of them: for types
    of which no value that is served is one."""
    return _in_place({name: _stand_in(name) for name in names if name not in sys.modules})


def _stand_in(name: str) -> ModuleType:
    module, classes = ModuleType(name), dict[str, type]()

    def made(attribute: str) -> type | list[str]:
        if attribute == "__path__":
            return []
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return classes.setdefault(attribute, type(attribute, (_StandIn,), {}))

    vars(module)["__getattr__"] = made
    return module


def _disabled_later(compiler: Callable[[], Any], function: Any = None, *given: Any, **named: Any) -> Any:
    """`torch._dynamo.disable`, which happens when the function is first called."""
    if function is None:
        return lambda decorated: _disabled_later(compiler, decorated, *given, **named)
    disabled: list[Callable[..., Any]] = []

    @wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        if not disabled:
            disabled.append(compiler().disable(function, *given, **named))
        return disabled[0](*arguments, **keywords)

    return call
