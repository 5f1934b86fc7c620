"""Where the user's cache is, and who may write to it."""

from pathlib import Path

import pytest

from sgl_pipeline.user_cache import make_private, user_cache_directory


def test_the_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert user_cache_directory() == Path("/somewhere/sgl_pipeline")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert user_cache_directory() == Path.home() / ".cache" / "sgl_pipeline"


def test_a_directory_is_made_for_this_user_alone_and_others_are_refused(tmp_path: Path) -> None:
    make_private(tmp_path / "new")
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    make_private(tmp_path / "new")
    (tmp_path / "new").chmod(0o770)
    with pytest.raises(PermissionError, match="chmod 700"):
        make_private(tmp_path / "new")
