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


def test_docstrings_that_begin_with_a_clause_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    module = tmp_path / "module.py"
    module.write_text(
        '"""Whether it is true. The rest."""\n'
        "class Stage:\n"
        '    """The stage, and what stands beside it."""\n'
        "    async def wait(self):\n"
        '        """\n'
        "        What comes.\n"
        '        """\n'
        '        return "What a string"\n'
        "def held():\n"
        '    """Whole layers."""\n'
    )
    assert [line.rpartition(";")[0] for line in prose.clauses(module)] == [
        "module.py:1: 'Whether it is true'",
        "module.py:5: 'What comes'",
    ]
