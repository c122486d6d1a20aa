from __future__ import annotations

from pathlib import Path

import pytest

from servers.native.shared.keys import LEAST_CHARACTERS, MOST_CHARACTERS, MOST_FILE_BYTES, VARIABLE, Keys
from servers.native.shared.settings import NativeSettings
from servers.options.defaults import OptionError

KEY = "a-key-of-twenty-char"


def keys_of(text: str | bytes, folder: Path) -> Keys:
    file = folder / "keys"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    keys = Keys.of(NativeSettings(api_key_file=file))
    assert keys is not None
    return keys


def knows(keys: Keys, key: str) -> bool:
    return keys.knows([b"Bearer " + key.encode()])


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
