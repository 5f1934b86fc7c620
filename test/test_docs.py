"""What README, docs/ and DESIGN.md say of the tree is true: links, commands, flags."""

import importlib.util
import re
from pathlib import Path

import pytest
from support.generic_families import GENERIC_FAMILIES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from sgl_pipeline.args import SECTIONS
from sgl_pipeline.args.flags import flags_of
from sgl_pipeline.pp_runner.model.families import FAMILIES

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
RESULTS = ROOT / "benchmark" / "results"
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "DESIGN", "CHANGELOG", "CONTRIBUTING")),
    *(RESULTS / f"{name}.md" for name in ("README", "CLAIMS")),
    ROOT / "benchmark" / "README.md",
    *DOCS.glob("*.md"),
    *DOCS.glob("design/*.md"),
]
MAX_DESIGN_WORDS = 2300  # ten minutes at 230 words a minute


def _anchor(heading: str) -> str:
    """GitHub's anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _anchors(page: Path) -> set[str]:
    return {
        _anchor(line.lstrip("#").strip())
        for line in page.read_text().splitlines()
        if line[:1] == "#"
    }


def _fenced(page: Path) -> str:
    return "\n".join(re.findall(r"^```\w*\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name} links to {target}, which does not exist"
        assert not anchor or anchor in _anchors(file), f"{page.name}: no heading for {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_name_modules_that_exist(page: Path) -> None:
    for module in re.findall(r"python3? -m ([\w.]+)", page.read_text()):
        assert importlib.util.find_spec(module.rstrip(".")) is not None, f"{page.name}: {module}"


def test_design_is_read_in_ten_minutes() -> None:
    assert len((ROOT / "DESIGN.md").read_text().split()) <= MAX_DESIGN_WORDS


def test_every_page_is_in_the_index() -> None:
    index = (DOCS / "README.md").read_text()
    pages = [page.relative_to(DOCS).as_posix() for page in PAGES if DOCS in page.parents]
    assert [page for page in pages if f"({page})" not in index] == ["README.md"]


def test_design_leads_to_every_chapter() -> None:
    design = (ROOT / "DESIGN.md").read_text()
    chapters = [page.name for page in DOCS.glob("design/*.md")]
    assert [name for name in chapters if f"(docs/design/{name})" not in design] == []


def test_every_flag_of_ours_is_explained() -> None:
    text = "".join(page.read_text() for page in DOCS.glob("*.md"))
    ours = [flag.name for section in SECTIONS for _, flag in flags_of(section) if flag.name]
    assert [name for name in ours if f"`{name}" not in text] == []


def test_the_page_of_models_lists_the_families_that_are_tested() -> None:
    table = (DOCS / "models.md").read_text().partition("## Families")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (yes|) ?\| yes \|$", table, re.MULTILINE)
    listed = {
        family.model_type: (family.published, "yes" * (architecture in FAMILIES))
        for family in GENERIC_FAMILIES.values()
        for architecture in [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(family.model_type)]
    }
    assert {model_type: (published, ours) for model_type, published, ours in rows} == listed
