"""A program that answers as `servers.measuring.worker` does, well or badly: the model's name says how."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path


def say(**answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def cell(batch: int, length: int | None, ns: int = 1_000_000) -> dict[str, object]:
    return {"batch": batch, "length": length, "first_call_ns": 5, "calls_ns": [ns] * 7, "rss_bytes": 1}


def main() -> None:
    if sys.argv[1] == "--prepare":
        request = json.loads(sys.argv[2])
        Path(request["artefacts"]).mkdir(exist_ok=True)
        if request["model"] == "unpreparable":  # both preparations run at the same time
            sys.stderr.write(f"{request['engine']} has no such operator\n")
            os.kill(os.getpid(), signal.SIGSEGV)
        export = {"step": "export", "seconds": 1.5, "made_now": True}
        bad_weights = request["model"] == "unprepared"
        say(error="no such weights") if bad_weights else say(file=True, conversions=[export])
        return
    request = json.loads(sys.argv[1])
    model, engine = request["model"], request["engine"]
    starts = Path(request["artefacts"]) / f"starts-{model}-{engine}-{request['mode']}"
    starts.write_text(starts.read_text() + "x" if starts.exists() else "x")
    bad = engine == "bad"
    if bad and model == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if bad and model == "hangs":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    if bad and model == "refuses":
        say(error="the model cannot be loaded")
        sys.exit(1)
    if bad and model == "pollutes":
        sys.stdout.write("hello from a library\n")
    precision = "bf16" if bad and model == "converts" else request["precision"]
    described = {
        "kind": engine,
        "precision": precision,
        "mode": request["mode"],
        "device": "cpu",
        "threads": request["threads"],
    }
    conversions = [{"step": "export", "seconds": 1.5, "made_now": False}]
    ready = {"import_seconds": 0.1, "load_seconds": 0.2, "conversions": conversions, "item": "image"}
    say(ready={**ready, "description": described})
    for line in sys.stdin:
        command = json.loads(line)
        if command.get("profile"):
            say(profiled=[[{"name": "gemm", "count": 1, "seconds": 1e-6, "share": 1.0}] for _ in command["profile"]])
            continue
        batch, length = command["batch"], command["length"]
        if bad and model == "lies":
            batch += 1
        if bad and model == "timeless":
            say(measured={**cell(batch, length), "calls_ns": []})
        elif bad and model == "small" and batch > 1:
            say(error="out of memory")
        elif bad and model == "halfway" and batch > 1:
            os.kill(os.getpid(), signal.SIGKILL)
        elif model == "interrupts" and Path(request["artefacts"], "interrupt").exists():
            Path(request["artefacts"], "interrupt").unlink()
            os.kill(os.getppid(), signal.SIGTERM)
            time.sleep(600)
        else:
            say(measured=cell(batch, length))


main()
