"""A model's torch module: weights read from files without executing anything, loaded only if all fit; its size.

Imports torch only when a function needs it.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from servers.models.items import valid_items
from servers.models.specification import ModelSpecification, Preprocessing, choose_from
from servers.models.weights import (
    CheckpointWeights,
    FindPretrained,
    PretrainedWeights,
    RandomWeights,
    WeightsError,
    WeightsSource,
    seeded,
    verify,
)

if TYPE_CHECKING:
    import torch

State = Mapping[str, "torch.Tensor"]


def option_of(source: CheckpointWeights | PretrainedWeights) -> str:
    """How a message names the weights."""
    return f"--weights {source.tag if isinstance(source, PretrainedWeights) else source.path.name}"


def read_state(
    source: CheckpointWeights | PretrainedWeights, find: FindPretrained | None = None
) -> dict[str, torch.Tensor]:
    """The state dict on the CPU. Executes nothing that is in the file. The file must be the pinned one; `find` finds
    that of a tag. A state dict under the key `state_dict` is taken from there; the prefix `module.` of DataParallel
    goes. Raises `WeightsError`."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    option = option_of(source)
    if isinstance(source, CheckpointWeights):
        path = source.path
    elif find is None:
        raise WeightsError(f"{option}: this model has no tags; give a checkpoint file, or random:SEED")
    else:
        path = find(source)
    verify(path, option, source.sha256)
    try:
        if path.suffix == ".safetensors":
            # Not mapped: a file that is written again in place would end the server, or change what it answers.
            return {name: value.clone() for name, value in load_file(path).items()}
        loaded: object = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, OSError, ValueError, EOFError, KeyError) as exc:
        remedy = "; a TorchScript archive holds code: save its state_dict()" if "TorchScript" in str(exc) else ""
        raise WeightsError(f"{option}: unreadable as a checkpoint ({type(exc).__name__}){remedy}") from exc
    if isinstance(loaded, Mapping) and isinstance(loaded.get("state_dict"), Mapping):
        loaded = loaded["state_dict"]
    if not isinstance(loaded, Mapping) or not all(isinstance(value, torch.Tensor) for value in loaded.values()):
        raise WeightsError(f"{option}: the file has no state dict (names of parameters with their tensors)")
    return {key.removeprefix("module."): value for key, value in loaded.items()}


def load_strictly(module: torch.nn.Module, state: State, option: str, title: str) -> torch.nn.Module:
    """`module` with exactly these tensors, in FP32 and eval mode, without gradients. A module on the meta device takes
    the tensors over instead of copying them. Raises `WeightsError` if names or shapes differ."""
    expected = module.state_dict()
    shapes = {key for key in expected.keys() & state.keys() if expected[key].shape != state[key].shape}
    refuse_misfits(option, title, expected.keys() - state.keys(), state.keys() - expected.keys(), shapes)
    hollow = any(value.is_meta for value in expected.values())
    if hollow:  # in the form in which a copy would have them
        state = {key: value.detach().to(expected[key].dtype).contiguous() for key, value in state.items()}
    module.load_state_dict(state, strict=True, assign=hollow)
    return ready(module)


def hollow(build: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    """The module that `build` makes, for `load_strictly`: on the meta device if a state dict has all its tensors, so
    that no values are computed that weights replace. A module that computes some of its own while it is built, such as
    a table that no state dict has, or that shares a tensor between layers, is built as its library builds it."""
    import torch

    with seeded(0):
        try:
            with torch.device("meta"), _without_values():
                module = build()
        except Exception:  # noqa: BLE001  a constructor that reads a value raises what it likes
            return build()
        return build() if _keeps_tensors(module) else module


def _without_values() -> AbstractContextManager[object]:
    """Modules are built with empty tensors in place of random ones, which import SymPy on the meta device."""
    import torch
    from torch.overrides import TorchFunctionMode

    class Empty(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return (torch.empty if func is torch.randn else func)(*args, **(kwargs or {}))

    return Empty()


def _keeps_tensors(module: torch.nn.Module) -> bool:
    """Whether a module has tensors that are in no state dict, or in two places of it."""
    import torch
    from torch.utils import _pytree

    given = {id(tensor) for tensor in module.state_dict(keep_vars=True).values()}
    if len(given) < len(module.state_dict()):
        return True
    kept = [value for part in module.modules() for name, value in vars(part).items() if name != "_modules"]
    return any(isinstance(leaf, torch.Tensor) and id(leaf) not in given for leaf in _pytree.tree_leaves(kept))


def refuse_misfits(option: str, title: str, missing: set[str], unexpected: set[str], shapes: set[str]) -> None:
    """Raises `WeightsError` if tensors are missing, unexpected or of another shape."""
    for problem, keys in (("lacks", missing), ("has the unknown", unexpected), ("has another shape for", shapes)):
        if keys:
            raise WeightsError(
                f"{option}: not the weights of {title}: it {problem} {len(keys)} tensors, {min(keys)} among them"
            )


def ready(module: torch.nn.Module) -> torch.nn.Module:
    """The module, ready to serve: FP32, eval mode, no gradients."""
    module = module.float()
    try:
        module.eval()
    except NotImplementedError:  # an exported program keeps the mode in which it was exported
        for part in module.modules():
            part.training = False
    for parameter in module.parameters():  # a TorchScript module has no requires_grad_
        parameter.requires_grad_(False)
    return module


def fill_zero_weights(module: torch.nn.Module) -> torch.nn.Module:
    """Draw weights for layers that their library initialises with zeros, from torch's generator. A model with such
    layers returns zeros or skips whole branches, so that a wrong output would look right. Biases may stay zero."""
    import torch

    def is_zero(tensor: torch.Tensor) -> bool:
        # A few first values tell of most tensors; all of them take longer than drawing them took.
        return not tensor.is_meta and not (tensor.reshape(-1)[:16].any() or tensor.any())

    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("weight") and is_zero(parameter):
                parameter.normal_(std=0.02 if parameter.ndim > 1 else 0.1)
    return module


def scale_norms(module: torch.nn.Module, size: int) -> torch.nn.Module:
    """Give each batch norm of random weights a variance by which its outputs have a mean square of about 4.

    Initialised norms divide by 1. Then the activations of a deep model vanish or grow from layer to layer:
    EfficientNet-B0 answered 1e-14, which FP16 rounds to 0, and Inception v3 the same to every image, so that mixed-up
    answers looked right. With 1 instead of 4, SiLU and gates amplify from layer to layer, and FP16's errors with it.
    The variance is a power of √2, so that the weights depend on the seed alone, and not on how sums are rounded.
    `module` is ready to serve and takes images, FP32 (n, 3, size, size).
    """
    import torch

    norms = [layer for layer in module.modules() if isinstance(layer, torch.nn.modules.batchnorm._BatchNorm)]
    norms = [norm for norm in norms if norm.running_var is not None and not norm.running_var.is_meta]
    if not norms:
        return module

    def scale(norm: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        square = float(arguments[0].square().mean())
        if math.isfinite(square) and square > 0.0:
            norm.get_buffer("running_var").fill_(2.0 ** (round(2.0 * math.log2(square / 4.0)) / 2.0))

    hooks = [norm.register_forward_pre_hook(scale) for norm in norms]
    with torch.no_grad():
        module(torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(0)))
    for hook in hooks:
        hook.remove()
    return module


def load_images_network(
    source: WeightsSource, build: Callable[[], torch.nn.Module], find: FindPretrained, size: int, title: str
) -> torch.nn.Module:
    """A library's network of images, FP32 (n, 3, size, size), as `build` makes it: with random weights, of which none
    are zero and no norm hides others, or with exactly those of a file. Raises `WeightsError`."""
    if isinstance(source, RandomWeights):
        with seeded(source.seed):
            module = fill_zero_weights(build())
        return scale_norms(ready(module), size)
    state = read_state(source, find)
    return load_strictly(hollow(build), state, option_of(source), title)


def refuse_unknown_tag(tag: str, library: str, architecture: str, tags: Iterable[str]) -> None:
    """Raises `WeightsError` for a tag of weights that a library does not have for an architecture."""
    if tag not in (known := list(tags)):
        choice = choose_from(tag, known)
        raise WeightsError(f"--weights {tag}: {library} has no such tag for {architecture}; {choice}")


def hub_file(source: PretrainedWeights, repository: str, names: Sequence[str]) -> Path:
    """The first of the files that the hub's repository has, downloaded if it is missing. Raises `WeightsError`."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    def find() -> Path:
        for name in names:
            try:
                return Path(hf_hub_download(repository, name, revision=source.revision))
            except LocalEntryNotFoundError as exc:  # no network; another name may be in the cache
                missing = exc
            except EntryNotFoundError as exc:
                missing = exc  # type: ignore[assignment]
        raise missing

    return downloaded(source, find)


def downloaded(source: PretrainedWeights, find: Callable[[], Path]) -> Path:
    """The file that `find` returns. Whatever it raises becomes a `WeightsError`: each hub's client raises its own."""
    which = "" if source.revision is None else f" of revision {source.revision}"
    try:
        return find()
    except WeightsError:
        raise
    except Exception as exc:
        raise WeightsError(
            f"{option_of(source)}: the download{which} failed ({type(exc).__name__}); check the network, or give a "
            "checkpoint file"
        ) from exc


def refuse_other_preprocessing(
    source: PretrainedWeights, trained: Preprocessing | None, served: Preprocessing | None, reference: str
) -> None:
    """Raises `WeightsError` if a tag's weights were trained with other images than the model is served with."""
    if trained != served:
        raise WeightsError(
            f"{option_of(source)}: these weights were trained with another preprocessing; use --model "
            f"{reference}.{source.tag}"
        )


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hide transformers' progress bars and reports: what matters of them becomes an error."""
    import transformers

    logging: Any = transformers.utils.logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(50)  # above errors, which are raised
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def measure_size(specification: ModelSpecification) -> tuple[int, int | None]:
    """Parameters, and operations per item at the axes' default sizes; None: they cannot be counted. Both are counted on
    tensors without memory; the specification's operations come first. A module that torch cannot build or run so is
    built and run. The operations of an ONNX file are not counted."""
    if specification.file is not None:
        return _parameters_of_file(specification.file), None
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    items = valid_items(specification, 0, [getattr(specification.main_axis, "default", 1)])
    inputs = [torch.from_numpy(items[tensor.name]) for tensor in specification.inputs]
    try:
        with torch.device("meta"):
            module = specification.load_module(RandomWeights(0))
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            module._apply(fake.from_tensor)  # type: ignore[no-untyped-call]
            with next(module.parameters(), torch.empty(())).device as device:
                counted = count_flops(module, [tensor.to(device) for tensor in inputs])
    except (RuntimeError, ValueError, TypeError, NotImplementedError, WeightsError):
        module = specification.load_module(RandomWeights(0))
        counted = count_flops(module, inputs)
    parameters = sum(parameter.numel() for parameter in module.parameters())
    return parameters, specification.flops_per_item or counted


def count_flops(module: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> int | None:
    """Count a batch's operations in matrix products, convolutions and attention; None if torch counts none. A
    multiply-add counts as two. `module` is one that is `ready`."""
    from torch.utils.flop_counter import FlopCounterMode

    for parameter in module.parameters():  # without gradients torch runs whole blocks as one operator: not counted
        parameter.requires_grad_(parameter.is_floating_point())
    with FlopCounterMode(display=False) as counter:
        module(*inputs)
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    return counter.get_total_flops() or None


@cache
def _parameters_of_file(path: Path) -> int:
    import onnx

    weights = onnx.load(path, load_external_data=False).graph.initializer
    return sum(math.prod(tensor.dims) for tensor in weights)
