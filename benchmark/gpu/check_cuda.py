"""Compiles what FlashInfer runs on a card, and tests what came out, on a machine without one.

    make check-cuda
    python -m benchmark.gpu.check_cuda --save       # writes benchmark/results/<date>_check_cuda

All modules of a pack, so that compiler, headers and libraries out of pip's wheels are known to fit
together; and the planners, to be asked what they would have an H200 do. No kernel may take more
stack than was recorded (`kernel_stacks.py`). Then the tests marked `cuda_toolkit` load and call
modules and planners. Exits with 1 when something does not compile or fails. What was compiled
before is not compiled again; `make clean` removes it.
"""

import argparse
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmark.gpu.compiled_planners import PLANNERS, build_planner
from benchmark.gpu.kernel_modules import (
    ARCHITECTURE,
    FOLDER,
    MODULES,
    Build,
    compile_module,
    prepare,
)
from benchmark.gpu.kernel_stacks import Module, problems_of, read_module, record_of, texts_of
from benchmark.gpu.kernel_wheels import REQUIREMENTS, ROOT, pins
from benchmark.support.dated_result import markdown_table, save_result
from sgl_pipeline.errors import SglPipelineError

TESTS = "test/pp_runner/cuda"
REPORT = FOLDER / "tests.xml"
# The tests skip without it.
CHECKING_VARIABLE = "SGL_PIPELINE_CHECK_CUDA"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--save", action="store_true", help="write a dated result")
    parser.add_argument("pytest", nargs="*", help="options for pytest, after `--`")
    arguments = parser.parse_args()
    begin_s = time.monotonic()

    def report(line: str) -> None:
        print(f"[{time.monotonic() - begin_s:5.0f} s] {line}", flush=True)

    try:
        prepare()
        modules = [compile_module(name, report) for name in MODULES]
        planners = [build_planner(name, progress=report) for name in PLANNERS]
        stacks = {build.name: read_module(build.library) for build in modules}
    except SglPipelineError as error:
        sys.exit(str(error))
    print("\n\n".join(texts_of(stacks)))
    problems = problems_of(stacks)
    for problem in problems:
        report(f"FAILED: {problem}")
    report("running the tests")
    exit_status = run_tests(arguments.pytest) or int(bool(problems))
    report("passed" if exit_status == 0 else "FAILED")
    total_s = time.monotonic() - begin_s
    if arguments.save:
        print(save(modules, planners, stacks, total_s))
    sys.exit(exit_status)


def run_tests(options: Sequence[str]) -> int:
    """Runs what is marked `cuda_toolkit` and writes `REPORT`. Returns pytest's exit status."""
    REPORT.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-m", "cuda_toolkit", TESTS]
    command += ["-o", "junit_family=xunit1"]  # the kind that holds properties
    environment = {**os.environ, CHECKING_VARIABLE: "1"}
    done = subprocess.run(
        [*command, f"--junitxml={REPORT}", *options], cwd=ROOT, env=environment, check=False
    )
    return done.returncode


def read_report(path: Path) -> list[dict[str, Any]]:
    """Sums up a JUnit file: test function, cases, those that did not pass, seconds."""
    functions: dict[str, dict[str, Any]] = defaultdict(lambda: {"cases": 0, "bad": 0, "s": 0.0})
    for case in ElementTree.parse(path).iter("testcase"):
        row = functions[case.attrib["name"].partition("[")[0]]
        row["cases"] += 1
        row["bad"] += any(child.tag in ("failure", "error", "skipped") for child in case)
        row["s"] += float(case.attrib["time"])
    return [{"test": name, **row} for name, row in functions.items()]


def read_workspaces(path: Path) -> dict[str, dict[str, int]]:
    """Maps query and KV heads, such as 32/8, to the most bytes `needed` and those `given`."""
    most: dict[str, dict[str, int]] = defaultdict(lambda: {"needed": 0, "given": 0})
    for entry in ElementTree.parse(path).iter("property"):
        kind, _, heads = entry.attrib["name"].partition(" ")
        if kind in ("needed", "given"):
            most[heads][kind] = max(most[heads][kind], int(entry.attrib["value"]))
    return dict(most)


def save(
    modules: Sequence[Build],
    planners: Sequence[Build],
    stacks: Mapping[str, Module],
    total_s: float,
) -> Path:
    """Writes the dated result; returns its path without suffix."""
    tests, workspaces = read_report(REPORT), read_workspaces(REPORT)
    rows = [
        [
            kind,
            build.name,
            f"{build.compiled_files} of {build.num_files}",
            f"{build.wall_s:.1f}",
            f"{build.cpu_s:.1f}",
        ]
        for kind, builds in (("module", modules), ("planner", planners))
        for build in builds
    ]
    passed = [
        [
            row["test"].removeprefix("test_").replace("_", " "),
            f"{row['cases'] - row['bad']} of {row['cases']}",
            f"{row['s']:.1f}",
        ]
        for row in tests
    ]
    needs = [
        [heads, f"{most['needed'] / 2**20:.1f}", f"{most['given'] / 2**20:.1f}"]
        for heads, most in workspaces.items()
    ]
    facts = {"wheels": pins(REQUIREMENTS), "run": {"s": f"{total_s:.0f}", "for": ARCHITECTURE}}
    builds = [asdict(build) | {"library": build.library.name} for build in (*modules, *planners)]
    texts = [
        markdown_table(["", "name", "files compiled", "s", "s of CPU time"], rows),
        markdown_table(["asserted", "cases that passed", "s"], passed),
        markdown_table(["heads", "MiB that decode graphs need at most", "MiB given"], needs),
        *texts_of(stacks),
    ]
    record = {
        "builds": builds,
        "tests": tests,
        "workspace_bytes": workspaces,
        "kernels": record_of(stacks),
    }
    return save_result(__spec__.name, "check_cuda", facts, record, texts)


if __name__ == "__main__":
    main()
