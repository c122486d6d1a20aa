"""Paths of users whom the system does not know: none ends in a traceback, and none is taken for a folder `~`."""

from __future__ import annotations

import pwd
from collections.abc import Callable
from pathlib import Path

import pytest

from loadgen.measure.machine import MachineRecordError, cache_path, store_record
from servers.language.weights import parse_language_weights
from servers.models.files import keep_file, user_cache
from servers.models.registry import UnknownModelError, get_variants
from servers.models.weights import RandomWeights, WeightsError, parse_weights


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """This process's user has no home and no name, as in a container with any number for it; returns the folder that
    it is in."""

    def unknown(number: int) -> object:
        raise KeyError(number)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for variable in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_without_a_home_nothing_is_kept_and_nothing_fails(homeless: Path) -> None:
    assert isinstance(keep_file(user_cache() / "plans" / "choice.json", b"{}"), OSError)
    with pytest.raises(MachineRecordError):
        store_record(cache_path("noise", "0" * 12), {}, "give --out")
    assert not list(homeless.iterdir())


def test_a_home_is_where_things_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_cache() == tmp_path / ".cache" / "abserve"
    assert cache_path("noise", "1").parent == user_cache()


def test_the_current_folder_may_be_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A path without parts ended every comparison in a traceback."""
    monkeypatch.setenv("XDG_CACHE_HOME", ".")
    monkeypatch.chdir(tmp_path)
    assert cache_path("noise", "1").parent.resolve() == user_cache().resolve() == tmp_path / "abserve"


@pytest.mark.parametrize(
    ("read", "error"),
    [
        (lambda: get_variants("~nosuchuser/model.onnx", ""), UnknownModelError),
        (lambda: get_variants("~nosuchuser/model.py:make", ""), UnknownModelError),
        (lambda: get_variants("~nosuchuser", ""), UnknownModelError),
        (lambda: parse_weights("~nosuchuser/weights.pt"), WeightsError),
        (lambda: parse_language_weights("~nosuchuser/weights", RandomWeights(0)), WeightsError),
    ],
)
def test_the_home_of_an_unknown_user_is_a_missing_file(read: Callable[[], object], error: type[Exception]) -> None:
    with pytest.raises(error, match="~nosuchuser"):
        read()
