"""The package's import graph: which room imports which.

A room is a folder, or the package's own files, which are two: the entry points, and the ground
that all rooms share. An arrow is one room that imports another, however many of its files do.
Every `import` statement counts, wherever it stands: at the top, inside a function, or under
`if TYPE_CHECKING`.
"""

import ast
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "sgl_pipeline"
GROUND = "(ground)"
ENTRY = "(entry)"
ENTRY_FILES = ("__main__.py", "completion.py", "engine.py", "launch_server.py")
# From the bottom: a room imports those before it.
FLOORS = (
    *(GROUND, "throttle", "args", "costs", "records", "wire", "kv_store", "scheduling"),
    *("cluster", "migration", "pipeline", "disaggregation", "simulator"),
    *("pp_runner/cpu_kernels", "pp_runner/base", "pp_runner/weights", "pp_runner/layer_kernels"),
    *("pp_runner/attention", "pp_runner/model", "pp_runner/model/generic", "pp_runner/output"),
    *("pp_runner/flashinfer", "pp_runner/cuda", "pp_runner/layer_moves", "pp_runner/links"),
    *("pp_runner/lent_attention", "pp_runner/page_store"),
    *("pp_runner",),
    *("managers/upstream", "managers/channels", "managers/gguf", "managers/command_line"),
    *("managers/grammars", "managers/reports", "managers/tiers", "managers/disaggregation"),
    *("managers/front",),
    *("managers/entrance",),
    *("managers/stages", "managers/hosts", "managers/planning", "managers/doctor"),
    *("managers", "managers/engine", "capacity", ENTRY),
)


def source_files(root: Path = ROOT) -> list[Path]:
    """All Python files of the package in a work tree."""
    return sorted((root / PACKAGE).rglob("*.py"))


def name_of(path: Path, root: Path = ROOT) -> str:
    """The path within the package."""
    return path.relative_to(root / PACKAGE).as_posix()


def room_of(path: Path, root: Path = ROOT) -> str:
    """The room that a file is in."""
    name = name_of(path, root)
    if name in ENTRY_FILES:
        return ENTRY
    return name.rpartition("/")[0] or GROUND


@cache
def imported_modules(path: Path) -> frozenset[str]:
    """Dotted names of all that a file imports; `from a import b` is `a.b`. Parsed once."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise ValueError(f"{path}: a relative import")
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(names)


def imported_files(path: Path, root: Path = ROOT) -> set[Path]:
    """The files of the package that a file imports."""
    files = set()
    for name in imported_modules(path):
        parts = name.split(".")
        while parts[0] == PACKAGE:
            module = root.joinpath(*parts)
            found = [
                one for one in (module.with_suffix(".py"), module / "__init__.py") if one.exists()
            ]
            if found:
                files.add(found[0])
                break
            parts.pop()
    return files - {path}


def arrows(root: Path = ROOT) -> Mapping[tuple[str, str], Sequence[str]]:
    """By (importing room, imported room): the imports, as `file -> file`."""
    found = defaultdict(list)
    for path in source_files(root):
        for imported in sorted(imported_files(path, root)):
            pair = room_of(path, root), room_of(imported, root)
            if pair[0] != pair[1]:
                found[pair].append(f"{name_of(path, root)} -> {name_of(imported, root)}")
    return found


def upward(root: Path = ROOT, floors: Sequence[str] = FLOORS) -> list[str]:
    """The imports of a room that is no lower than the importing one.

    Raises:
        ValueError: a room is missing from `floors`.
    """
    floor_of = {room: floor for floor, room in enumerate(floors)}
    if strangers := {room_of(path, root) for path in source_files(root)} - set(floor_of):
        raise ValueError(f"rooms without a floor: {', '.join(sorted(strangers))}")
    return [
        line
        for (importing, imported), lines in arrows(root).items()
        if floor_of[imported] >= floor_of[importing]
        for line in lines
    ]
