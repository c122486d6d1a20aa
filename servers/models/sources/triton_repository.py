"""A user's Triton model: a folder with config.pbtxt and an ONNX file, served by Triton and by our engines alike.

Names, datatypes, sizes and the largest batch are those of config.pbtxt, where it has them; the rest is as in the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from servers.models.files import named_path, user_path
from servers.models.sources import onnx_file
from servers.models.specification import ModelSpecification, UnknownModelError
from servers.options.libraries import import_library
from servers.protocol.tensors import TensorSpec

CONFIG = "config.pbtxt"


def takes(reference: str) -> bool:
    """Whether the reference is a folder with a config.pbtxt."""
    return (user_path(reference) / CONFIG).is_file()


def specify(reference: str) -> ModelSpecification | None:
    """The specification of a folder. Raises `UnknownModelError` for a model without an ONNX file."""
    if not takes(reference):
        return None
    folder = named_path(reference)
    config = read_config(folder)
    specification = onnx_file.specify(str(_file(folder, config)))
    assert specification is not None
    if config.max_batch_size < 1 and not all(tensor.dims[:1] == [-1] for tensor in [*config.input, *config.output]):
        raise UnknownModelError(f"{folder.name}: {CONFIG} allows no batches; set max_batch_size to 1 or more")
    name = config.name or folder.name
    specification = replace(
        specification,
        name=name,
        title=f"{name} of a Triton repository",
        reference=str(folder),
        max_batch_size=config.max_batch_size or specification.max_batch_size,
        inputs=_configured(folder.name, specification.inputs, config.input, config.max_batch_size),
        outputs=_configured(folder.name, specification.outputs, config.output, config.max_batch_size),
    )
    return replace(specification, axes=tuple(_free(specification)))


def read_config(folder: Path) -> Any:
    """The ModelConfig in a folder's config.pbtxt. Raises `UnknownModelError`."""
    from google.protobuf import text_format

    model_config_pb2 = import_library("tritonclient.grpc").model_config_pb2

    try:
        return text_format.Parse((folder / CONFIG).read_text(encoding="utf-8"), model_config_pb2.ModelConfig())
    except (text_format.ParseError, OSError, UnicodeDecodeError) as exc:
        raise UnknownModelError(f"{folder.name}: {CONFIG} cannot be read: {exc}") from exc


def step_folders(repository: Path, names: Iterable[str]) -> Iterator[Path]:
    """The folders of models and of all that their ensembles name, as far as the repository has them. Raises
    `UnknownModelError`."""
    waiting = list(names)
    listed = set(waiting)
    while waiting:
        folder = repository / waiting.pop()
        yield folder
        if (folder / CONFIG).is_file():
            named = {step.model_name for step in read_config(folder).ensemble_scheduling.step}
            waiting += sorted(name for name in named - listed if (repository / name).is_dir())
            listed |= named


def _file(folder: Path, config: Any) -> Path:
    """The ONNX file of the newest version, which is the one that Triton serves by default."""
    name = config.default_model_filename or "model.onnx"
    versions = sorted((path for path in folder.iterdir() if path.name.isdecimal()), key=lambda path: int(path.name))
    if not versions or not name.endswith(".onnx") or not (versions[-1] / name).is_file():
        runtime = config.backend or config.platform or "no backend"
        raise UnknownModelError(
            f"{folder.name}: only a model with VERSION/model.onnx can be served (this one names {runtime}); start "
            "your own Triton for others and give its URL as an arm"
        )
    return versions[-1] / name


def _configured(
    model: str, tensors: tuple[TensorSpec, ...], configured: Any, max_batch_size: int
) -> tuple[TensorSpec, ...]:
    """The file's tensors in the configuration's order and with its sizes; those that it leaves out stay."""
    of_file, changed = {tensor.name: tensor for tensor in tensors}, {}
    for entry in configured:
        datatype = _datatype(entry.data_type)
        item_shape = tuple(entry.dims) if max_batch_size else tuple(entry.dims)[1:]
        tensor = of_file.get(entry.name)
        if entry.HasField("reshape"):
            raise UnknownModelError(f"{model}: {CONFIG} reshapes {entry.name}, which only Triton does")
        if (
            tensor is None
            or datatype != tensor.datatype
            or len(item_shape) != len(tensor.item_shape)
            or any(-1 not in (a, b) and a != b for a, b in zip(item_shape, tensor.item_shape, strict=True))
        ):
            held = "has no such tensor" if tensor is None else f"has {tensor.datatype} {list(tensor.item_shape)}"
            raise UnknownModelError(
                f"{model}: {CONFIG} has {entry.name} as {datatype} {list(item_shape)}; the ONNX file {held}"
            )
        sizes = (b if a == -1 else a for a, b in zip(item_shape, tensor.item_shape, strict=True))
        changed[entry.name] = replace(tensor, shape=(-1, *sizes))
    return tuple({**changed, **{name: tensor for name, tensor in of_file.items() if name not in changed}}.values())


def _datatype(value: int) -> str:
    from tritonclient.grpc import model_config_pb2

    name: str = model_config_pb2.DataType.Name(value).removeprefix("TYPE_")
    return "BYTES" if name == "STRING" else name


def _free(specification: ModelSpecification) -> Any:
    """The axes that stay variable: without the dimensions to which the configuration gives a size."""
    tensors = {tensor.name: tensor for tensor in (*specification.inputs, *specification.outputs)}
    for axis in specification.axes:
        places = {name: place for name, place in axis.places.items() if tensors[name].shape[place] == -1}
        if places.keys() & {tensor.name for tensor in specification.inputs}:
            yield replace(axis, places=places)
