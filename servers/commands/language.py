"""Internal commands about language models: what a load box must know of one, and the reference for its answers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import orjson
import typer

from servers.commands.serving import failing
from servers.language.module import describe_language_model
from servers.language.specification import language_model
from servers.options.command_line import fail

_Model = Annotated[str, typer.Option("--model", help="Language model, such as language:demo or language:/FOLDER.")]
_Weights = Annotated[
    str | None, typer.Option("--weights", help="random:SEED, a folder or a .safetensors file (default: the model's).")
]


def language_info(model: _Model, weights: _Weights = None) -> None:
    """Describe a language model as one line of JSON: vocabulary, ids for prompts, longest answer, weights."""
    with failing(2):
        document = describe_language_model(language_model(model, weights))
    typer.echo(orjson.dumps(document).decode())


def language_reference(
    answers: Annotated[
        Path, typer.Option("--in", exists=True, dir_okay=False, help="File of answers, with their model.")
    ],
    out: Annotated[Path, typer.Option("--out", dir_okay=False, help="File to write.")],
) -> None:
    """Judge the tokens of answers by transformers' own modules: how far each is below the best one."""
    from servers.language.reference import judge_answers

    with failing(2):
        try:
            out.write_bytes(orjson.dumps(judge_answers(orjson.loads(answers.read_bytes()))))
        except (OSError, orjson.JSONDecodeError) as exc:
            fail(f"{answers.name}: {exc}", exc, status=2)
