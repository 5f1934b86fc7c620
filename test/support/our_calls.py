"""What our sources call of a library, by their syntax: names, numbers of arguments, keywords.

For tests against libraries that are not installed here. Imports nothing of them.
"""

import ast
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class OurCall:
    """A call of `name`, by its whole path in the library, at `place`, a file and line.

    With a `*` among the arguments their number is not known, and `num_positional` None.
    """

    name: str
    place: str
    num_positional: int | None
    keywords: tuple[str, ...]

    def bind(self, signature: inspect.Signature) -> None:
        """Raises TypeError where the signature does not take such a call."""
        options = dict.fromkeys(self.keywords)
        if self.num_positional is None:
            signature.bind_partial(**options)
        else:
            signature.bind(*[None] * self.num_positional, **options)


@dataclass(frozen=True, slots=True)
class Uses:
    """The names of a library in our sources, and the calls among them."""

    names: frozenset[str]
    calls: tuple[OurCall, ...]


def uses_of(
    library: str, folder: Path, methods: Mapping[str, str] = {}, left_out: str = ""
) -> Uses:
    """What the sources in `folder` use of `library`.

    Args:
        methods: of objects that the library made: the whole path of each that is called by such a
            name, whatever the object is called.
        left_out: a folder in `folder` whose sources do not count; empty: none.
    """
    names, calls = set[str](), list[OurCall]()
    for path in sorted(folder.rglob("*.py")):
        if left_out and path.is_relative_to(folder / left_out):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        known = dict(_imported(tree, library))
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute | ast.Name) and (name := _path(node, known)):
                names.add(name)
            if not isinstance(node, ast.Call):
                continue
            called = _path(node.func, known)
            if called is None and isinstance(node.func, ast.Attribute):
                called = methods.get(node.func.attr)
            if called is not None:
                names.add(called)
                calls.append(_call(called, f"{path.relative_to(folder)}:{node.lineno}", node))
    return Uses(frozenset(names), tuple(calls))


def _imported(tree: ast.Module, library: str) -> Iterator[tuple[str, str]]:
    """Our names of the library's modules and of what is imported from them, with their paths."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == library:
                    yield (alias.asname, alias.name) if alias.asname else (library, library)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == library:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _path(node: ast.expr, known: Mapping[str, str]) -> str | None:
    """The path of `torch.cuda.Event` or `F.linear`; None for anything else."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.Attribute) and (root := _path(node.value, known)):
        return f"{root}.{node.attr}"
    return None


def _call(name: str, place: str, node: ast.Call) -> OurCall:
    is_counted = not any(isinstance(each, ast.Starred) for each in node.args)
    keywords = tuple(each.arg for each in node.keywords if each.arg is not None)
    return OurCall(name, place, len(node.args) if is_counted else None, keywords)
