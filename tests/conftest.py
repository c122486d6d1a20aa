"""What every test folder shares: the real model's exported file, made once and kept in the project's .artefacts."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from servers.export.artefacts import Artefact, ensure_artefact
from servers.export.file_form import executed_form
from servers.models.registry import DEFAULT_MODEL, get_specification
from servers.models.specification import ModelSpecification
from servers.models.weights import RandomWeights

PROJECT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def specification() -> ModelSpecification:
    """The default model."""
    return get_specification(DEFAULT_MODEL)


@pytest.fixture(scope="session")
def artefact(specification: ModelSpecification) -> Artefact:
    """The default model with random:0 as ONNX Runtime executes it; takes seconds once and is only hashed afterwards."""
    form = executed_form("onnxruntime", "fp32")
    return ensure_artefact(specification, RandomWeights(0), PROJECT / ".artefacts", form=form)


@pytest.fixture(scope="session")
def artefact_dir(artefact: Artefact) -> Path:
    """What `--artefacts` takes: the folder in which the exported file is up to date."""
    return PROJECT / ".artefacts"


@pytest.fixture(scope="session")
def perf_analyzer() -> Any:
    """NVIDIA's load generator, fetched once into a cache (see perf_analyzer.py beside this file), else a skip."""
    spec = importlib.util.spec_from_file_location("perf_analyzer", Path(__file__).with_name("perf_analyzer.py"))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["perf_analyzer"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        return module.find_perf_analyzer()
    except module.PerfAnalyzerUnavailableError as exc:
        pytest.skip(str(exc))
