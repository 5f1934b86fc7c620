"""README's commands for the first hour: they can be run, and what they find comes back."""

import argparse
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.gpu_recipe import README, listed_packages

from benchmark.gpu import bench_gpu
from benchmark.gpu.kernel_pack import PACKAGES
from benchmark.gpu.shapes import MODELS

ROOT = Path(__file__).parents[3]
BENCHMARK, TESTS = "-m benchmark.gpu.bench_gpu", "-m pytest"
# How a command ends that keeps what it prints.
KEEPS_OUTPUT = re.compile(r' 2>&1 \| tee ("\$OUT/\w+\.log")$')


def commands_of(text: str) -> list[str]:
    """The lines of its blocks of code, whole where they go on after a backslash, and what it quotes
    beside them."""
    blocks = re.findall(r"^ *```\n(.*?)^ *```$", text, re.M | re.S)
    lines = [
        " ".join(line.split())
        for block in blocks
        for line in block.replace("\\\n", " ").splitlines()
    ]
    prose = re.sub(r"^ *```\n.*?^ *```$", "", text, flags=re.M | re.S)
    return lines + [" ".join(quoted.split()) for quoted in re.findall(r"`([^`]+)`", prose)]


COMMANDS = commands_of(README)
MEASURING = [line for line in COMMANDS if BENCHMARK in line]
ON_A_CARD = [line for line in MEASURING if "--device cpu" not in line]


def options_of(command: str) -> argparse.Namespace:
    """Exits where the benchmark has no such flag."""
    return bench_gpu._parse(shlex.split(KEEPS_OUTPUT.sub("", command).partition(BENCHMARK)[2]))


def test_every_command_is_found() -> None:
    assert len(ON_A_CARD) == 5 and len(MEASURING) == 6
    assert len([line for line in COMMANDS if TESTS in line]) == 1
    assert README.count(BENCHMARK) == len(MEASURING)


@pytest.mark.parametrize("command", ON_A_CARD)
def test_results_go_to_the_folder_that_comes_back(command: str) -> None:
    options = options_of(command)
    assert options.folder == Path("$OUT") and options.save


def test_a_rehearsals_results_are_not_among_the_results() -> None:
    (command,) = set(MEASURING) - set(ON_A_CARD)
    assert options_of(command).folder == Path(".gpu/rehearsal")


def test_what_is_printed_on_a_card_comes_back_too() -> None:
    printing = [line for line in COMMANDS if TESTS in line or line.startswith("nvidia-smi")]
    logs = [KEEPS_OUTPUT.findall(line) for line in (*printing, *ON_A_CARD)]
    assert all(logs)
    assert len({name for names in logs for name in names}) == len(logs)


def test_the_folder_is_made_and_a_failure_is_seen_through_tee() -> None:
    (line,) = (line for line in COMMANDS if "export OUT=" in line)
    assert "set -o pipefail" in line and line.endswith('mkdir -p "$OUT"')
    assert COMMANDS.index(line) < min(map(COMMANDS.index, ON_A_CARD))


def test_the_parts_come_in_the_order_of_their_worth() -> None:
    options = [options_of(line) for line in ON_A_CARD]
    assert [each.parts for each in options] == [
        ["checks"],
        ["pipelines", "stages"],
        ["kernels"],
        ["stages"],
        ["host"],
    ]
    assert {each.device for each in options} == {"cuda"}
    assert (options[1].models, options[3].depths) == (["Qwen3-8B"], [1, 4])
    assert {*options[1].models, *options[3].models} == {*MODELS} - {"tiny"}


def test_the_benchmark_ends_before_timeout_ends_it() -> None:
    for line in ON_A_CARD:
        if found := re.match(r"timeout (\d+) ", line):
            assert options_of(line).budget_s < int(found[1])


def test_paths_of_the_tests_exist_and_hold_tests_for_a_gpu() -> None:
    (command,) = (line for line in COMMANDS if TESTS in line)
    words = shlex.split(KEEPS_OUTPUT.sub("", command))
    assert words[words.index("-m", words.index("pytest")) + 1] == "gpu"
    paths = [ROOT / word for word in words if word.startswith("test/")]
    named = {file for path in paths for file in ([path] if path.is_file() else path.glob("*.py"))}
    marked = "@pytest.mark." + "gpu\n"
    assert named >= {
        path for path in (ROOT / "test").rglob("test_*.py") if marked in path.read_text()
    }
    for path in paths:
        files = [path] if path.is_file() else list(path.glob("test_*.py"))
        assert any(marked in file.read_text() for file in files), path


# Imports with the distributions that are named alone: those that pip installed, which brings what
# they require, and after a `--` those that are packed.
IMPORT_WITH = """
import importlib.abc, importlib.metadata, importlib.util, re, sys

def plain(name):
    return re.sub("[-_.]+", "-", name).lower()

def required(name):
    try:
        lines = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return set()
    return {plain(re.match(r"[\\w.-]+", line)[0]) for line in lines if "extra ==" not in line}

names = [plain(name) for name in sys.argv[1:]]
listed, found = set(), set(names[: names.index("-")])
while found:
    listed |= found
    found = {other for name in found for other in required(name)} - listed
listed |= set(names[names.index("-") :])
names = importlib.metadata.packages_distributions()
has_flashinfer = importlib.util.find_spec("flashinfer") is not None

class OnlyListed(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        owners = {plain(owner) for owner in names.get(name, ())}
        if owners and not owners & listed:
            raise ModuleNotFoundError(f"{name} is not listed", name=name)

sys.meta_path.insert(0, OnlyListed())
import benchmark.gpu.bench_gpu, sgl_pipeline.pp_runner.stage_worker
import sgl_pipeline.scheduling, sgl_pipeline.throttle, sgl_pipeline.simulator
if has_flashinfer:
    import flashinfer
"""


def import_with(installed: list[str]) -> str:
    """What importing the benchmark and a stage says on stderr."""
    own = "sgl-pipeline"  # the checkout, where an environment has it installed
    packed = [*PACKAGES, "flashinfer-python", own]
    command = [sys.executable, "-c", IMPORT_WITH, *installed, "--", *packed]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stderr


@pytest.mark.multiproc
def test_the_packages_that_it_lists_and_packs_are_all_that_it_needs() -> None:
    listed = listed_packages()
    assert import_with(listed) == ""
    listed.remove("tokenizers")
    assert "tokenizers is not listed" in import_with(listed)


@pytest.mark.parametrize("package", ["requests", "tqdm", "filelock", "packaging", "jinja2"])
def test_what_flashinfer_imports_is_listed(package: str) -> None:
    """FlashInfer 0.7.2 does; the test above imports it only where it is installed."""
    assert package in listed_packages()
