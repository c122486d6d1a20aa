"""`abserve language-info` and `abserve language-reference` of the planted model, whose answers are drawn by its prompt.

A token that is not the planted one lies as far below the best as a random token of a real model does.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.truth.planted_stream import VOCABULARY, planted_tokens

RANDOM_DEFICIT, LARGEST = 9.8, 12.0


def judged(prompt: list[int], output: list[int]) -> dict[str, object]:
    """How far each token of an answer is below the planted one."""
    best = planted_tokens(prompt, len(output))
    deficits = [0.0 if token == right else RANDOM_DEFICIT for token, right in zip(output, best, strict=True)]
    return {"deficits": deficits, "best": best, "largest": LARGEST}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=("language-info", "language-reference"))
    parser.add_argument("--in", dest="asked", type=Path)
    parser.add_argument("--out", type=Path)
    settings, _ = parser.parse_known_args()
    if settings.command == "language-info":
        about = {
            "name": "planted", "vocabulary": VOCABULARY, "eos": [0], "max_length": 4096, "architecture": "planted",
            "parameters": 1, "weights": "planted", "prompt_ids": [1, VOCABULARY - 1],
        }  # fmt: skip
        sys.stdout.write(json.dumps(about) + "\n")
        return
    asked = json.loads(settings.asked.read_text())
    answers = [judged(answer["prompt"], answer["output"]) for answer in asked["answers"]]
    settings.out.write_text(
        json.dumps({"answers": answers, "noise": 0.0, "eos": [0], "weights_sha256": "0" * 64, "seconds": 0.0})
    )


if __name__ == "__main__":
    main()
