"""The same secret gives the same identity on every host; a missing or short one is explained."""

import os
from pathlib import Path

import pytest

from sgl_pipeline.cluster.keys import (
    KEY_VARIABLE,
    derive,
    own_or_new_secret,
    read_secret,
    write_identity,
)
from sgl_pipeline.errors import ConfigurationError

SECRET = "0123456789abcdef" * 2


def test_two_hosts_derive_the_same_private_files(tmp_path: Path) -> None:
    contents = []
    for name in ("one", "two"):
        directory = tmp_path / name
        directory.mkdir()
        write_identity(SECRET.encode(), os.fspath(directory))
        files = sorted(directory.iterdir())
        assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
        contents.append([(file.name, file.read_bytes()) for file in files])
    assert contents[0] == contents[1] and len(contents[0]) == 2
    assert all(SECRET.encode() not in content for _, content in contents[0])


def test_each_purpose_has_a_key_of_its_own() -> None:
    assert len({derive(SECRET.encode(), b"identity"), derive(SECRET.encode(), b"greeting")}) == 2
    assert derive(SECRET.encode(), b"identity") != derive(b"another", b"identity")


def test_the_file_comes_before_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, SECRET)
    assert read_secret(None) == SECRET.encode()
    file = tmp_path / "key"
    file.write_text(SECRET[::-1] + "\n")
    assert read_secret(str(file)) == SECRET[::-1].encode()


def test_without_a_key_the_error_says_how_to_make_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with pytest.raises(ConfigurationError, match=r"--cluster-key-file or SGL_.*token_hex\(32\)"):
        read_secret(None)
    with pytest.raises(ConfigurationError, match="nowhere: No such file"):
        read_secret(str(tmp_path / "nowhere"))
    monkeypatch.setenv(KEY_VARIABLE, "short")
    with pytest.raises(ConfigurationError, match=r"5 characters.* 32"):
        read_secret(None)


def test_a_head_that_hands_its_key_on_makes_one_where_none_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    made = {own_or_new_secret(None) for _ in range(2)}
    assert [len(secret) for secret in made] == [64, 64]
    file = tmp_path / "key"
    file.write_text(SECRET)
    assert own_or_new_secret(str(file)) == SECRET.encode()
    monkeypatch.setenv(KEY_VARIABLE, "short")
    with pytest.raises(ConfigurationError, match="has 5 characters"):
        own_or_new_secret(None)
