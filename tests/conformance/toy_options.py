"""The options of the toy server: those of `abserve serve` that conformance uses, and faults to plant."""

from __future__ import annotations

import argparse

from toy_requests import MODEL  # type: ignore[import-not-found]  # beside this file: it is part of a program


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    made.add_argument("command")
    made.add_argument("kind")
    made.add_argument("--print-launch", action="store_true")
    made.add_argument("--http-port", type=int, required=True)
    made.add_argument("--grpc-port")
    made.add_argument("--metrics-port")
    made.add_argument("--model", default=MODEL)
    made.add_argument("--queue-size", type=int, default=512)
    made.add_argument("--max-body-bytes", type=int, default=64_000_000)
    made.add_argument("--read-timeout-s", type=float, default=30)
    made.add_argument("--row-ms", type=float, default=0)
    made.add_argument("--startup-ms", type=float, default=0)
    made.add_argument("--allow-shared-memory", action="store_true")
    made.add_argument("--allow-model-control", action="store_true")
    made.add_argument("--fault", action="append", default=[])
    return made
