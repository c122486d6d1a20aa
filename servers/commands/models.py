"""`abserve models` describes models; `abserve samples` writes sample inputs for a load generator.

Importing the libraries of models and counting operations takes a quarter of a minute, so the well-known models are
described by `servers.models.descriptions`, which keeps others, too. The names of each library are kept beside them.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
from rich.console import Console

from servers.commands.serving import failing
from servers.language.module import describe_language_model
from servers.language.specification import PREFIX, is_language_model, language_model, language_names
from servers.models import descriptions
from servers.models.files import keep_file, user_cache
from servers.models.registry import (
    DEFAULT_MODEL,
    SOURCES,
    all_names,
    get_base,
    known_references,
    lists_names,
    model_size,
    payload_variants,
)
from servers.models.specification import ModelSpecification
from servers.models.weights import parse_weights
from servers.options.command_line import fail

HELP_GROUP = "Explore"

SCHEMA = "abserve.models/1"


def samples(
    out: Annotated[Path, typer.Option("--out", envvar="ABSERVE_SAMPLES_OUT", help="Folder to write.")],
    model: Annotated[
        str, typer.Option("--model", envvar="ABSERVE_SAMPLES_MODEL", help="Model, as `abserve models` names it.")
    ] = DEFAULT_MODEL,
    sequence_length: Annotated[
        str,
        typer.Option("--sequence-length", metavar="TEXT", help="text, as real text has it, or whole numbers: 32,128."),
    ] = "text",
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of generated inputs.")] = 0,
    images: Annotated[Path | None, typer.Option("--images", help="Folder of JPEG files to use.")] = None,
) -> None:
    """Write sample inputs and samples.json; does nothing when up to date."""
    from servers.models.files import FolderError
    from servers.models.samples import write_samples

    with failing(2):
        try:
            written = write_samples(get_base(model), out, sequence_length, seed, images)
        except FolderError as exc:
            fail(str(exc), exc)
    _print(f"{'wrote' if written else 'up to date:'} {out}")


def models(
    reference: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="A model, or a source for its names.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.", rich_help_panel="Output")] = False,
) -> None:
    """List the sources of models and well-known models, all names of a source, or the details of one model.

    Sources are open_clip, torchvision, timm and transformers, as in timm:resnet50; FILE.py:FUNCTION, FILE.onnx, and
    folders with a model of transformers or of Triton. Language models are language:NAME, or a folder with a causal
    model. Nothing is downloaded.
    """
    language = [f"{PREFIX}{name}" for name in language_names()]
    if reference == PREFIX.rstrip(":"):
        _print(_json({"schema": SCHEMA, "names": language}) if json else "\n".join(language))
        return
    if reference in SOURCES and (listed := _names(reference)):
        names = [f"{reference}:{name}" for name in listed]
        _print(_json({"schema": SCHEMA, "names": names}) if json else "\n".join(names))
        return
    described = []
    with failing(2):
        for name in [reference] if reference else (*known_references(), *language):
            described.append(_described(name))
            if reference is None and not json:
                _show_line(described[-1])
    if json:
        _print(_json({"schema": SCHEMA, "models": described}))
    elif reference is None:
        libraries = "|".join(filter(lists_names, SOURCES))
        _print(
            f"\nAll names of a library: abserve models {libraries}. Other models: FILE.py:FUNCTION, FILE.onnx, a "
            "folder of transformers or of Triton."
        )
    else:
        _show_details(described[0])


def _names(source: str) -> list[str]:
    """Every name that a source knows, kept for the version of its library; empty for a source of files."""
    path, versions = user_cache() / "names" / f"{source}.json", descriptions.versions([source])
    with suppress(OSError, ValueError, LookupError, TypeError):
        kept = orjson.loads(path.read_bytes())
        if kept["versions"] == versions:
            return list(kept["names"])
    _announce()
    names = list(all_names(source))
    keep_file(path, orjson.dumps({"versions": versions, "names": names}))
    return names


@cache
def _announce() -> None:
    Console(stderr=True).print("reading the libraries of models …", style="dim", highlight=False)


def _described(reference: str) -> dict[str, Any]:
    """What `abserve models` says of a model. Raises `UnknownModelError` and `WeightsError`."""
    if is_language_model(reference):
        return {**describe_language_model(language_model(reference)), "kind": "language"}
    specification = get_base(reference)
    parameters, flops_per_item = model_size(reference, _announce)
    return {
        "reference": specification.label,
        "name": specification.name,
        "title": specification.title,
        "item": specification.item,
        "inputs": [_tensor(specification, tensor) for tensor in specification.inputs],
        "outputs": [
            {**_tensor(specification, tensor), "kind": specification.kind_of(tensor.name)}
            for tensor in specification.outputs
        ],
        "axes": [
            {"name": axis.name, "default": axis.default, "largest": axis.largest, "padding": dict(axis.padding)}
            for axis in specification.axes
        ],
        "definition_sha256": specification.definition_sha256,
        "payloads": [variant.payload for variant in payload_variants(specification)],
        "max_batch_size": specification.max_batch_size,
        "default_weights": parse_weights(specification.default_weights).label,
        "pretrained_tags": list(specification.pretrained_tags()),
        "parameters": parameters,
        "flops_per_item": flops_per_item,
    }


def _tensor(specification: ModelSpecification, tensor: Any) -> dict[str, Any]:
    """A tensor as JSON; in its shape a variable size is the name of its axis."""
    shape: list[int | str] = ["batch", *tensor.item_shape]
    for axis in specification.axes:
        if tensor.name in axis.places:
            shape[axis.places[tensor.name]] = axis.name
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": shape}


def _show_line(model: dict[str, Any]) -> None:
    _print(f"{model['reference']}: {model['title']}, {_size(model)}")
    _print(f"    {_in_words(model)[0]}")


def _show_details(model: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    named = {"Model": model["reference"], "Title": model["title"], "Name on servers": model["name"]}
    for name, value in (named | _in_words(model)[1]).items():
        if value:
            table.add_row(name, value)
    Console(highlight=False, markup=False).print(table)


def _in_words(model: dict[str, Any]) -> tuple[str, dict[str, str | None]]:
    """What a model takes and answers with, in short and in the lines of its details."""
    return _tokens_in_words(model) if model.get("kind") == "language" else _tensors_in_words(model)


def _tokens_in_words(model: dict[str, Any]) -> tuple[str, dict[str, str | None]]:
    vocabulary, longest = f"{model['vocabulary']:,}", f"{model['max_length']:,}"
    return f"vocabulary of {vocabulary}, prompt and answer of up to {longest} tokens", {
        "Architecture": model["architecture"],
        "Vocabulary": f"{vocabulary} token ids",
        "Ids that end an answer": ", ".join(map(str, model["eos"])),
        "Longest prompt and answer": f"{longest} tokens together",
        "Size": _size(model),
        "Default weights": model["weights"],
        "Weights, SHA-256": model["weights_sha256"],
    }


def _tensors_in_words(model: dict[str, Any]) -> tuple[str, dict[str, str | None]]:
    axes = [
        f"{axis['name']}: {axis['default']} by default, at most {axis['largest']}, "
        f"{'padded' if axis['padding'] else 'not padded'}"
        for axis in model["axes"]
    ]
    return f"{_brief(model['inputs'])} → {_brief(model['outputs'])}", {
        "Inputs": "\n".join(map(_line, model["inputs"])),
        "Outputs": "\n".join(f"{_line(output)}, compared as {output['kind']}" for output in model["outputs"]),
        "Variable sizes": "\n".join(axes),
        "Payloads": ", ".join(model["payloads"]),
        "Largest batch": str(model["max_batch_size"]),
        "Size": _size(model),
        "Definition, SHA-256": model["definition_sha256"],
        "Default weights": model["default_weights"],
        "Weights by tag": ", ".join(model["pretrained_tags"]),
    }


def _brief(tensors: list[dict[str, Any]]) -> str:
    """The tensors of an item, those of one type and shape together."""
    groups: dict[str, list[str]] = {}
    for tensor in tensors:
        groups.setdefault(f"{tensor['datatype']} [{', '.join(map(str, tensor['shape'][1:]))}]", []).append(
            tensor["name"]
        )
    return "; ".join(f"{', '.join(names)} {kind}" for kind, names in groups.items())


def _line(tensor: dict[str, Any]) -> str:
    return f"{tensor['name']} {tensor['datatype']} [{', '.join(map(str, tensor['shape']))}]"


def _size(model: dict[str, Any]) -> str:
    parameters, flops = model["parameters"], model.get("flops_per_item")
    counted = f"{parameters / 1e6:,.1f} million" if parameters >= 10**6 else f"{parameters:,}"
    if flops is None:
        return f"{counted} parameters"
    scales = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
    unit, prefix = next((scale for scale in scales if flops >= scale[0]), (1, ""))
    return f"{counted} parameters, {flops / unit:.4g} {prefix}FLOP per {model['item']}"


def _json(document: object) -> str:
    return orjson.dumps(document, option=orjson.OPT_INDENT_2).decode()


def _print(text: str) -> None:
    Console().print(text, highlight=False, soft_wrap=True, markup=False, emoji=False)
