"""The state dict of a TorchScript archive, read without executing anything.

`torch.jit.load` compiles the archive's own code and runs it: a module's `__setstate__` can write any file. Here its
pickled objects become records of their attributes, and no name in them is looked up beyond those of tensors.
"""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile, ZipFile, is_zipfile

if TYPE_CHECKING:
    import torch

MAX_DEPTH = 100
"""Modules inside of modules."""
_DTYPES = {
    "Double": "float64", "Float": "float32", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64",
    "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool",
}  # fmt: skip
_STATE = r"^class {}\(Module\):\n  __parameters__ = \[(.*?)\]\n  __buffers__ = \[(.*?)\]"


def is_script_archive(path: Path) -> bool:
    """Whether torch.jit has saved the file."""
    if not is_zipfile(path):
        return False
    with ZipFile(path) as archive:
        return any(name.endswith("/constants.pkl") for name in archive.namelist())


def script_state(path: Path) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name, on the CPU. Raises `pickle.UnpicklingError`, `KeyError`, `OSError`, `ValueError`.

    A module that pickles itself by methods of its own is refused: only its code knows what its state means.
    """
    try:
        return _script_state(path)
    except (BadZipFile, RecursionError, TypeError, AttributeError, IndexError) as exc:
        raise pickle.UnpicklingError("the archive is damaged") from exc


def _script_state(path: Path) -> dict[str, torch.Tensor]:
    with ZipFile(path) as archive:
        (root,) = (name.removesuffix("data.pkl") for name in archive.namelist() if name.endswith("/data.pkl"))
        with archive.open(f"{root}data.pkl") as file:
            module = _Reader(file, archive, root).load()
    state: dict[str, torch.Tensor] = {}
    _collect(module, "", state)
    return state


class _Record:
    """A pickled object: its attributes, and the names of those that are parameters or buffers, None if unknown."""

    kept: frozenset[str] | None = None

    def __setstate__(self, attributes: object) -> None:
        if not isinstance(attributes, dict):
            raise pickle.UnpicklingError("the module has a __setstate__ of its own")
        self.attributes = attributes


def _collect(module: object, prefix: str, state: dict[str, torch.Tensor]) -> None:
    import torch

    if not isinstance(module, _Record) or prefix.count(".") > MAX_DEPTH:
        raise pickle.UnpicklingError("the archive holds no module")
    for name, value in module.attributes.items():
        if isinstance(value, _Record):
            _collect(value, f"{prefix}{name}.", state)
        elif isinstance(value, torch.Tensor) and (module.kept is None or name in module.kept):
            state[prefix + name] = value


class _Reader(pickle.Unpickler):
    """Knows tensors, plain values and the archive's own classes, which become records."""

    def __init__(self, file: Any, archive: ZipFile, root: str) -> None:
        super().__init__(file)
        self._archive = archive
        self._root = root
        self._storages: dict[str, torch.Tensor] = {}

    def find_class(self, module: str, name: str) -> Any:
        """A stand-in for each name. Raises `pickle.UnpicklingError` for one that no archive needs."""
        if module.startswith("__torch__"):
            return type(name, (_Record,), {"kept": self._kept(module, name)})
        if module == "torch" and name.endswith("Storage"):
            return _DTYPES[name.removesuffix("Storage")]
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda flat, offset, size, stride, *_: flat.as_strided(size, stride, offset)
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch.jit._pickle":  # lists with their type
            return lambda values, *_: values
        raise pickle.UnpicklingError(f"the archive names {module}.{name}")

    def persistent_load(self, identifier: Any) -> torch.Tensor:
        """All values of a storage as one dimension."""
        import torch

        kind, dtype, key, _device, count = identifier
        if kind != "storage":
            raise pickle.UnpicklingError("the archive refers to something else than tensors")
        if key not in self._storages:
            content = bytearray(self._archive.read(f"{self._root}data/{key}"))
            flat = torch.frombuffer(content, dtype=getattr(torch, dtype)) if content else torch.empty(0)
            self._storages[key] = flat[:count]
        return self._storages[key]

    def _kept(self, module: str, name: str) -> frozenset[str] | None:
        """The parameters and buffers that the class's code, which is only searched, lists at its beginning."""
        try:
            code = self._archive.read(f"{self._root}code/{module.replace('.', '/')}.py").decode()
        except KeyError:
            return None
        found = re.search(_STATE.format(re.escape(name)), code, re.MULTILINE)
        return None if found is None else frozenset(re.findall(r'"([^"]*)"', found[1] + found[2]))
