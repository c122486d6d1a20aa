from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from servers.native.shared.errors import OverLimitError
from servers.native.shared.keys import LEAST_CHARACTERS, MOST_CHARACTERS, MOST_FILE_BYTES, VARIABLE, KeyLimit, Keys
from servers.native.shared.settings import NativeSettings
from servers.options.defaults import OptionError

KEY = "a-key-of-twenty-char"


def keys_of(text: str | bytes, folder: Path, **settings: Any) -> Keys:
    file = folder / "keys"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    keys = Keys.of(NativeSettings(api_key_file=file, **settings))
    assert keys is not None
    return keys


def knows(keys: Keys, key: str) -> bool:
    return found(keys, key)[0]


def found(keys: Keys, key: str) -> tuple[bool, KeyLimit | None]:
    return keys.find([b"Bearer " + key.encode()])


def test_ten_thousand_keys_are_all_known(tmp_path: Path) -> None:
    written = [f"key-of-a-client-{number:06}" for number in range(10_000)]
    keys = keys_of("\n".join(written), tmp_path)
    assert all(knows(keys, key) for key in written)
    assert not knows(keys, "key-of-a-client-010000")


def test_comments_blanks_and_line_ends_are_no_part_of_a_key(tmp_path: Path) -> None:
    keys = keys_of(f"# {'x' * 20}\r\n\r\n  {KEY}\t# über\r\n{KEY}#2\n", tmp_path)
    assert knows(keys, KEY)
    assert knows(keys, f"{KEY}#2")
    assert not knows(keys, "x" * 20)


@pytest.mark.parametrize(
    "text",
    [
        *("", "# nothing", "x" * (LEAST_CHARACTERS - 1), "x" * (MOST_CHARACTERS + 1), f"{KEY} {KEY}", f"{KEY}\n\x00"),
        *(b"\xff" * 20, b"x" * (MOST_FILE_BYTES + 1)),
    ],
)
def test_a_file_without_keys_is_refused_and_not_quoted(tmp_path: Path, text: str | bytes) -> None:
    with pytest.raises(OptionError) as caught:
        keys_of(text, tmp_path)
    assert "xxxx" not in str(caught.value)
    assert KEY not in str(caught.value)


@pytest.mark.parametrize("text", ["", " \n\t", "# none yet\n"])
def test_a_variable_without_keys_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    (tmp_path / "keys").write_text(KEY)
    monkeypatch.setenv(VARIABLE, text)
    for settings in (NativeSettings(), NativeSettings(anyone=True), NativeSettings(api_key_file=tmp_path / "keys")):
        with pytest.raises(OptionError, match=f"^{VARIABLE} has no key"):
            Keys.of(settings)
    (tmp_path / "keys").write_text(text)
    monkeypatch.setenv(VARIABLE, KEY)
    with pytest.raises(OptionError, match="keys has no key"):
        Keys.of(NativeSettings(api_key_file=tmp_path / "keys"))


def test_a_file_that_cannot_be_read_any_more_leaves_the_keys(tmp_path: Path) -> None:
    keys = keys_of(KEY, tmp_path)
    (tmp_path / "keys").unlink()
    assert not keys.reload()
    assert knows(keys, KEY)


def test_without_a_file_and_a_variable_there_are_no_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Keys.of(NativeSettings()) is None
    with pytest.raises(OptionError, match="--open-metrics"):
        Keys.of(NativeSettings(open_metrics=True))
    with pytest.raises(OptionError, match="cannot be read"):
        Keys.of(NativeSettings(api_key_file=tmp_path / "missing"))
    monkeypatch.setenv(VARIABLE, KEY)
    keys = Keys.of(NativeSettings())
    assert keys is not None
    assert knows(keys, KEY)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_beyond_loopback_a_server_needs_keys_or_says_that_anyone_may_use_it(host: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="--anyone"):
        Keys.of(NativeSettings(host=host))
    assert Keys.of(NativeSettings(host=host, anyone=True)) is None
    (tmp_path / "keys").write_text(KEY)
    assert Keys.of(NativeSettings(host=host, api_key_file=tmp_path / "keys")) is not None


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_on_loopback_a_server_needs_no_keys(host: str) -> None:
    assert Keys.of(NativeSettings(host=host)) is None


LIMITED = f"{KEY} requests=2 slots=1\nnone-{KEY}\n"


def limit_of(keys: Keys, key: str = KEY) -> KeyLimit:
    limit = found(keys, key)[1]
    assert limit is not None
    return limit


@pytest.mark.parametrize(("model", "most"), [("language:demo", 1), ("open_clip:ViT-B-32", 2)])
def test_a_key_has_the_stricter_of_its_limits(tmp_path: Path, model: str, most: int) -> None:
    keys = keys_of(LIMITED, tmp_path, model=model)
    for _ in range(most):
        limit_of(keys).take()
    with pytest.raises(OverLimitError, match=f"={most}\\)"):
        limit_of(keys).take()
    limit_of(keys).leave()
    limit_of(keys).take()
    assert found(keys, f"none-{KEY}") == (True, None)


def test_slots_do_not_limit_requests_for_tensors(tmp_path: Path) -> None:
    assert found(keys_of(f"{KEY} slots=1", tmp_path), KEY) == (True, None)


@pytest.mark.parametrize(
    "line",
    [
        *(f"{KEY} requests=0", f"{KEY} requests=-1", f"{KEY} requests=1.5", f"{KEY} requests=1000000"),
        *(f"{KEY} requests", f"{KEY} requests=", f"{KEY} Requests=1", f"{KEY} requests = 1", f"{KEY} rows=1"),
        *(f"{KEY} requests=1,slots=2", f"{KEY} requests=1 requests=1", f"requests=100 slots=100 {KEY}"),
        *("requests=12 slots=2", "requests=999999", f"{KEY} slots=1\n{KEY} slots=2", f"{KEY}\n{KEY} slots=2"),
        *(f"{KEY} slots=1 {KEY}", f"{KEY} slots=١"),
    ],
)
def test_a_limit_that_cannot_be_read_is_refused_by_its_line(tmp_path: Path, line: str) -> None:
    with pytest.raises(OptionError, match=f"line {2 + line.count(chr(10))} of --api-key-file") as caught:
        keys_of(f"other-{KEY}\n{line}", tmp_path)
    assert KEY not in str(caught.value)


def test_the_variable_and_the_file_must_not_contradict_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, f"{KEY} requests=2")
    assert knows(keys_of(f"{KEY} requests=2", tmp_path), KEY)
    with pytest.raises(OptionError, match="line 1 of --api-key-file"):
        keys_of(KEY, tmp_path)


def test_a_request_is_taken_off_where_it_was_counted(tmp_path: Path) -> None:
    keys = keys_of(LIMITED, tmp_path)
    before = limit_of(keys)
    before.take()
    (tmp_path / "keys").write_text(f"aaaa-{KEY} requests=1\n{KEY} requests=1")
    assert keys.reload()
    with pytest.raises(OverLimitError):
        limit_of(keys).take()
    limit_of(keys, f"aaaa-{KEY}").take()
    before.leave()
    limit_of(keys).take()


def test_cells_are_used_again_unless_a_request_counts_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("servers.native.shared.keys.MOST_LIMITED_KEYS", 2)
    keys = keys_of(LIMITED, tmp_path)
    limit_of(keys).take()
    for number in range(5):
        (tmp_path / "keys").write_text(f"{number}-{KEY} requests=1")
        assert keys.reload()
        limit_of(keys, f"{number}-{KEY}").take()
        limit_of(keys, f"{number}-{KEY}").leave()
    (tmp_path / "keys").write_text("\n".join(f"{number}-{KEY} requests=1" for number in range(2)))
    assert not keys.reload()
    assert knows(keys, f"4-{KEY}")


def test_processes_count_together_and_one_that_ends_is_forgotten(tmp_path: Path) -> None:
    keys = keys_of(LIMITED, tmp_path, fronts=2)
    limit_of(keys).take()
    child = os.fork()
    if not child:
        keys.counts.number = 3
        limit_of(keys).take()
        try:
            limit_of(keys).take()
        except OverLimitError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    with pytest.raises(OverLimitError):
        limit_of(keys).take()
    keys.counts.forget(3)
    limit_of(keys).take()


def test_ten_thousand_limited_keys_have_cells_of_their_own(tmp_path: Path) -> None:
    names = [f"key-of-a-client-{number:06}" for number in range(10_000)]
    keys = keys_of("\n".join(f"{name} requests=1" for name in names), tmp_path)
    for name in names:
        limit_of(keys, name).take()
