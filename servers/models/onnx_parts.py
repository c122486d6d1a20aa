"""The files of an ONNX model: the graph, and the files beside it that hold its external data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any


def onnx_parts(path: Path, model: Any = None) -> tuple[Path, ...]:
    """The file itself and those with its external data, which may not exist. `model` is the file as it was loaded
    without them. Raises what `onnx.load` raises."""
    import onnx

    model = onnx.load(path, load_external_data=False) if model is None else model
    beside = {entry.value for tensor in _tensors(model) for entry in tensor.external_data if entry.key == "location"}
    return (path, *(path.parent / name for name in sorted(beside)))


def parts_sha256(parts: tuple[Path, ...]) -> str:
    """The SHA-256 of the content of all files, one after the other. Raises `OSError`."""
    states = tuple((status.st_ino, status.st_size, status.st_mtime_ns) for status in map(Path.stat, parts))
    return _sha256(parts, states)


@lru_cache(16)
def _sha256(parts: tuple[Path, ...], _states: tuple[tuple[int, int, int], ...]) -> str:
    """Once per process and state of the files: they may have many gigabytes."""
    digest = hashlib.sha256()
    for part in parts:
        with part.open("rb") as file:
            while chunk := file.read(2**20):
                digest.update(chunk)
    return digest.hexdigest()


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
