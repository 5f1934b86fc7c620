"""Tries what a lent GPU machine will run, in a stand-in for it: the same Python, the same torch for
CUDA 13.0, the pack of kernels, no SGLang; only the card is missing.

    python -m benchmark.gpu.standin                            # the pack is .gpu/site.tar.xz
    python -m benchmark.gpu.standin --rival .gpu/vllm_attention.tar.xz   # with vLLM's FA3 beside it

Makes the environment from standin_requirements.txt (3 GB to download, once), unpacks the pack, and
runs there: a look for the pack's modules, the collection of the first hour's tests, the rehearsal,
and the tests that need no card of all that runs on one. Ten minutes; needs a Python 3.12. Exits
with 1 where one of them fails. The output of each is kept in --folder.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmark.support.command import Command, Options, Report
from benchmark.support.dated_result import markdown_table
from benchmark.support.environments import install_set
from benchmark.support.paths import BUILD, ROOT
from sgl_pipeline.errors import ConfigurationError

REQUIREMENTS = Path(__file__).with_name("standin_requirements.txt")
PACK = ROOT / ".gpu" / "site.tar.xz"
FOLDER = BUILD / "standin"
PYTHON = "3.12"
# As README.md exports them for a machine without network; and that no card is seen where one is.
FLAGS = {
    "FLASHINFER_DISABLE_JIT": "1",
    "FLASHINFER_USE_CUDA_NORM": "1",
    "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONNOUSERSITE": "1",
    "PYTHONUNBUFFERED": "1",
}
# What README.md runs on a card.
GPU_TESTS = (
    "test/pp_runner/cuda",
    "test/pp_runner/layer_kernels/test_layer_kernels.py",
    "test/pp_runner/layer_kernels/test_triton_rounding.py",
    "test/pp_runner/flashinfer/test_flashinfer_attention.py",
    "test/pp_runner/page_store/test_staged_pages.py",
)
# Not links between hosts: they need cryptography, which a lent machine need not have.
CPU_TESTS = (
    "test/pp_runner/links/test_distributed_link.py",
    "test/pp_runner/links/test_links.py",
    "test/pp_runner/output",
    "test/pp_runner/attention",
    "test/pp_runner/cuda",
    "test/pp_runner/layer_kernels",
    "test/pp_runner/test_flashinfer_contract.py",
    "test/pp_runner/test_recorded_signatures.py",
    "test/pp_runner/cuda/test_gpu_memory.py",
    "test/pp_runner/test_kernel_counts.py",
    "test/pp_runner/test_kv_capacity.py",
    "test/pp_runner/attention/test_kv_pool.py",
    "test/benchmark/gpu",
)
_TIMEOUT_S = 3600
_VERSIONS = """
import importlib.util, platform, numpy, torch, triton, flashinfer
print("python", platform.python_version(), "torch", torch.__version__, "triton", triton.__version__,
    "numpy", numpy.__version__, "flashinfer", flashinfer.__version__)
assert torch.__version__ == "2.11.0+cu130" and not torch.cuda.is_available()
assert importlib.util.find_spec("sglang") is None, "a lent machine has no SGLang"
"""
_MODULES = """
from benchmark.gpu.kernel_modules import MODULES
from benchmark.gpu.packed_kernels import missing_modules
missing = missing_modules()
print(f"{len(MODULES) - len(missing)} of {len(MODULES)} modules are there", *missing)
raise SystemExit(bool(missing))
"""


@dataclass(frozen=True, slots=True)
class Piece:
    """A command of the stand-in's Python, by what it tries."""

    name: str
    arguments: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The output of a piece, without the machine's paths, and the status that it ended with."""

    name: str
    status: int
    seconds: float
    output: str

    @property
    def last_line(self) -> str:
        return next(reversed(self.output.strip().splitlines()), "")


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    command = Command(__spec__.name, __doc__)
    command.add("--pack", type=Path, default=PACK, help="the pack of kernels (.gpu/site.tar.xz)")
    command.add("--rival", type=Path, help="the pack of vLLM's FA3, for its tests")
    command.add("--folder", type=Path, default=FOLDER, help="for all of it (build/standin)")
    command.add("--python", help=f"a Python {PYTHON} (default: found on PATH)")
    return command.run(_try, argv)


def _try(options: Options) -> Report:
    folder = options.folder.resolve()
    packs = [options.pack, *([options.rival] if options.rival else [])]
    for pack in packs:
        if not pack.is_file():
            raise ConfigurationError(f"there is no pack {pack}; benchmark/gpu/README.md says how")
    folder.mkdir(parents=True, exist_ok=True)
    python = make_environment(folder, options.python)
    environment = environment_of(folder, unpack(folder, packs))
    outcomes = [run_piece(piece, python, environment, folder) for piece in pieces(folder)]
    return report_of(outcomes, [_fact(pack) for pack in packs])


def make_environment(folder: Path, named: str | None) -> Path:
    """Installs `REQUIREMENTS` in `folder`, once for these pins; returns the environment's Python.

    Raises ConfigurationError where there is no Python for it or pip fails.
    """
    fingerprint = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()[:16]
    environment = folder / f"environment-{fingerprint}"
    python, installed = environment / "bin" / "python", environment / "installed"
    if not installed.exists():
        install_set(environment, REQUIREMENTS, python=find_python(named))
        installed.touch()
    return python


def find_python(named: str | None) -> str:
    """A Python of the lent machine's version: `named`, or one on PATH, or this one.

    Raises ConfigurationError.
    """
    check = f"import sys; sys.exit(sys.version_info[:2] != {tuple(map(int, PYTHON.split('.')))})"
    candidates = [named] if named else [f"python{PYTHON}", "python3", sys.executable]
    for candidate in candidates:
        found = shutil.which(candidate)
        if found and subprocess.run([found, "-c", check], capture_output=True).returncode == 0:
            return found
    raise ConfigurationError(
        f"{named} is no Python {PYTHON}"
        if named
        else f"there is no Python {PYTHON} on PATH; name one by --python"
    )


def unpack(folder: Path, packs: Sequence[Path]) -> list[Path]:
    """Unpacks each anew into a folder of its own, for PYTHONPATH."""
    sites = []
    for number, pack in enumerate(packs):
        site = folder / f"pack-{number}"
        shutil.rmtree(site, ignore_errors=True)
        with tarfile.open(pack, "r:*") as members:
            members.extractall(site, filter="data")
        sites.append(site)
    return sites


def environment_of(folder: Path, sites: Sequence[Path]) -> dict[str, str]:
    """This process's variables, less what Python and FlashInfer read of them, with `FLAGS`."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "FLASHINFER_", "CUDA_", "VIRTUAL_ENV"))
    }
    path = os.pathsep.join(map(str, (*sites, ROOT)))
    return {**kept, **FLAGS, "PYTHONPATH": path, "FLASHINFER_WORKSPACE_BASE": str(folder)}


def pieces(folder: Path) -> Iterator[Piece]:
    """In the order in which a failure says most."""
    rehearsal = ("-m", "benchmark.gpu.bench_gpu", "--device", "cpu", "--folder", str(folder))
    pytest = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "300")
    yield Piece("versions", ("-c", _VERSIONS))
    yield Piece("modules of the pack", ("-c", _MODULES))
    yield Piece("collecting the card's tests", (*pytest, "-m", "gpu", "--collect-only", *GPU_TESTS))
    yield Piece("rehearsal", rehearsal)
    yield Piece("tests without a card", (*pytest, "-m", "not gpu and not cuda_toolkit", *CPU_TESTS))


def run_piece(piece: Piece, python: Path, environment: dict[str, str], folder: Path) -> Outcome:
    """Runs it in the work tree, with its output in a log of `folder`; one that hangs has failed."""
    print(f"{piece.name} ...", flush=True)
    log = folder / f"{re.sub(r'[^a-z]+', '_', piece.name)}.log"
    started_s = time.monotonic()
    with log.open("w", encoding="utf-8") as output:
        try:
            status = subprocess.run(
                [str(python), *piece.arguments],
                cwd=ROOT,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=_TIMEOUT_S,
            ).returncode
        except subprocess.TimeoutExpired:
            status = -1
            output.write(f"\nit was still running after {_TIMEOUT_S} s\n")
    text = log.read_text(encoding="utf-8", errors="replace")
    text = text.replace(str(folder), "STANDIN").replace(str(ROOT), ".")
    outcome = Outcome(piece.name, status, time.monotonic() - started_s, text)
    print(f"    {outcome.last_line} (exit status {status}, {outcome.seconds:.0f} s)", flush=True)
    return outcome


def report_of(outcomes: Sequence[Outcome], packs: Sequence[str]) -> Report:
    """A line for each piece; the output of all is in the record."""
    rows = [
        [each.name, str(each.status), f"{each.seconds:.0f}", each.last_line.strip("= ")]
        for each in outcomes
    ]
    skipped = [line for each in outcomes for line in each.output.splitlines() if _is_skip(line)]
    texts = [markdown_table(["piece", "exit status", "s", "last line of its output"], rows)]
    if skipped:
        texts.append("Not run there:\n\n```\n" + "\n".join(skipped) + "\n```")
    return Report(
        name="gpu_standin",
        texts=texts,
        facts={"packs": {str(number): fact for number, fact in enumerate(packs)}},
        record={"pieces": [asdict(each) for each in outcomes]},
        problems=[f"{each.name}: {each.last_line}" for each in outcomes if each.status != 0],
    )


def _is_skip(line: str) -> bool:
    return line.startswith("SKIPPED [") or "not measured:" in line


def _fact(pack: Path) -> str:
    digest = hashlib.sha256(pack.read_bytes()).hexdigest()[:16]
    return f"{pack.name} of {pack.stat().st_size / 2**20:.1f} MiB, SHA-256 {digest}..."


if __name__ == "__main__":
    sys.exit(main())
