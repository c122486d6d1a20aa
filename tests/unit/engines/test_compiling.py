"""Kernels that are compiled together, for a GPU that is not here: Triton's compiler needs none."""

# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from servers.engines.torch.compiling import compile_together

triton = pytest.importorskip("triton")

KERNELS = """
import triton
import triton.language as tl

@triton.jit
def fill(values, VALUE: tl.constexpr):
    tl.store(values + tl.arange(0, 16), VALUE)

@triton.jit
def wrong(values, VALUE: tl.constexpr):
    tl.static_assert(VALUE < 0)
"""


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # which the package sets; taken back after each test
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    (tmp_path / "kernels_of_a_test.py").write_text(KERNELS)
    monkeypatch.syspath_prepend(tmp_path)
    before = driver._active
    driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: 0,
            get_current_stream=lambda _: 0,
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
            launcher_cls=lambda *_: None,
        )
    )
    import kernels_of_a_test  # type: ignore[import-not-found]

    yield kernels_of_a_test
    driver._active = before
    del sys.modules["kernels_of_a_test"]


def test_all_are_compiled_and_none_is_launched(kernels: ModuleType) -> None:
    values, run = torch.zeros(16), type(kernels.fill).run
    calls = [lambda value=value: kernels.fill[(1,)](values, VALUE=value) for value in (1, 2, 1)]
    compile_together([calls[0], lambda: kernels.wrong[(1,)](values, VALUE=3), *calls[1:]], torch.device("cuda"))
    assert not values.any()
    assert type(kernels.fill).run is run
    compiled = kernels.fill.device_caches[0][0].values()
    assert len(compiled) == 2
    assert all(".entry fill" in kernel.asm["ptx"] for kernel in compiled)
    with pytest.raises(triton.CompilationError, match="static_assert"):
        kernels.wrong.warmup(values, VALUE=3, grid=(1,))


def test_what_a_call_raises_is_left_to_the_launch(kernels: ModuleType) -> None:
    def fails() -> None:
        raise RuntimeError("out of memory")

    compile_together([lambda: kernels.fill[(1,)](torch.zeros(16), VALUE=5), fails], torch.device("cuda"))
    assert len(kernels.fill.device_caches[0][0]) == 1
