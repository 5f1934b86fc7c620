"""DESIGN.md's table of rooms and doors, held to the code."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from benchmark.house.import_graph import (
    ENTRY,
    GROUND,
    PACKAGE,
    ROOT,
    imported_modules,
    name_of,
    room_of,
    source_files,
    upward,
)

# Beside the standard library, by the first folder of a file. Of managers and entry points: any.
# `capacity` is above both simulator and managers: it predicts by the one and measures a server that
# it starts as a process of its own.
LIBRARIES = {
    GROUND: "msgspec",
    "args": "",
    "costs": "msgspec",
    "records": "msgspec",
    "wire": "msgspec zmq",
    "kv_store": "msgspec",
    "throttle": "",
    "scheduling": "",
    "cluster": "msgspec cryptography psutil",
    "migration": "numpy",
    "pipeline": "msgspec",
    "disaggregation": "msgspec",
    "simulator": "msgspec numpy matplotlib",
    "capacity": "msgspec numpy aiohttp requests psutil",
    "pp_runner": "torch safetensors numpy zmq gguf flashinfer triton transformers",
}
# These may import what is below them but for this.
NOT_FROM = {
    "kv_store": {"args", "costs", "records", "throttle"},
    "scheduling": {"kv_store"},
    "cluster": {"throttle", "scheduling", "kv_store"},
    "migration": {"throttle", "scheduling", "cluster", "kv_store"},
    "pipeline": {"cluster", "kv_store"},
    "disaggregation": {"throttle", "cluster", "kv_store", "migration"},
    "simulator": {"cluster", "kv_store"},
    "pp_runner": {
        *("throttle", "scheduling", "migration", "pipeline", "disaggregation", "simulator"),
    },
    "managers": {"simulator"},
}
FLASHINFER_LEAVES = {
    "pp_runner/flashinfer/flashinfer_attention.py",
    "pp_runner/flashinfer/flashinfer_kernels.py",
}
# Seconds of a start that needs neither, so nothing imports these at its top level.
GGUF_LEAVES = {
    "pp_runner/weights/gguf_weights.py",
    *(f"managers/gguf/gguf_{name}.py" for name in ("config", "file", "tensors")),
}
TRITON_LEAVES = {"pp_runner/layer_kernels/triton_rounding.py"}
# The only ones that import transformers' code of models: workers of other models never do.
TRANSFORMERS_LEAVES = {
    f"pp_runner/model/generic/{name}.py"
    for name in (
        "attention_call",
        "decoder_head",
        "expert_reader",
        "probe",
        "probes",
        "rotary_choice",
        "skeleton",
    )
}
# A scheduler that read a clock or drew a number would not run alike in simulator and runtime.
DECIDING_ROOMS = {"throttle", "scheduling", "migration", "pipeline", "disaggregation"}
NOT_DETERMINISTIC = {"random", "secrets", "time", "datetime", "uuid", "socket", "asyncio"}
PICKLES = {"pickle", "dill", "cloudpickle", "marshal", "shelve"}


def top_room(path: Path) -> str:
    return room_of(path).split("/")[0]


def imported_libraries(path: Path) -> set[str]:
    names = {name.split(".")[0] for name in imported_modules(path)}
    return names - set(sys.stdlib_module_names) - {PACKAGE}


def test_no_room_imports_one_above_it() -> None:
    assert upward() == []


def test_a_room_that_is_above_another_is_seen() -> None:
    floors = (ENTRY, *sorted({room_of(path) for path in source_files()} - {ENTRY}))
    assert any(line.startswith("launch_server.py -> ") for line in upward(floors=floors))


def test_rooms_stay_apart_that_have_nothing_to_do_with_each_other() -> None:
    for path in source_files():
        imported = {
            name.split(".")[1] for name in imported_modules(path) if name.startswith(f"{PACKAGE}.")
        }
        assert not imported & NOT_FROM.get(top_room(path), set()), name_of(path)


def test_a_file_imports_only_libraries_that_its_room_may() -> None:
    for path in source_files():
        if top_room(path) not in ("managers", ENTRY):
            extra = imported_libraries(path) - set(LIBRARIES[top_room(path)].split())
            assert not extra, name_of(path)


def test_compiling_libraries_are_imported_in_leaf_files_alone() -> None:
    importing = {name_of(path): imported_libraries(path) for path in source_files()}
    assert {name for name, found in importing.items() if "flashinfer" in found} == FLASHINFER_LEAVES
    assert {name for name, found in importing.items() if "triton" in found} == TRITON_LEAVES
    assert {name for name, found in importing.items() if "gguf" in found} == GGUF_LEAVES
    runner = {name: found for name, found in importing.items() if name.startswith("pp_runner/")}
    leaves = {name for name, found in runner.items() if "transformers" in found}
    assert leaves == TRANSFORMERS_LEAVES


def test_no_file_outside_of_gguf_imports_it_before_it_is_chosen() -> None:
    rooms = ("sgl_pipeline.managers.gguf.", "sgl_pipeline.pp_runner.weights.gguf_weights")
    for path in source_files():
        if name_of(path) in GGUF_LEAVES or room_of(path) == "managers/gguf":
            continue
        for statement in ast.parse(path.read_text()).body:
            if isinstance(statement, ast.ImportFrom):
                assert not f"{statement.module}.".startswith(rooms), name_of(path)


def test_deciding_rooms_have_no_clock_no_randomness_and_no_io() -> None:
    for path in source_files():
        if top_room(path) in DECIDING_ROOMS:
            imported = {name.split(".")[0] for name in imported_modules(path)}
            assert not imported & NOT_DETERMINISTIC, name_of(path)
            assert not called_names(path) & {"open", "print", "input"}, name_of(path)


# It makes a function of keywords for each declaration of a header in its own folder.
EVALUATING = {"pp_runner/cpu_kernels/functions.py": {"exec"}}


def test_nothing_is_pickled_or_evaluated() -> None:
    for path in source_files():
        imported = {name.split(".")[0] for name in imported_modules(path)}
        assert not imported & PICKLES, name_of(path)
        evaluating = called_names(path) & {"eval", "exec", "torch.load"}
        assert evaluating == EVALUATING.get(name_of(path), set()), name_of(path)


@cache
def called_names(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}


def modules_after(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*sys.modules)"
    output = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(output.stdout.split())


@pytest.mark.multiproc
def test_importing_the_package_imports_nothing_and_the_engine_only_light_modules() -> None:
    ours = {
        name for name in modules_after(f"import {PACKAGE}") if f"{name}.".startswith(f"{PACKAGE}.")
    }
    assert ours == {PACKAGE}
    heavy = {"torch", "sglang", "numpy", "zmq", "transformers"}
    assert not modules_after(f"from {PACKAGE} import Engine") & heavy
    assert not modules_after(f"import {PACKAGE}.kv_store.store_client") & heavy


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
    assert imported_libraries(path) == {"sglang"}
