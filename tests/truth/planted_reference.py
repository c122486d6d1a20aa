"""`abserve language-info`, `language-reference` and `serve` of the planted model: an answer is drawn by its prompt.

A token that is not the planted one lies as far below the best as a random token of a real model does. A server takes
`STEP_MS` per token, and more for its parts.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests import toy_language_server
from tests.toy_language_server import MODEL, VOCABULARY, planted_tokens

RANDOM_DEFICIT, LARGEST = 9.8, 12.0
STEP_MS, FRONTS_MS, TRITON_MS = 2.0, 3.0, 6.0
"""Per token: of every server, more where the native server has front ends, and more of Triton."""


def judged(prompt: list[int], output: list[int]) -> dict[str, object]:
    """How far each token of an answer is below the planted one."""
    best = planted_tokens(prompt, len(output))
    deficits = [0.0 if token == right else RANDOM_DEFICIT for token, right in zip(output, best, strict=True)]
    return {"deficits": deficits, "best": best, "largest": LARGEST}


def launch_plan(target: str, options: list[str]) -> dict[str, object]:
    """What `abserve serve TARGET … --print-launch` prints."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--http-port")
    parser.add_argument("--fronts", default="1")
    settings, _ = parser.parse_known_args(options)
    native = target == "native"
    more_ms = TRITON_MS if not native else FRONTS_MS if settings.fronts != "0" else 0.0
    in_effect = f"engine=slots,device=cpu{f',fronts={settings.fronts}' if native else ''}"
    server = (
        sys.executable,
        toy_language_server.__file__,
        "--port",
        settings.http_port,
        "--first-ms",
        "5",
        "--step-ms",
        str(STEP_MS + more_ms),
    )
    url = f"http://127.0.0.1:{settings.http_port}"
    return {"argv": [*server, "--in-effect", in_effect], "env": {}, "http_url": url, "model": MODEL, "title": target}


def main() -> None:
    if sys.argv[1] == "serve":
        sys.stdout.write(json.dumps(launch_plan(sys.argv[2], sys.argv[3:])) + "\n")
        return
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
