"""A user's own module: FILE.py:FUNCTION, where the function returns a `torch.nn.Module`, or a `UserModel` that
describes one (see `servers.models.specification`).

A bare module is described from a sample input (see `servers.models.user_module`): that of the file's `sample_FUNCTION`
or `sample`, a function or a value, or the arrays of FILE.npz or FILE.npy in FILE.py:FUNCTION:FILE.npz.

The file is executed once per process; the function is called for the description and again for each module that is
loaded. By default the weights are those that the function sets, recorded as the file with its hash; --weights
random:SEED seeds torch before the call, and a checkpoint is loaded into the module.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial
from hashlib import sha256
from importlib import invalidate_caches
from importlib.util import module_from_spec, spec_from_file_location
from inspect import Parameter, isclass, isfunction, signature
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeGuard, get_args

import numpy as np

from servers.models.descriptions import Identity
from servers.models.files import file_sha256, named_path, user_path
from servers.models.items import random_items, valid_items
from servers.models.modules import load_strictly, option_of, read_state, ready
from servers.models.specification import (
    Input,
    ModelDescription,
    ModelSpecification,
    Output,
    OutputKind,
    UnknownModelError,
    UserModel,
    choose_from,
    served_name,
)
from servers.models.user_module import Wrap, describe, example_line, parameters_sha256, sample_items
from servers.models.weights import CheckpointWeights, RandomWeights, WeightsError, WeightsSource, seeded, verify
from servers.protocol.tensors import DATATYPES, Array, Axis, TensorSpec

if TYPE_CHECKING:
    import torch

_REFERENCE = re.compile(r"(?P<file>.+?\.py)(?::(?P<function>\w*))?(?::(?P<sample>.+\.np[yz]))?")
_PREFIX = "abserve_user_"
_SAMPLES = ("sample",)
_MAX_PADDING_ERROR = 1e-3


def takes(reference: str) -> bool:
    """Whether the reference is FILE.py:FUNCTION."""
    return _REFERENCE.fullmatch(reference) is not None


def identity(reference: str) -> Identity | None:
    """The function and its file."""
    if (match := _REFERENCE.fullmatch(reference)) is None:
        return None
    path, sample = named_path(match["file"]), match["sample"]
    files = (path,) if sample is None else (path, user_path(sample).absolute())
    return Identity(":".join(["module_file", str(match["function"]), *map(str, files)]), files)


def specify(reference: str) -> ModelSpecification | None:
    """The specification of the module that the function describes. Raises `UnknownModelError`."""
    match = _REFERENCE.fullmatch(reference)
    if match is None:
        return None
    path = named_path(match["file"])
    make = _function(path, match["function"])
    label = f"{path.name}:{match['function']}"
    model = _call(make, path, label, 0)
    try:
        if not isinstance(model, UserModel):
            return _of_bare_module(path, match["function"], make, model, match["sample"])
        specification = _specification(path, match["function"], make, model)
    except ValueError as exc:
        raise UnknownModelError(f"{label}: {exc}") from exc
    except (TypeError, AttributeError) as exc:
        raise UnknownModelError(f"{label}: a field of its UserModel has the wrong type: {exc}") from exc
    if _is_module(model.module):  # else loading it says what it is
        try:
            _checked(model.module, specification, label)
        except WeightsError as exc:
            raise UnknownModelError(str(exc)) from exc
    return specification


def _function(path: Path, name: str | None) -> Callable[[], object]:
    if not path.is_file():
        raise UnknownModelError(f"{path.name}: no such file in {path.parent}")
    try:
        module = _executed(path)
    except (Exception, SystemExit) as exc:
        raise UnknownModelError(f"{path.name} cannot be imported: {_cause(exc, path)}{_hidden(path)}") from exc
    function = getattr(module, name or "", None)
    if _is_module(function):
        return partial(deepcopy, function)
    if not callable(function):
        problem = f"there is no function {name}" if name else "name its function, as in FILE.py:FUNCTION"
        functions = ((key, value) for key, value in vars(module).items() if isfunction(value) or isclass(value))
        names = [key for key, value in functions if value.__module__ == module.__name__ and key not in _SAMPLES]
        choice = choose_from(name or "", names) if names else "the file defines none"
        raise UnknownModelError(f"{path.name}: {problem}; {choice}")
    needed = [
        p.name
        for p in _parameters(function)
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if needed:
        raise UnknownModelError(
            f"{path.name}:{name} needs the arguments {', '.join(needed)}, and is called without any; give them "
            f"defaults, or add a function that passes them: def my_model(): return {name}(…)"
        )
    return function  # type: ignore[no-any-return]


def _parameters(function: Callable[[], object]) -> Sequence[Parameter]:
    try:
        return list(signature(function).parameters.values())
    except (ValueError, TypeError):  # a callable of C
        return ()


def _is_module(value: object) -> TypeGuard[torch.nn.Module]:
    torch = sys.modules.get("torch")  # a module's file has imported it
    return torch is not None and isinstance(value, torch.nn.Module)


def forget() -> None:
    """Execute users' files again when they are needed, with the modules that lie beside them."""
    folders = {Path(str(module.__file__)).parent for name, module in sys.modules.items() if name.startswith(_PREFIX)}
    for name, module in list(sys.modules.items()):
        if (file := getattr(module, "__file__", None)) and Path(file).parent in folders:
            del sys.modules[name]
            # Python takes compiled code for that of a file with the same size and the same second of its last change.
            with suppress(OSError):
                Path(str(getattr(module, "__cached__", ""))).unlink()
    _executed.cache_clear()
    invalidate_caches()


@cache
def _executed(path: Path) -> ModuleType:
    name = f"{_PREFIX}{served_name(str(path))}"
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look the module up
    for folder in (str(path.parent), str(path.resolve().parent)):  # beside a link, and beside the file
        if folder not in sys.path:
            sys.path.append(folder)  # the file may import its neighbours; last, so that none hides an installed package
    spec.loader.exec_module(module)
    return module


def _hidden(path: Path) -> str:
    """A clause that names the neighbours of the file which it imports by the name of an installed package."""
    try:
        nodes = [*ast.walk(ast.parse(path.read_bytes()))]
    except (OSError, SyntaxError, ValueError):
        return ""
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level}
    names = []
    for name in sorted({name.partition(".")[0] for name in imported}):
        places = (path.parent / f"{name}.py", path.parent / name / "__init__.py")
        file = getattr(sys.modules.get(name), "__file__", None)
        names += [name] if file and any(place.is_file() for place in places) and Path(file) not in places else []
    if not names:
        return ""
    return f"; {', '.join(names)} in {path.parent} has the name of an installed package, which is imported: rename it"


def _cause(exc: BaseException, path: Path) -> str:
    """The error in one line, with the last line of the user's file that led to it."""
    lines, trace = [], exc.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            lines.append(trace.tb_lineno)
        trace = trace.tb_next
    text = next(iter(str(exc).strip().splitlines()), "")
    return f"{type(exc).__name__}{f': {text}' if text else ''}{f' (line {lines[-1]})' if lines else ''}"


def _call(make: Callable[[], object], path: Path, label: str, seed: int) -> UserModel | torch.nn.Module:
    """Call the user's function. Raises `UnknownModelError`."""
    try:
        with seeded(seed):
            model = make()
    except (Exception, SystemExit) as exc:
        raise UnknownModelError(f"{label} failed: {_cause(exc, path)}{_device_remedy(exc)}") from exc
    if not isinstance(model, UserModel) and not _is_module(model):
        raise UnknownModelError(f"{label} returned {type(model).__name__}; return a torch.nn.Module, or a UserModel")
    return model


def _device_remedy(exc: BaseException) -> str:
    """The end of a sentence about code that needs a GPU where there is none."""
    if not re.search(r"\b(CUDA|cuda|NVIDIA)\b", str(exc)):
        return ""
    return "; leave the module on the CPU and use the device of its inputs: abserve moves both to the GPU"


def _dtype_remedy(exc: BaseException) -> str:
    """The end of a sentence about values of two types in one operation."""
    if not re.search(r"\bdtypes?\b|scalar type|\b(BFloat16|Half)\b", str(exc)):
        return ""
    return (
        "; abserve makes the module's weights FP32, or what --precision says: remove casts to a fixed type from "
        "forward, or cast to the type of the weights"
    )


# A bare module


def _of_bare_module(
    path: Path, function: str, make: Callable[[], object], module: torch.nn.Module, sample_file: str | None
) -> ModelSpecification:
    """The specification of a module without a description. Raises `ValueError`."""
    label = f"{path.name}:{function}"
    sample = _sample_of(path, function, module, sample_file)
    try:
        model, wrap = describe(module, sample)
    except ValueError:
        raise
    except Exception as exc:
        remedy = _dtype_remedy(exc) or f"{_device_remedy(exc)}; correct the sample or forward"
        raise ValueError(f"the module fails on its sample: {_cause(exc, path)}{remedy}") from exc
    model = replace(model, title=f"{type(module).__name__} of {path.name}")
    specification = _specification(path, function, make, model)
    size = getattr(specification.main_axis, "default", 1)
    try:
        _run(model.module, specification, valid_items(specification, 0, [size, size]), size, label)
    except WeightsError:  # not every value in the sample's range is one that the module takes
        model = replace(model, samples=sample_items(module, sample))
        specification = _specification(path, function, make, model)
    described = f"{file_sha256(path)} {parameters_sha256(module)} {specification.inputs} {specification.outputs}"
    of_file = "" if sample_file is None else f":{user_path(sample_file).absolute()}"
    return replace(
        specification,
        reference=specification.reference + of_file,
        load_module=partial(_load, path, function, make, (wrap, specification)),
        definition_sha256=sha256(described.encode()).hexdigest(),
    )


def _sample_of(path: Path, function: str, module: torch.nn.Module, sample_file: str | None) -> object:
    """The sample input of a module. Raises `ValueError` with the line to write if there is none."""
    if sample_file is not None:
        return _sample_in(user_path(sample_file))
    names = vars(_executed(path))
    for name in (f"sample_{function}", "sample"):
        if name in names:
            sample = names[name]
            if not isfunction(sample):
                return sample
            try:
                with seeded(0):
                    return sample()
            except Exception as exc:
                raise ValueError(f"{name} failed: {_cause(exc, path)}{_device_remedy(exc)}") from exc
    raise ValueError(
        f"there is no sample input from which to learn the inputs of {type(module).__name__}; add this line to the "
        f"file, with your own shapes, the batch first: {example_line(module)}"
    )


def _sample_in(path: Path) -> object:
    """The arrays of a file by their names; of one array that alone. Raises `ValueError`."""
    try:
        content = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as exc:
        raise ValueError(f"the sample {path.name} cannot be read: {getattr(exc, 'strerror', None) or exc}") from exc
    return content if isinstance(content, np.ndarray) else {name: content[name] for name in content.files}


def _specification(path: Path, function: str, make: Callable[[], object], model: UserModel) -> ModelSpecification:
    """Raises `ValueError` for a description that contradicts itself."""
    kinds: Sequence[tuple[Sequence[object], type]] = ((model.inputs, Input), (model.outputs, Output))
    for tensors, what in kinds:
        if not tensors or not all(isinstance(tensor, what) for tensor in tensors):
            raise ValueError(f"{what.__name__.lower()}s must be a list of at least one {what.__name__}(…)")
    described: list[Input | Output] = [*model.inputs, *model.outputs]
    specs = [_tensor(tensor) for tensor in described]
    if len({spec.name for spec in specs}) < len(specs):
        raise ValueError("two tensors have the same name")
    for output in model.outputs:
        if output.kind not in get_args(OutputKind):
            raise ValueError(
                f"unknown kind {output.kind!r} of {output.name}; use one of: {', '.join(get_args(OutputKind))}"
            )
    for tensor in model.inputs:
        _check_values(tensor)
    if model.max_batch_size < 1:
        raise ValueError(f"max_batch_size is {model.max_batch_size}; it must be at least 1")
    count = len(model.inputs)
    specification = ModelSpecification(
        name=served_name(f"{path.stem}_{function}"),
        reference=f"{path}:{function}",
        title=str(model.title or f"{function} of {path.name}"),
        version="1",
        inputs=tuple(specs[:count]),
        outputs=tuple(specs[count:]),
        kinds={output.name: output.kind for output in model.outputs},
        axes=tuple(_axes(model)),
        id_counts=_id_counts(model),
        item=model.item,
        max_batch_size=model.max_batch_size,
        load_module=partial(_load, path, function, make, None),
        default_weights=str(path),
        definition_sha256=file_sha256(path),
        image=model.image,
        payload="tensors" if model.image is None else "fp32",
        values={tensor.name: tensor.values for tensor in model.inputs if tensor.values is not None},
    )
    if model.image is not None and [(spec.datatype, spec.item_shape) for spec in specification.inputs] != [
        ("FP32", (3, model.image.size, model.image.size))
    ]:
        raise ValueError(f"a model with image takes one FP32 input of {model.image.size} × {model.image.size} pixels")
    return _with_items(specification, model.samples)


def _check_values(tensor: Input) -> None:
    """Raises `ValueError` for `values` from which nothing can be drawn, and for any that the datatype cannot hold."""
    dtype = DATATYPES[tensor.datatype]
    limits = np.iinfo(dtype.name) if dtype.kind in "iu" else None
    least, most = (0, 1) if limits is None else (limits.min, limits.max)
    first, last = (least, most + 1) if tensor.values is None else tensor.values
    if not first < last:
        raise ValueError(f"the values of {tensor.name} are {tensor.values}; the second must be above the first")
    used = [value for value in (first, last - 1, tensor.padding) if value is not None]
    if dtype.kind == "f":
        held = all(abs(value) <= float(np.finfo(dtype.name).max) for value in used)
    else:
        held = all(value == int(value) and least <= value <= most for value in used)
    if not held:
        raise ValueError(f"{tensor.name} is {tensor.datatype}, which cannot hold its values or its padding")


def _tensor(described: Input | Output) -> TensorSpec:
    shape = tuple(described.shape)
    if not described.name:
        raise ValueError("a tensor has an empty name")
    if described.datatype not in DATATYPES:
        choice = choose_from(str(described.datatype), [*DATATYPES])
        raise ValueError(f"{described.name} has the unknown datatype {described.datatype!r}; {choice}")
    if shape[:1] != ("batch",) or "batch" in shape[1:]:
        raise ValueError(f'the shape of {described.name} must begin with "batch", and name it once')
    if not all(isinstance(size, str) or (isinstance(size, int) and size >= 0) for size in shape):
        raise ValueError(f"the shape of {described.name} must have sizes from 0 up or names")
    return TensorSpec(
        described.name, described.datatype, tuple(-1 if isinstance(size, str) else size for size in shape)
    )


def _axes(model: UserModel) -> Sequence[Axis]:
    places: dict[str, dict[str, int]] = {}
    described: list[Input | Output] = [*model.inputs, *model.outputs]
    for tensor in described:
        for place, name in enumerate(tensor.shape[1:], 1):
            if isinstance(name, str) and places.setdefault(name, {}).setdefault(tensor.name, place) != place:
                raise ValueError(f"{tensor.name} has the dimension {name} twice")
    padding = {tensor.name: tensor.padding for tensor in model.inputs if tensor.padding is not None}
    axes = []
    for name, tensors in places.items():
        inputs = [tensor.name for tensor in model.inputs if tensor.name in tensors]
        if not inputs:
            raise ValueError(f"no input has the dimension {name} of {next(iter(tensors))}")
        default, largest = model.sizes.get(name, (0, 0))
        if not 0 < default <= largest:
            raise ValueError(
                f'sizes must give the default and the largest size of {name}, as in {{"{name}": (128, 512)}}'
            )
        padded = {input_name: padding.pop(input_name) for input_name in inputs if input_name in padding}
        if padded and len(padded) < len(inputs):
            raise ValueError(f"either all inputs with the dimension {name} have a padding, or none")
        axes.append(Axis(name, default, largest, tensors, padded))
    if padding or sum(axis.padded for axis in axes) > 1:
        raise ValueError("padding needs one dimension of variable size, the same for all inputs that have it")
    return axes


def _id_counts(model: UserModel) -> dict[str, int]:
    """By input whose generated integers end at the row count of one of the module's embeddings, that count."""
    modules: Iterable[object] = getattr(model.module, "modules", tuple)()
    rows = {getattr(module, "num_embeddings", None) for module in modules}
    return {
        tensor.name: tensor.values[1]
        for tensor in model.inputs
        if tensor.values is not None
        and tensor.datatype in ("INT32", "INT64")
        and tensor.values[1] in rows
        and 0 <= (tensor.padding or 0) < tensor.values[1]
    }


def item_maker(described: ModelDescription) -> Callable[[int, Sequence[int]], Mapping[str, Array]] | None:
    """Makes random items of every length. None for images, and for items whose variable sizes only the caller knows."""
    fixed = not described.axes or described.padded_axis is not None
    return partial(random_items, described) if fixed and described.image is None else None


def _with_items(specification: ModelSpecification, samples: Mapping[str, Any] | None) -> ModelSpecification:
    """Add the user's items to the specification, or a function that makes random ones."""
    make_items, items = item_maker(specification), None
    if samples is not None:
        items = {tensor.name: _sample(tensor, samples.get(tensor.name)) for tensor in specification.inputs}
        if len({len(array) for array in items.values()}) != 1:
            raise ValueError("samples must have equally many items for every input")
        if make_items is not None and not specification.axes:
            make_items = partial(_in_turn, items)
    return replace(specification, samples=items, make_items=make_items)


def _in_turn(items: Mapping[str, Array], seed: int, lengths: Sequence[int]) -> Mapping[str, Array]:
    rows = np.arange(seed, seed + len(lengths))
    return {name: array.take(rows, axis=0, mode="wrap") for name, array in items.items()}


def _sample(tensor: TensorSpec, values: Any) -> Array:
    if values is None:
        raise ValueError(f"samples have no {tensor.name}")
    array = np.asarray(values)
    shape = tensor.item_shape
    fits = array.ndim == len(shape) + 1 and all(a in (b, -1) for a, b in zip(shape, array.shape[1:], strict=True))
    if not fits or not len(array) or not np.can_cast(array.dtype, tensor.dtype, "same_kind"):
        raise ValueError(
            f"the samples of {tensor.name} are {array.dtype} {list(array.shape)}, not {tensor.datatype} {[-1, *shape]}"
        )
    with np.errstate(over="ignore", invalid="ignore"):
        held = np.ascontiguousarray(array, tensor.dtype)
    unchanged = np.isinf(held) == np.isinf(array) if held.dtype.kind == "f" else held == array
    if not unchanged.all():
        raise ValueError(f"the samples of {tensor.name} have values that {tensor.datatype} cannot hold")
    return held


def _load(
    path: Path,
    function: str,
    make: Callable[[], object],
    bare: tuple[Wrap, ModelSpecification] | None,
    source: WeightsSource,
) -> torch.nn.Module:
    """The module of another call of the function; `bare` is how one without a description is wrapped, and its
    specification."""
    label = f"{path.name}:{function}"
    try:
        model = _call(make, path, label, source.seed if isinstance(source, RandomWeights) else 0)
        if isinstance(model, UserModel) and bare is None:
            module, wrap, specification = model.module, None, _specification(path, function, make, model)
        elif bare is not None and not isinstance(model, UserModel):
            module, (wrap, specification) = model, bare
        else:
            raise WeightsError(f"{label} returned {type(model).__name__} when it was called again")
    except (UnknownModelError, ValueError) as exc:
        raise WeightsError(str(exc)) from exc
    if not _is_module(module):
        raise WeightsError(f"{label}: the module is a {type(module).__name__}, not a torch.nn.Module")
    _set_weights(module, source, path, label)
    return _checked(module if wrap is None else wrap(module), specification, label)


def _set_weights(module: torch.nn.Module, source: WeightsSource, path: Path, label: str) -> None:
    """Load a checkpoint; other weights are those that the function has set. Raises `WeightsError`."""
    if isinstance(source, CheckpointWeights) and source.path == path:
        verify(path, path.name, source.sha256)
    elif not isinstance(source, RandomWeights):
        load_strictly(module, read_state(source), option_of(source), label)


def _checked(module: torch.nn.Module, specification: ModelSpecification, label: str) -> torch.nn.Module:
    """The module, ready to serve and checked against its description. Raises `WeightsError`."""
    ready(module)
    if not any(parameter.is_meta for parameter in module.parameters()):
        _check(module.cpu(), specification, label)
    return module


def _check(module: torch.nn.Module, specification: ModelSpecification, label: str) -> None:
    """Run two items, and the shorter alone: answers fit the description, and padding does not change them. Raises
    `WeightsError`."""
    axis = specification.main_axis
    size = 1 if axis is None else axis.default
    if axis is None or not axis.padded:
        _run(module, specification, random_items(specification, 0, [size, size]), size, label)
        return
    short = max(1, size // 2)
    items = valid_items(specification, 0, [short, size])

    def shorter(arrays: Mapping[str, Array]) -> dict[str, Array]:
        return {name: axis.cut(name, array[:1], short) for name, array in arrays.items()}

    together = shorter(_run(module, specification, items, size, label))
    alone = _run(module, specification, shorter(items), short, label)
    for name, answer in alone.items():
        limit = _MAX_PADDING_ERROR * float(np.abs(answer).max(initial=0))
        if not np.allclose(answer, together[name], rtol=_MAX_PADDING_ERROR, atol=limit):
            raise WeightsError(
                f"{label}: padding changes the answer {name}; use a mask in the module, or leave the padding out, so "
                "that only items of one length share a batch"
            )


def _run(
    module: torch.nn.Module, specification: ModelSpecification, items: Mapping[str, Array], size: int, label: str
) -> dict[str, Array]:
    """The outputs by name, checked against the description; `size` is that of the first axis. Raises `WeightsError`."""
    import torch

    inputs = [torch.from_numpy(np.ascontiguousarray(items[tensor.name])) for tensor in specification.inputs]
    try:
        with torch.inference_mode():
            answer = module(*inputs)
    except (Exception, SystemExit) as exc:
        match = _REFERENCE.fullmatch(specification.reference)
        path = Path(match["file"] if match else "")
        raise WeightsError(f"{label}: the module fails on inputs of its description: {_cause(exc, path)}") from exc
    answers = [answer] if isinstance(answer, torch.Tensor) else answer
    if not isinstance(answers, tuple | list) or not all(isinstance(value, torch.Tensor) for value in answers):
        kind = type(answer).__name__
        raise WeightsError(f"{label}: the module returned {kind}; return one tensor or a tuple of tensors")
    outputs = specification.outputs
    if len(answers) != len(outputs):
        raise WeightsError(f"{label}: the module returned {len(answers)} tensors; described outputs: {len(outputs)}")
    arrays = {tensor.name: value.numpy() for tensor, value in zip(outputs, answers, strict=True)}
    for tensor in outputs:
        array = arrays[tensor.name]
        expected = (len(inputs[0]), *specification.item_shape(tensor, specification.along(size)))
        if array.shape != expected or array.dtype != tensor.dtype:
            raise WeightsError(
                f"{label}: the module's {tensor.name} is {array.dtype} {list(array.shape)}; by its description it is "
                f"{tensor.dtype} {list(expected)}"
            )
    return arrays
