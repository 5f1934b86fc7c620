"""DESIGN.md's table of rooms and doors, held to the code.

Every `import` statement counts, wherever it stands: at the top, inside a function, or under
`if TYPE_CHECKING`.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "sgl_pipeline"
ENTRY_FILES = {"completion.py", "launch_server.py", "__main__.py", "migration/fit.py"}
FLASHINFER_LEAVES = {
    "pp_runner/attention/flashinfer_attention.py",
    "pp_runner/layer_kernels/flashinfer_kernels.py",
}
TRITON_LEAVES = {"pp_runner/layer_kernels/triton_rounding.py"}


@dataclass(frozen=True)
class Room:
    """`rooms` and `libraries` that may be imported beside the room itself, its ground floor and
    the standard library. None: anything."""

    rooms: frozenset[str]
    libraries: frozenset[str] | None


def room(rooms: str = "", libraries: str | None = "") -> Room:
    return Room(
        frozenset(rooms.split()), None if libraries is None else frozenset(libraries.split())
    )


GROUND_FOLDERS = {"args"}
GROUND_FLOOR = room(libraries="msgspec")
ROOMS = {
    "throttle": room(),
    "scheduling": room("throttle"),
    "cluster": room(libraries="msgspec cryptography"),
    "pp_runner": room("cluster", libraries="torch safetensors numpy zmq flashinfer triton"),
    "migration": room(libraries="numpy"),
    "pipeline": room("throttle scheduling migration", "msgspec"),
    "simulator": room("throttle scheduling migration pipeline", "msgspec numpy matplotlib"),
    "managers": room("throttle scheduling migration pipeline cluster pp_runner", None),
}
# A scheduler that read a clock or drew a number would not run alike in simulator and runtime.
NOT_DETERMINISTIC = {"random", "secrets", "time", "datetime", "uuid", "socket", "asyncio"}
PICKLES = {"pickle", "dill", "cloudpickle", "marshal", "shelve"}


def source_files() -> list[Path]:
    return sorted((ROOT / PACKAGE).rglob("*.py"))


def room_of(path: Path) -> str:
    """The room of a file: "" for the ground floor, "entry" for the entry points."""
    parts = path.relative_to(ROOT / PACKAGE).parts
    if "/".join(parts) in ENTRY_FILES:
        return "entry"
    return parts[0] if len(parts) > 1 and parts[0] not in GROUND_FOLDERS else ""


def imported_modules(path: Path) -> Iterator[str]:
    """Dotted names of all that a file imports; `from a import b` is `a.b`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def rooms_and_libraries(path: Path) -> tuple[set[str], set[str]]:
    """What a file imports: rooms of the package, and libraries beyond the standard library."""
    rooms, libraries = set(), set()
    for name in imported_modules(path):
        parts = name.split(".")
        if parts[0] != PACKAGE:
            libraries.add(parts[0])
        elif len(parts) > 1 and (ROOT / PACKAGE / parts[1]).is_dir():
            rooms |= {parts[1]} - GROUND_FOLDERS
        elif len(parts) > 1 and f"{parts[1]}.py" in ENTRY_FILES:
            rooms.add("entry")
    return rooms, libraries - set(sys.stdlib_module_names)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT / PACKAGE).as_posix()


every_file = pytest.mark.parametrize("path", source_files(), ids=name_of)


@every_file
def test_a_file_imports_only_what_its_room_may(path: Path) -> None:
    own_room = room_of(path)
    if own_room == "entry":
        return
    allowed = ROOMS[own_room] if own_room else GROUND_FLOOR
    rooms, libraries = rooms_and_libraries(path)
    assert rooms <= allowed.rooms | {own_room}
    if allowed.libraries is not None:
        extra = {"zmq"} if name_of(path) == "channels.py" else set()
        assert libraries <= allowed.libraries | extra


@every_file
def test_only_managers_and_entry_points_import_sglang(path: Path) -> None:
    _, libraries = rooms_and_libraries(path)
    assert "sglang" not in libraries or room_of(path) in ("managers", "entry")


@every_file
def test_compiling_libraries_are_imported_in_leaf_files_alone(path: Path) -> None:
    _, libraries = rooms_and_libraries(path)
    assert "flashinfer" not in libraries or name_of(path) in FLASHINFER_LEAVES
    assert "triton" not in libraries or name_of(path) in TRITON_LEAVES


@every_file
def test_deciding_rooms_have_no_clock_no_randomness_and_no_io(path: Path) -> None:
    if room_of(path) in ("throttle", "scheduling", "migration", "pipeline"):
        assert not {name.split(".")[0] for name in imported_modules(path)} & NOT_DETERMINISTIC
        calls = {
            node.func.id
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        assert not calls & {"open", "print", "input"}


@every_file
def test_nothing_is_pickled_or_evaluated(path: Path) -> None:
    assert not {name.split(".")[0] for name in imported_modules(path)} & PICKLES
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            call = ast.unparse(node.func)
            assert call not in ("eval", "exec", "torch.load"), f"{name_of(path)}: {call}"


def test_every_room_is_in_the_table() -> None:
    rooms = {room_of(path) for path in source_files()} - {"", "entry"}
    assert rooms <= set(ROOMS)


def test_tests_are_no_packages() -> None:
    assert not list((ROOT / "test").rglob("__init__.py"))


@pytest.mark.parametrize(
    "source",
    [
        "import sglang.srt",
        "from sglang import srt",
        "def f():\n    import sglang",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from sglang.srt import managers",
    ],
)
def test_imports_are_seen_wherever_they_stand(tmp_path: Path, source: str) -> None:
    path = tmp_path / "module.py"
    path.write_text(source)
    assert "sglang" in rooms_and_libraries(path)[1]
