"""Describes a user's bare module from a sample input, by running it on the CPU: nothing is guessed that can be tried.

A sample is one batch, its first dimension the items: a tensor, a tuple in the order of forward's parameters, or a
mapping by their names; NumPy arrays, too. The module runs with 1, 2 and 3 items; every output has a row per item, which
does not depend on the other rows. Inputs of two or three dimensions are also tried with other lengths, up to 512, and
with items that are padded. All other sizes are the sample's.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from servers.models.modules import ready
from servers.models.specification import Input, Output, UserModel, reason_of
from servers.protocol.tensors import DATATYPES, Array

if TYPE_CHECKING:
    import torch

    Tensors = dict[str, torch.Tensor]

_LARGEST = 512
"""Longest variable size that is tried, unless the sample is longer."""
_TOLERANCE = 1e-3
_ROWS = 3
_BATCH_FIRST = (
    "the first dimension of the sample must be the batch: one item of [3, 224, 224] is a sample of [1, 3, 224, 224]"
)


Wrap = Callable[["torch.nn.Module"], "torch.nn.Module"]
"""Makes of a user's module one that takes the inputs in order and returns a tuple of the outputs."""


def _adapted(names: Sequence[str], by_name: bool, outputs: Sequence[str], module: torch.nn.Module) -> torch.nn.Module:
    """See `Wrap`. `names` are those of forward's parameters, by which it gets the inputs if `by_name`."""
    import torch

    class Adapter(torch.nn.Module):
        """The user's module as the engines call one."""

        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            answers = dict(_named(_called(self.module, names, by_name, inputs)))
            return tuple(answers[name] for name in outputs)

    # torch.export binds the inputs to parameters, and would take those of *inputs for one tuple.
    places = ["self", *(f"input_{place}" for place in range(len(names)))]
    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in places]
    Adapter.forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return Adapter()


def _called(module: torch.nn.Module, names: Sequence[str], by_name: bool, inputs: Sequence[torch.Tensor]) -> Any:
    return module(**dict(zip(names, inputs, strict=True))) if by_name else module(*inputs)


def example_line(module: torch.nn.Module) -> str:
    """A line that defines a sample for the module, to be filled in by its author."""
    arguments = []
    for name in [parameter.name for parameter in _parameters(module) if parameter.default is parameter.empty]:
        value = "torch.randn(2, 3, 224, 224)"
        if "mask" in name:
            value = "torch.ones(2, 16, dtype=torch.long)"
        elif "id" in name.split("_")[-1] or "token" in name:
            value = "torch.randint(0, 1000, (2, 16))"
        arguments.append(f'"{name}": {value}')
    return f"def sample(): return {{{', '.join(arguments)}}}"


def describe(module: torch.nn.Module, sample: object) -> tuple[UserModel, Wrap]:
    """The description of a module, which is made `ready`, and how others like it are wrapped. Raises `ValueError`."""
    module = ready(module.cpu())
    tensors, by_name = _read_sample(module, sample)
    trial = _Trial(module, tensors, by_name)
    rows = trial.rows()
    answers = trial.check_batch(rows)
    axes = trial.find_axes(rows)
    padding = trial.find_padding(rows, axes[0]) if len(axes) == 1 else {}
    ids = trial.id_counts(rows)
    inputs = [_input(name, tensor, axes, padding.get(name), ids.get(name)) for name, tensor in tensors.items()]
    outputs, taken = [], set(tensors)
    for name, tensor in answers.items():
        served = f"{name}_out" if name in taken else name
        shape = _shape(name, tensor, [axis.of_outputs for axis in axes], axes)
        outputs.append(
            Output(served, _datatype(tensor, name), shape, "tensor" if tensor.is_floating_point() else "labels")
        )
    wrap = partial(_adapted, tuple(tensors), by_name, tuple(answers))
    model = UserModel(
        wrap(module),
        inputs,
        outputs,
        {axis.name: (axis.default, axis.largest) for axis in axes},
        item="sequence" if padding else _item(tensors),
    )
    return model, wrap


def sample_items(module: torch.nn.Module, sample: object) -> dict[str, Array]:
    """The sample's own rows, by input, for a module that does not take generated values."""
    return {name: tensor.numpy() for name, tensor in _read_sample(module, sample)[0].items()}


def parameters_sha256(module: torch.nn.Module) -> str:
    """The SHA-256 of all parameters and buffers, by name."""
    import torch

    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


# The sample


def _parameters(module: torch.nn.Module) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(module.forward).parameters.values())
    except ValueError:  # a traced module's; its graph has the names, behind that of the module itself
        graph: Any = module.graph
        names = [value.debugName().partition(".")[0] for value in [*graph.inputs()][1:]]
        return [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]


def _read_sample(module: torch.nn.Module, sample: object) -> tuple[Tensors, bool]:
    """The inputs by name, in forward's order, and whether forward gets them by name."""
    import torch

    parameters = _parameters(module)
    plain = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    takes_more = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if isinstance(sample, torch.Tensor | np.ndarray):
        sample = (sample,)
    if isinstance(sample, Mapping):
        known = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        odd = [str(name) for name in sample if name not in known]
        if odd and not any(p.kind is p.VAR_KEYWORD for p in parameters):
            raise ValueError(f"the sample has {odd[0]}, which forward does not take; it takes {', '.join(known)}")
        by_name = True
        given = {name: sample[name] for name in [*(name for name in known if name in sample), *odd]}
    elif isinstance(sample, tuple | list):
        by_name = False
        names = [p.name for p in plain]
        if len(sample) > len(names) and not takes_more:
            raise ValueError(f"the sample has {len(sample)} inputs, and forward takes {len(names)}: {', '.join(names)}")
        given = {names[at] if at < len(names) else f"input_{at}": value for at, value in enumerate(sample)}
    else:
        raise ValueError(  # noqa: TRY004 (every fault of a description is one)
            f"the sample is {_kind(sample)}; return a tensor, a tuple of tensors in forward's order, or a dict by "
            "forward's names"
        )
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    missing = [name for name in required if name not in given]
    if missing or not given:
        raise ValueError(
            f"the sample has no {missing[0] if missing else 'inputs'}; forward needs {', '.join(required)}"
        )
    tensors = {name: _tensor(name, value) for name, value in given.items() if value is not None}
    sizes = {name: len(tensor) for name, tensor in tensors.items()}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
        raise ValueError(f"the inputs of the sample have different numbers of items: {listed}; {_BATCH_FIRST}")
    if not next(iter(sizes.values())):
        raise ValueError("the sample has no items; give at least one")
    return tensors, by_name


def _kind(value: object) -> str:
    return f"of type {type(value).__name__}"


def _tensor(name: str, value: object) -> torch.Tensor:
    """One input on the CPU; floating-point ones in FP32, which the module runs in."""
    import torch

    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        value = torch.from_numpy(np.ascontiguousarray(value))
    if not isinstance(value, torch.Tensor):
        raise ValueError(  # noqa: TRY004
            f"{name} of the sample is {_kind(value)}; give a tensor of numbers, as in torch.tensor([[1, 2], [3, 4]])"
        )
    if not value.ndim:
        raise ValueError(f"{name} of the sample is a single value; {_BATCH_FIRST}")
    value = value.detach().cpu()
    value = value.float() if value.is_floating_point() else value
    _datatype(value, name)
    return value.contiguous()


def _datatype(tensor: torch.Tensor, name: str) -> str:
    wanted = str(tensor.dtype).removeprefix("torch.")
    for datatype, dtype in DATATYPES.items():
        if dtype.name == wanted:
            return datatype
    raise ValueError(f"{name} is {wanted}, which the protocol does not have; convert it to float32 or to int64")


def _item(tensors: Tensors) -> str:
    first = next(iter(tensors.values()))
    return "image" if len(tensors) == 1 and first.shape[1:2] == (3,) and first.ndim == len("NCHW") else "item"


# The answers


def _named(answer: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of an answer by name: of a mapping, a dataclass or a named tuple its keys, of a tuple its places."""
    import torch

    if isinstance(answer, torch.Tensor):
        yield name or "output", answer
        return
    if answer is None:
        return
    if isinstance(answer, Mapping):
        parts: Sequence[tuple[str, Any]] = [(str(key), value) for key, value in answer.items()]
    elif dataclasses.is_dataclass(answer):
        parts = [(field.name, getattr(answer, field.name)) for field in dataclasses.fields(answer)]
    elif isinstance(answer, tuple) and hasattr(answer, "_fields"):
        parts = list(zip(answer._fields, answer, strict=True))
    elif isinstance(answer, tuple | list):
        parts = [(f"{'' if name else 'output_'}{place}", value) for place, value in enumerate(answer)]
    else:
        raise ValueError(
            f"forward returns {name or 'something'} {_kind(answer)}; return a tensor, or a tuple, a dict or a "
            "dataclass of tensors"
        )
    for key, value in parts:
        yield from _named(value, f"{name}_{key}" if name else key)


@dataclass(slots=True)
class _FoundAxis:
    name: str
    default: int
    largest: int
    of_inputs: Mapping[str, int]
    """By input, the place of the dimension in its shape."""
    of_outputs: Mapping[str, int]


class _Trial:
    """Runs of one module on the rows of its sample."""

    def __init__(self, module: torch.nn.Module, sample: Tensors, by_name: bool) -> None:
        self._module, self._sample, self._by_name = module, sample, by_name

    def run(self, inputs: Tensors) -> Tensors:
        """The outputs by name. Raises whatever the module raises, and `ValueError` for answers that are no tensors."""
        import torch

        with torch.inference_mode():
            returned = _called(self._module, list(inputs), self._by_name, list(inputs.values()))
        answers = dict(_named(returned))
        if not answers:
            raise ValueError("forward returns no tensor")
        return answers

    def runs(self, inputs: Tensors) -> Tensors | None:
        """The outputs; None if the module does not take these inputs."""
        try:
            return self.run(inputs)
        except Exception:  # noqa: BLE001 (whatever the user's code raises)
            return None

    def rows(self) -> Tensors:
        """Three different items: the sample's, or such with its values in another order."""
        import torch

        count = len(next(iter(self._sample.values())))
        if count >= _ROWS:
            return {name: tensor[:_ROWS] for name, tensor in self._sample.items()}
        mixed = {}
        for name, tensor in self._sample.items():
            parts = [tensor[at % count].flatten().roll(at // count).reshape(tensor.shape[1:]) for at in range(_ROWS)]
            mixed[name] = torch.stack(parts)
        repeated = {name: tensor[[at % count for at in range(_ROWS)]] for name, tensor in self._sample.items()}
        return mixed if self.runs(mixed) is not None else repeated

    def check_batch(self, rows: Tensors) -> Tensors:
        """The answers to all rows. Raises `ValueError` unless each follows its row alone."""
        whole = self.run(self._sample)  # its own error says most
        alone = []
        for row in range(_ROWS):
            answers = self.runs(_slice(rows, row, row + 1))
            if answers is None:
                raise ValueError(f"the module takes the whole sample, but not one item of it; {_BATCH_FIRST}")
            alone.append(answers)
        batches = {1: alone[0]}
        for count in (2, _ROWS):
            try:
                batches[count] = self.run(_slice(rows, 0, count))
            except Exception as exc:
                if "padding token" in str(exc):  # as decoders of transformers put it
                    raise ValueError(
                        f"the module fails on {count} items ({reason_of(exc)}); set its config.pad_token_id"
                    ) from exc
                raise ValueError(
                    f"the module takes one item and fails on {count} ({reason_of(exc)}); servers merge requests, so "
                    "forward must take any number of items: use x.shape[0] or -1 in place of a fixed batch size"
                ) from exc
        for name in whole:
            shapes = [list(answers[name].shape) if name in answers else None for answers in batches.values()]
            if any(shape is None or shape[:1] != [count] for count, shape in zip(batches, shapes, strict=True)):
                raise ValueError(
                    f"its output {name} has the shapes {', '.join(map(str, shapes))} for 1, 2 and 3 items, so it does "
                    f"not follow the batch; return one row per item (or {_BATCH_FIRST})"
                )
        together, again = batches[_ROWS], self.run(_slice(rows, 0, _ROWS))
        for name, answer in together.items():
            if not _close(answer, again[name]):
                raise ValueError(
                    f"its output {name} differs when the same input is sent twice; in eval mode forward must not draw "
                    "random numbers: F.dropout needs training=self.training"
                )
            for row in range(_ROWS):
                if alone[row][name].shape[1:] != answer.shape[1:] or not _close(answer[row], alone[row][name][0]):
                    raise ValueError(
                        f"its output {name} for an item changes with the other items of the batch; servers merge "
                        "requests, so no operation may mix the rows of the first dimension"
                    )
        return together

    def find_axes(self, rows: Tensors) -> list[_FoundAxis]:
        """The dimensions whose other sizes the module takes."""
        groups: dict[int, dict[str, int]] = {}
        for name, tensor in rows.items():
            for place in range(1, tensor.ndim) if tensor.ndim in (2, 3) else ():
                if tensor.shape[place] > 1:
                    groups.setdefault(tensor.shape[place], {}).setdefault(name, place)
        one_row = _slice(rows, 0, 1)
        axes: list[_FoundAxis] = []
        for size, alike in groups.items():
            integers = {name: place for name, place in alike.items() if not rows[name].is_floating_point()}
            for places in (alike, integers) if 0 < len(integers) < len(alike) else (alike,):
                of_outputs = self._follows(one_row, places, size)
                if of_outputs is None:
                    continue
                largest = self._largest(one_row, places, size, of_outputs)
                axes.append(_FoundAxis(f"length_{len(axes)}" if axes else "length", size, largest, places, of_outputs))
                break
        return axes

    def _follows(self, row: Tensors, places: Mapping[str, int], size: int) -> dict[str, int] | None:
        """The outputs' dimensions that follow these of the inputs; None if shorter ones are not taken, or change an
        output's shape in another way."""
        whole = self.run(row)
        of_outputs: dict[str, int] | None = None
        for length in {max(1, size // 2), size - 1}:
            answers = self.runs(_resized(row, places, length))
            if answers is None or answers.keys() != whole.keys():
                return None
            changed: dict[str, int] = {}
            for name, answer in answers.items():
                if answer.ndim != whole[name].ndim:
                    return None
                differing = [at for at in range(answer.ndim) if answer.shape[at] != whole[name].shape[at]]
                if len(differing) > 1 or any(
                    (whole[name].shape[at], answer.shape[at]) != (size, length) or at == 0 for at in differing
                ):
                    return None
                if differing:
                    changed[name] = differing[0]
            if of_outputs is not None and changed != of_outputs:
                return None
            of_outputs = changed
        return of_outputs

    def _largest(self, row: Tensors, places: Mapping[str, int], size: int, of_outputs: Mapping[str, int]) -> int:
        """The largest size up to 512 that the module takes, by doubling and then by halving the gap."""

        def taken(length: int) -> bool:
            answers = self.runs(_resized(row, places, length))
            return answers is not None and all(answers[name].shape[at] == length for name, at in of_outputs.items())

        most = max(size, _LARGEST)
        if taken(most):
            return most
        good, bad = size, most
        while bad - good > 1:
            middle = (good + bad) // 2
            good, bad = (middle, bad) if taken(middle) else (good, middle)
        return good

    def find_padding(self, rows: Tensors, axis: _FoundAxis) -> dict[str, int]:
        """The values, by input, that lengthen an item without changing its answer; empty if there are none."""
        short = max(1, axis.default // 2)
        whole = _resized(_slice(rows, 0, 1), axis.of_inputs, short)
        alone = self.runs(whole)
        if alone is None or any(rows[name].is_floating_point() for name in axis.of_inputs):
            return {}
        for value in dict.fromkeys([0, *self._padding_ids()]):
            padding = {name: 0 if _is_mask(name, rows[name]) else value for name in axis.of_inputs}
            longer = {name: _padded(tensor, axis, name, padding) for name, tensor in whole.items()}
            answers = self.runs(longer)
            if answers is None:
                continue
            cut = {name: _cut(answer, axis.of_outputs.get(name), short) for name, answer in answers.items()}
            if all(_close(cut[name], answer) for name, answer in alone.items()):
                return padding
        return {}

    def _padding_ids(self) -> Iterator[int]:
        for module in self._module.modules():
            value = getattr(module, "padding_idx", None)
            if isinstance(value, int):
                yield value

    def id_counts(self, rows: Tensors) -> dict[str, int]:
        """By input that goes into an embedding unchanged, the embedding's number of rows."""
        import torch

        places = {tensor.data_ptr(): name for name, tensor in rows.items() if tensor.numel()}
        counts: dict[str, int] = {}

        def note(module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
            name = places.get(inputs[0].data_ptr()) if inputs and isinstance(inputs[0], torch.Tensor) else None
            if name is not None:
                counts[name] = min(int(getattr(module, "num_embeddings", 0)), counts.get(name, 2**62))

        embeddings = [module for module in self._module.modules() if isinstance(module, torch.nn.Embedding)]
        hooks = [module.register_forward_pre_hook(note) for module in embeddings]
        try:
            self.run(rows)
        finally:
            for hook in hooks:
                hook.remove()
        return counts


def _slice(tensors: Tensors, first: int, last: int) -> Tensors:
    return {name: tensor[first:last].contiguous() for name, tensor in tensors.items()}


def _cut(tensor: torch.Tensor, place: int | None, length: int) -> torch.Tensor:
    return tensor if place is None else tensor.narrow(place, 0, length)


def _resized(tensors: Tensors, places: Mapping[str, int], length: int) -> Tensors:
    """The inputs with another length: their beginning, repeated as often as it takes."""
    resized = {}
    for name, tensor in tensors.items():
        place = places.get(name)
        if place is not None:
            repeats = [1] * tensor.ndim
            repeats[place] = math.ceil(length / tensor.shape[place])
            tensor = tensor.repeat(repeats).narrow(place, 0, length).contiguous()
        resized[name] = tensor
    return resized


def _padded(tensor: torch.Tensor, axis: _FoundAxis, name: str, padding: Mapping[str, int]) -> torch.Tensor:
    place = axis.of_inputs.get(name)
    if place is None:
        return tensor
    shape = list(tensor.shape)
    shape[place] = axis.default
    longer = tensor.new_full(shape, padding[name])
    longer.narrow(place, 0, tensor.shape[place]).copy_(tensor)
    return longer


def _close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    a, b = actual.detach().double(), expected.detach().double()
    if a.shape != b.shape:
        return False
    finite = b[b.isfinite()]
    limit = _TOLERANCE * float(finite.abs().max()) if finite.numel() else 0.0
    return a.allclose(b, rtol=_TOLERANCE, atol=limit, equal_nan=True)


def _is_mask(name: str, tensor: torch.Tensor) -> bool:
    values = set(tensor.flatten().tolist())
    return values <= {0, 1} and (str(tensor.dtype) == "torch.bool" or "mask" in name.lower())


def _shape(
    name: str, tensor: torch.Tensor, places: Sequence[Mapping[str, int]], axes: Sequence[_FoundAxis]
) -> list[int | str]:
    shape: list[int | str] = ["batch", *map(int, tensor.shape[1:])]
    for axis, of_tensor in zip(axes, places, strict=True):
        if name in of_tensor:
            shape[of_tensor[name]] = axis.name
    return shape


def _input(
    name: str, tensor: torch.Tensor, axes: Sequence[_FoundAxis], padding: int | None, id_count: int | None
) -> Input:
    """An input whose generated values lie where the sample's do."""
    shape = _shape(name, tensor, [axis.of_inputs for axis in axes], axes)
    values: tuple[int, int] | None = None
    if not tensor.numel():
        return Input(name, _datatype(tensor, name), shape, None, padding)
    least, most = float(tensor.min()), float(tensor.max())
    if id_count is not None:
        values = (1 if padding == 0 and id_count > 1 else 0, id_count)
    elif _is_mask(name, tensor):
        values = (1, 2)
    elif not tensor.is_floating_point():
        values = (int(least), int(most) + 1)
    elif least >= 0.0 and math.isfinite(most):
        values = (0, max(1, math.ceil(most)))
    if str(tensor.dtype) == "torch.bool" and not _is_mask(name, tensor):
        values = None
    return Input(name, _datatype(tensor, name), shape, values, padding)
