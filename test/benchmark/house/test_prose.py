"""The words to avoid are found where they are, and no further."""

from pathlib import Path

import pytest

from benchmark.house import prose


def test_a_phrase_is_named_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("A number.\nAll stages but for one.\nOptimistic, not optimised.\n")
    found = list(prose.findings(page, prose.AVOIDED))
    assert [line.rpartition(";")[0] for line in found] == [
        "page.md:2: 'but for'",
        "page.md:3: 'optimise'",
    ]
