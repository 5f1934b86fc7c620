"""Counts the registers and the stack of each compiled kernel: what spills there is slow.

    python -m benchmark.gpu.kernel_stacks            # of a pack on PYTHONPATH, as README.md sets it
    python -m benchmark.gpu.kernel_stacks --record   # what they take is their bound from here on

NVIDIA's cuobjdump reads it out of the libraries; it comes with Triton, and needs neither a card nor
a toolkit. `check_cuda.py` reads what it compiles in the same way. `stack_bounds.json` has the bytes
that each kernel took when they were recorded: to take more, or to have been compiled for another
card, is a failure.
"""

import importlib.util
import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmark.gpu.kernel_modules import ARCHITECTURE
from benchmark.gpu.packed_kernels import prebuilt_libraries
from benchmark.support.command import Command, Options, Report
from benchmark.support.dated_result import markdown_table
from sgl_pipeline.errors import ConfigurationError, KernelBuildError

BOUNDS = Path(__file__).with_name("stack_bounds.json")
_CUOBJDUMP = "backends/nvidia/bin/cuobjdump"  # in Triton's package

_NUMBERS = (
    "Numbers of FA2's kernels: a 1 in paged ones; mask (0 none, 1 causal, 2 custom, 3 several), "
    "rows of a tile, 16 rows and 16 keys so many times, ... Of FA3's: 1 for bulk copies of keys, "
    "head_dim twice, rows and keys of a tile, ..."
)

Bounds = Mapping[str, Mapping[str, int]]  # bytes by module and kernel; a kernel without any has 0


@dataclass(frozen=True, slots=True)
class Kernel:
    """`name` is the linker's. The stack, in bytes a thread, has spilled registers and arrays."""

    name: str
    registers: int
    stack_bytes: int

    @property
    def label(self) -> str:
        """The function and the numbers of its template, which tell most variants apart."""
        numbers = re.findall(r"L(?:[a-z]|NS_\d+[A-Za-z]+E)(\d+)E", self.name)
        return f"{_function(self.name)}<{','.join(numbers)}>"


@dataclass(frozen=True, slots=True)
class Module:
    """The kernels of a library, and the targets that they were compiled for, such as sm_90a."""

    targets: tuple[str, ...]
    kernels: tuple[Kernel, ...]

    def stacks(self) -> dict[str, int]:
        """The kernels that have a stack, by label; of several with one label the largest."""
        found: dict[str, int] = {}
        for kernel in self.kernels:
            if kernel.stack_bytes:
                found[kernel.label] = max(kernel.stack_bytes, found.get(kernel.label, 0))
        return dict(sorted(found.items()))


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    command = Command(__spec__.name, __doc__)
    command.add("--record", action="store_true", help=f"write {BOUNDS.name}")
    return command.run(_read, argv)


def _read(options: Options) -> Report:
    libraries = prebuilt_libraries()
    if not libraries:
        raise ConfigurationError(
            "there are no prebuilt kernels; put an unpacked pack on PYTHONPATH"
        )
    modules = {name: read_module(library) for name, library in libraries.items()}
    if options.record:
        stacks = {name: module.stacks() for name, module in modules.items()}
        BOUNDS.write_text(json.dumps(stacks, indent=1) + "\n", encoding="utf-8")
    return Report(
        name="kernel_stacks",
        texts=texts_of(modules),
        record={"kernels": record_of(modules)},
        problems=problems_of(modules),
    )


def read_module(library: Path) -> Module:
    """Raises ConfigurationError without cuobjdump, KernelBuildError for a library without
    kernels."""
    command = [find_cuobjdump(), "--dump-resource-usage", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    module = parse_usage(done.stdout)
    if done.returncode != 0 or not module.kernels:
        raise KernelBuildError(f"{library.name} has no kernels that cuobjdump can read")
    return module


def find_cuobjdump() -> str:
    """Triton's, or one on PATH. Raises ConfigurationError."""
    triton = importlib.util.find_spec("triton")
    for folder in (triton.submodule_search_locations or ()) if triton else ():
        if (path := Path(folder) / _CUOBJDUMP).is_file():
            return str(path)
    if on_path := shutil.which("cuobjdump"):
        return on_path
    raise ConfigurationError("there is no cuobjdump; Triton's wheel has one (pip install triton)")


def parse_usage(text: str) -> Module:
    """The kernels in the output of `cuobjdump --dump-resource-usage`."""
    found = re.findall(r"^ Function (\S+):\n +REG:(\d+) STACK:(\d+) ", text, re.M)
    return Module(
        targets=tuple(sorted(set(re.findall(r"^arch = (\S+)$", text, re.M)))),
        kernels=tuple(Kernel(name, int(regs), int(stack)) for name, regs, stack in found),
    )


def read_bounds() -> Bounds:
    """The bounds that were recorded."""
    bounds: Bounds = json.loads(BOUNDS.read_text(encoding="utf-8"))
    return bounds


def problems_of(modules: Mapping[str, Module], bounds: Bounds | None = None) -> list[str]:
    """A line for each kernel that takes more stack than its bound, and for other targets."""
    bounds = read_bounds() if bounds is None else bounds
    target = f"sm_{ARCHITECTURE.replace('.', '')}"
    problems = []
    for name, module in modules.items():
        if module.targets != (target,):
            problems.append(f"{name} is for {', '.join(module.targets)}, not for {target}")
        allowed = bounds.get(name, {})
        problems += [
            f"{name}: {label} takes {stack} bytes of stack, its bound is {allowed.get(label, 0)}"
            for label, stack in module.stacks().items()
            if stack > allowed.get(label, 0)
        ]
    return problems


def texts_of(modules: Mapping[str, Module]) -> list[str]:
    """A table of the modules, and one of the kernels that have a stack."""
    rows, kernels = [], []
    for name, module in modules.items():
        stacks = [kernel.stack_bytes for kernel in module.kernels]
        registers = max(kernel.registers for kernel in module.kernels)
        counts = (len(stacks), registers, sum(map(bool, stacks)), max(stacks))
        rows.append([name, *map(str, counts)])
        kernels += [[name, f"`{each}`", str(stack)] for each, stack in module.stacks().items()]
    heads = ["module", "kernels", "registers at most", "kernels with a stack", "bytes at most"]
    texts = [markdown_table(heads, rows)]
    if kernels:
        texts.append(markdown_table(["module", "kernel", "bytes of stack a thread"], kernels))
        texts.append(_NUMBERS)
    return texts


def record_of(modules: Mapping[str, Module]) -> dict[str, object]:
    """Every kernel of every module, for a result's JSON file."""
    return {name: [asdict(kernel) for kernel in each.kernels] for name, each in modules.items()}


def _function(name: str) -> str:
    """The last part of a linker's name that is a name of its own: `_ZN1a2bcILi1EE` gives `bc`."""
    rest, part = re.sub(r"^_ZN?", "", name), name
    while found := re.match(r"\d+", rest):
        end = found.end() + int(found[0])
        part, rest = rest[found.end() : end], rest[end:]
    return part


if __name__ == "__main__":
    raise SystemExit(main())
