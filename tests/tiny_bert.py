"""A BERT so small that a server of it starts and answers in no time, as a folder that `--model` takes."""

from __future__ import annotations

import json
from pathlib import Path

CONFIG = {
    "model_type": "bert",
    "vocab_size": 200,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
    "type_vocab_size": 2,
}


def write_tiny_bert(parent: Path, **changes: int) -> Path:
    """The new folder `tiny`."""
    folder = parent / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return folder
