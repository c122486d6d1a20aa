"""Triton kernels of one form, compiled side by side: dozens are needed, of a quarter of a second to a second each."""

# mypy: disable-error-code="import-untyped"

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch

from servers.options.defaults import usable_cores


def compile_together(calls: Iterable[Callable[[], object]], device: torch.device) -> None:
    """Compile the kernels that these calls launch, on all cores, and launch none: what a kernel would write stays as it
    is, so no call may take places in memory from there. Whatever fails is left to the first launch, which says why."""
    with ThreadPoolExecutor(usable_cores(), "compiling", partial(torch.cuda.set_device, device)) as threads:
        try:
            from triton import AsyncCompileMode

            mode = AsyncCompileMode(threads, ignore_errors=True)
        except (ImportError, TypeError):  # an older Triton
            return
        with suppress(Exception), _launching_nothing() as kernels, mode:
            for call in calls:
                call()
        for kernel in dict.fromkeys(kernels):
            threads.submit(getattr, kernel, "run")  # loads it, with a launcher that a C compiler makes


@contextmanager
def _launching_nothing() -> Iterator[list[object]]:
    """Notes what would be launched."""
    from triton.runtime.jit import JITFunction

    run, kernels = JITFunction.run, list[object]()

    def compiled(function: Any, *arguments: object, **options: object) -> None:
        kernels.append(run(function, *arguments, **{**options, "warmup": True}))

    JITFunction.run = compiled
    try:
        yield kernels
    finally:
        JITFunction.run = run
