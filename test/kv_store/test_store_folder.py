"""A folder is taken where it is ours alone, and otherwise left as it is."""

import os
from pathlib import Path

import pytest

from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.kv_store.store_folder import FOLDER_SETTING, open_folder


def modes(path: Path) -> set[int]:
    return {entry.stat().st_mode & 0o777 for entry in path.rglob("*") if entry.is_dir()}


def test_a_new_folder_is_for_its_owner_alone_and_opens_again(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o755)
    path = tmp_path / "a" / "store"
    folder = open_folder(path)
    assert open_folder(path) == folder
    assert path.stat().st_mode & 0o777 == 0o700
    assert modes(path) == {0o700}


def test_an_empty_folder_becomes_private(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o755)
    open_folder(tmp_path)
    assert tmp_path.stat().st_mode & 0o777 == 0o700


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    os.chmod(tmp_path, 0o755)
    with pytest.raises(ConfigurationError) as refused:
        open_folder(tmp_path)
    assert all(part in str(refused.value) for part in (str(tmp_path), "thesis", FOLDER_SETTING))
    assert os.listdir(tmp_path) == ["thesis.txt"]
    assert tmp_path.stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("marker", [b'{"format_version": 2}', b"", b"{}"])
def test_a_folder_of_another_format_is_left_alone(tmp_path: Path, marker: bytes) -> None:
    open_folder(tmp_path)
    file = tmp_path / "records" / "format.json"
    file.write_bytes(marker)
    with pytest.raises(ConfigurationError, match=r"format.*file_storage_path"):
        open_folder(tmp_path)
    assert file.read_bytes() == marker


def test_another_users_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(ConfigurationError, match="another user"):
        open_folder(tmp_path)


def test_a_path_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="cannot hold a store"):
        open_folder(tmp_path / "file")
