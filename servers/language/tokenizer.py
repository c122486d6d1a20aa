"""The tokenizer of word level `t0 … tN`: text and token ids are one to one, so that a server that takes only text gets
the same prompt as one that takes ids.

No id is special in it: none is hidden from the text, and none is added to a prompt. Imports no library of tokenizers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from servers.protocol.errors import InvalidRequestError

_WORD = re.compile(r"t(0|[1-9][0-9]{0,8})")
_UNKNOWN_SHOWN = 20


def text_of(ids: Sequence[int], first: bool = True) -> str:
    """The words of the ids. The tokens of a chunk that is not the `first` begin with a space, as servers stream
    them."""
    text = " ".join(f"t{token}" for token in ids)
    return text if first or not ids else f" {text}"


def ids_of(text: str, vocabulary: int) -> list[int]:
    """The ids of a text of words. Raises `InvalidRequestError` for a word that is not in the vocabulary."""
    ids = []
    for word in text.split():
        match = _WORD.fullmatch(word)
        if match is None or int(match[1]) >= vocabulary:
            raise InvalidRequestError(
                f"the prompt has the unknown word {word[:_UNKNOWN_SHOWN]!r}; send token ids, or words from t0 to "
                f"t{vocabulary - 1}"
            )
        ids.append(int(match[1]))
    return ids


def write_tokenizer(folder: Path, vocabulary: int, max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json, which transformers, vLLM and others read."""
    document: dict[str, object] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        # Joins words by a space; without it a text has no spaces at all.
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": False},
        "model": {"type": "WordLevel", "vocab": {f"t{token}": token for token in range(vocabulary)}, "unk_token": "t0"},
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer.json").write_text(json.dumps(document))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
