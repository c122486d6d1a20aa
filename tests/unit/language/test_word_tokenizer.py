"""Text and token ids are one to one, here and in transformers, which reads the files."""

from __future__ import annotations

from pathlib import Path

import pytest

from servers.language.tokenizer import ids_of, text_of, write_tokenizer
from servers.protocol.errors import InvalidRequestError


def test_text_and_ids() -> None:
    assert text_of([5, 17]) == "t5 t17"
    assert text_of([7], first=False) == " t7"
    assert text_of([], first=False) == ""
    assert ids_of("t5  t17\nt0", 18) == [5, 17, 0]


@pytest.mark.parametrize("word", ["t18", "t-1", "t05", "T5", "5", "t٣", "t" + "9" * 400, "hello"])
def test_an_unknown_word_is_refused(word: str) -> None:
    with pytest.raises(InvalidRequestError, match="words from t0 to t17"):
        ids_of(f"t1 {word}", 18)


def test_transformers_reads_the_files_alike(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write_tokenizer(tmp_path, 300, 128)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = [0, 299, 5, 5, 17]
    assert tokenizer(text_of(ids))["input_ids"] == ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == text_of(ids)
