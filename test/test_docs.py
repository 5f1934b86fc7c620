"""What README, docs/ and DESIGN.md say of the tree is true: links, commands, flags, words."""

import importlib.util
import re
from pathlib import Path

import pytest

from sgl_pipeline.args import SECTIONS
from sgl_pipeline.args.flags import flags_of

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
RESULTS = ROOT / "benchmark" / "results"
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "DESIGN", "CHANGELOG", "CONTRIBUTING")),
    *(RESULTS / f"{name}.md" for name in ("README", "CLAIMS")),
    ROOT / "benchmark" / "README.md",
    *DOCS.glob("*.md"),
]
MAX_README_LINES = 150

# Words that make a native reader stop, and what to write instead.
AVOIDED = {
    r"\bbut for\b": "except",
    r"\bfor want of\b": "because there is no",
    r"\bnobody\b|\bsomebody\b": "no request, another request",
    r"\bto be had\b": "available",
    r"\bmend(s|ed|ing)?\b": "fix",
    r"\bdear\b|\bdearer\b": "expensive",
    r"\bthat one\b|\bthe one that\b": "the noun",
    r"\bof one mind\b": "agree",
    r"\btold\b|\btells?\b": "report, say",
    r"\bof late\b": "recent",
    r"\bthose that\b": "the noun",
    r"\bhangs on\b": "depends on",
    r"\*\*What |[.;:] What (?!is 17)": "the noun; a clause is a hard subject",
    r"\blearnt\b|\bspoilt\b|\bwhilst\b": "learned, corrupted, while",
    r"[Ll]icence|[Nn]eighbour|[Hh]onour|(quant|optim|normal|minim|initial)is": "American spelling",
}


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_avoid_words_that_stop_a_reader(page: Path) -> None:
    for number, line in enumerate(page.read_text().splitlines(), 1):
        for pattern, instead in AVOIDED.items():
            found = re.search(pattern, line)
            assert not found, f"{page.name}:{number}: {found[0]!r}; write {instead}"


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= MAX_README_LINES


def test_every_page_is_in_the_index() -> None:
    index = (DOCS / "README.md").read_text()
    missing = [page.name for page in DOCS.glob("*.md") if f"({page.name})" not in index]
    assert missing == ["README.md"]


def test_every_flag_of_ours_is_explained() -> None:
    text = "".join(page.read_text() for page in DOCS.glob("*.md"))
    ours = [flag.name for section in SECTIONS for _, flag in flags_of(section) if flag.name]
    assert [name for name in ours if f"`{name}" not in text] == []
