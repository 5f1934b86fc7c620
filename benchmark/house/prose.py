"""Lints prose: words in the pages and in the package's lines that make a native reader stop, and
docstrings of package and benchmarks that begin with a clause or "Of".

    python -m benchmark.house.prose

Exits with 1 where it finds one. Vale would do the same, but its package downloads a binary when it
runs; codespell and the like know words and not phrases.
"""

import argparse
import ast
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmark.house.import_graph import ROOT, source_files

MAX_README_LINES = 150

# What to write instead, by what to avoid: in pages and in lines of the package.
AVOIDED = {
    r"\bbut for\b": "except",
    r"\bfor want of\b": "because there is no",
    r"\bno(body|one)\b|\bsomebody\b": "no request, another request",
    r"\bto be had\b": "available",
    r"\bmend(s|ed|ing)?\b": "fix",
    r"\bdear\b|\bdearer\b": "expensive",
    r"\bhangs on\b": "depends on",
    r"\bso many\b": "the number, or its name",
    r"\b(is|are) no (chance|device|flag|local|name|number|part|rank|token|whole)\b": "is not a",
    r"\blearnt\b|\bspoilt\b|\bwhilst\b": "learned, corrupted, while",
    r"[Ll]icence|[Nn]eighbour|[Hh]onour|(quant|optim|normal|minim|initial)is[aei]": "American",
}
AVOIDED_IN_PAGES = AVOIDED | {
    r"\bthat one\b|\bthe one that\b": "the noun",
    r"\bof one mind\b": "agree",
    r"\btold\b|\btells?\b": "report, say",
    r"\bof late\b": "recent",
    r"\bthose that\b": "the noun",
    r"\*\*What |[.;:] What (?!is 17)": "the noun; a clause is a hard subject",
}
# A docstring that begins so lacks the noun or the verb that a reader expects first.
CLAUSE = re.compile(r"(Of|What|Where|Whether|When|Which|Whose|Who|Why|How|That|Those)\b[^.:\n]*")
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def pages() -> list[Path]:
    """The pages that users and contributors read; results stay as they were measured."""
    results = ROOT / "benchmark" / "results"
    named = [*(results / name for name in ("README.md", "CLAIMS.md")), ROOT / "benchmark/README.md"]
    return [*ROOT.glob("*.md"), *named, *(ROOT / "docs").rglob("*.md")]


def findings(path: Path, avoided: dict[str, str]) -> Iterator[str]:
    """A line for each phrase of `path` that is to be avoided."""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        for pattern, instead in avoided.items():
            if found := re.search(pattern, line):
                yield f"{path.relative_to(ROOT)}:{number}: {found[0]!r}; write {instead}"


def clauses(path: Path) -> Iterator[str]:
    """A line for each docstring of `path` that begins with a clause."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, DOCUMENTED) and (found := CLAUSE.match(ast.get_docstring(node) or "")):
            line = node.body[0].lineno
            instead = "'True if', a noun or a verb"
            yield f"{path.relative_to(ROOT)}:{line}: {found[0][:40]!r}; begin with {instead}"


def main(argv: Sequence[str] | None = None) -> int:
    """Prints all findings; 1 where there are any."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args(argv)
    found = [line for path in pages() for line in findings(path, AVOIDED_IN_PAGES)]
    found += [line for path in source_files() for line in findings(path, AVOIDED)]
    programs = sorted((ROOT / "benchmark").rglob("*.py"))
    found += [line for path in (*source_files(), *programs) for line in clauses(path)]
    num_lines = len((ROOT / "README.md").read_text().splitlines())
    if num_lines > MAX_README_LINES:
        found.append(f"README.md: {num_lines} lines; at most {MAX_README_LINES}")
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
