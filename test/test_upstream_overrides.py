"""Where our code reaches into SGLang's: every place, held to the list in docs/design/front.md.

A write counts wherever it stands: an assignment, `del`, `setattr` or a call that changes a
container, on what a file imports from sglang, on a name for a part of it, or in a table by a key of
it. Objects that upstream hands to a function are not followed.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "sgl_pipeline"
UPSTREAM = "sglang"
CHANGING_CALLS = {"setattr", "delattr"}
CHANGING_METHODS = {"append", "clear", "extend", "insert", "pop", "popitem", "remove"}
CHANGING_METHODS |= {"__setitem__", "__setattr__", "setdefault", "update"}

# FastAPI's own table of replaced dependencies, and upstream's table of detectors of tool calls.
WRITES = [
    ("managers/entrance/route_guard.py", "app.dependency_overrides[validate_json_request]"),
    ("managers/entrance/streamed_calls.py", "detectors[name]"),
]
SUBCLASSES = [
    ("managers/entrance/front_guard.py", "GuardedTokenizerManager(TokenizerManager)"),
    ("managers/entrance/graceful_stop.py", "StopSignals(SignalHandler)"),
    ("managers/entrance/streamed_calls.py", "_PieceByPiece(BaseFormatDetector)"),
    ("managers/forked_children.py", "ForkingEngine(Engine)"),
]


def root_of(node: ast.expr) -> str:
    """`a` of `a.b[c].d`; "" of anything else."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def upstream_names(tree: ast.AST) -> set[str]:
    """What a file imports from sglang, and the names that it gives to parts of that."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [one for one in node.names if one.name.split(".")[0] == UPSTREAM]
            names |= {one.asname or UPSTREAM for one in found}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == UPSTREAM:
            names |= {one.asname or one.name for one in node.names}
    assignments = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    num_known = -1
    while num_known < len(names):  # a part may get its name before or after what it is a part of
        num_known = len(names)
        for node in assignments:
            if root_of(node.value) in names:
                names |= {one.id for one in node.targets if isinstance(one, ast.Name)}
    return names


def upstream_writes(source: str) -> Iterator[str]:
    """The targets in a file that belong to upstream."""
    tree = ast.parse(source)
    names = upstream_names(tree)

    def is_upstream(node: ast.expr) -> bool:
        return root_of(node) in names or ast.unparse(node).startswith("sys.modules")

    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Subscript):
            is_write = isinstance(node.ctx, ast.Store | ast.Del)
            has_key = isinstance(node, ast.Subscript) and is_upstream(node.slice)
            if is_write and (is_upstream(node) or has_key):
                yield ast.unparse(node)
        elif isinstance(node, ast.Call):
            changed = changed_by(node)
            if changed is not None and is_upstream(changed):
                yield ast.unparse(node)


def changed_by(call: ast.Call) -> ast.expr | None:
    """What a call of `CHANGING_CALLS` or `CHANGING_METHODS` changes."""
    function = call.func
    if isinstance(function, ast.Name) and function.id in CHANGING_CALLS:
        return call.args[0]
    if isinstance(function, ast.Attribute) and function.attr in CHANGING_METHODS:
        return function.value
    return None


def upstream_subclasses(source: str) -> Iterator[str]:
    tree = ast.parse(source)
    names = upstream_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield from (
                f"{node.name}({ast.unparse(base)})" for base in node.bases if root_of(base) in names
            )


def sources() -> Iterator[tuple[str, str]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).as_posix(), path.read_text()


def test_upstream_is_written_to_in_the_listed_places_alone() -> None:
    found = [(name, write) for name, source in sources() for write in upstream_writes(source)]
    assert found == WRITES


def test_the_listed_classes_alone_derive_from_upstreams() -> None:
    found = [(name, one) for name, source in sources() for one in upstream_subclasses(source)]
    assert found == SUBCLASSES


def test_the_design_names_every_place() -> None:
    chapter = (ROOT / "docs" / "design" / "front.md").read_text()
    places = {Path(name).name for name, _ in WRITES + SUBCLASSES}
    assert [name for name in sorted(places) if name not in chapter] == []


@pytest.mark.parametrize(
    "write",
    [
        "import sglang\nsglang.srt.entrypoints.VALUE = 1",
        "from sglang.srt.server_args import ServerArgs\nServerArgs.port = 1",
        "from sglang.srt.server_args import ServerArgs as Args\nArgs.port, other = 1, 2",
        "def f():\n    from sglang import srt\n    del srt.utils.name",
        "from sglang import srt\nsrt.count += 1",
        "from sglang import srt\nsetattr(srt.utils, 'name', 1)",
        "from sglang import srt\nsrt.table.update(a=1)",
        "from sglang import srt\ntable = srt.table\nentry = table['a']\nentry['b'] = 1",
        "from sglang.srt import check\napp.dependency_overrides[check] = print",
        "import sys\nsys.modules['sglang.srt'] = None",
    ],
)
def test_writes_are_seen_in_every_form(write: str) -> None:
    assert len(list(upstream_writes(write))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "from sglang import srt\nown = srt.Args()\nown.port = 1",
        "from sglang import srt\nvalues = [srt.a]\nvalues.append(1)",
    ],
)
def test_objects_of_our_own_may_be_changed(source: str) -> None:
    assert list(upstream_writes(source)) == []
