"""Compiles what FlashInfer runs on a card, and tests what came out, on a machine without one.

    make check-cuda
    python -m benchmark.check_cuda --save       # writes benchmark/results/<date>_check_cuda

The modules of `CHECKED` whole, so that compiler, headers and libraries out of pip's wheels are
known to fit together; and the planners, to be asked what they would have an H200 do. Then the tests
marked `cuda_toolkit` load and call them. Exits with 1 when something does not compile or fails.
What was compiled before is not compiled again; `make clean` removes it.
"""

import argparse
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmark.dated_result import markdown_table, save_result
from benchmark.gpu.compiled_planners import PLANNERS, build_planner
from benchmark.gpu.kernel_modules import ARCHITECTURE, FOLDER, Build, compile_module, prepare
from benchmark.gpu.kernel_wheels import REQUIREMENTS, ROOT, pins
from sgl_pipeline.errors import SglPipelineError

CHECKED = ("silu_and_mul", "page", "norm", "rope", "decode-128")
TESTS = "test/pp_runner/cuda"
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
        modules = [compile_module(name, report) for name in CHECKED]
        planners = [build_planner(name, progress=report) for name in PLANNERS]
    except SglPipelineError as error:
        sys.exit(str(error))
    report("running the tests")
    exit_status, tests = run_tests(arguments.pytest)
    report("passed" if exit_status == 0 else "FAILED")
    total_s = time.monotonic() - begin_s
    if arguments.save:
        print(save(modules, planners, tests, total_s))
    sys.exit(exit_status)


def run_tests(options: Sequence[str]) -> tuple[int, list[dict[str, Any]]]:
    """Returns pytest's exit status and, for each test function, how its cases went."""
    report = FOLDER / "tests.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-m", "cuda_toolkit", TESTS]
    done = subprocess.run(
        [*command, f"--junitxml={report}", *options],
        cwd=ROOT,
        env={**os.environ, CHECKING_VARIABLE: "1"},
        check=False,
    )
    return done.returncode, read_report(report) if report.exists() else []


def read_report(path: Path) -> list[dict[str, Any]]:
    """Sums up a JUnit file: test function, cases, those that did not pass, seconds."""
    functions: dict[str, dict[str, Any]] = defaultdict(lambda: {"cases": 0, "bad": 0, "s": 0.0})
    for case in ElementTree.parse(path).iter("testcase"):
        row = functions[case.attrib["name"].partition("[")[0]]
        row["cases"] += 1
        row["bad"] += len(case) > 0 and case[0].tag in ("failure", "error", "skipped")
        row["s"] += float(case.attrib["time"])
    return [{"test": name, **row} for name, row in functions.items()]


def save(
    modules: Sequence[Build],
    planners: Sequence[Build],
    tests: Sequence[dict[str, Any]],
    total_s: float,
) -> Path:
    """Writes the dated result; returns its path without suffix."""
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
    facts = {
        "wheels": pins(REQUIREMENTS),
        "run": {"s": f"{total_s:.0f}", "for": f"sm_{ARCHITECTURE}"},
    }
    record = {
        "builds": [
            {name: value for name, value in asdict(build).items() if name != "library"}
            for build in (*modules, *planners)
        ],
        "tests": list(tests),
    }
    heads = ["", "name", "files compiled", "s", "s of CPU time"]
    texts = [markdown_table(heads, rows), markdown_table(["asserted", "cases", "s"], passed)]
    return save_result("check_cuda", "check_cuda", facts, record, texts)


if __name__ == "__main__":
    main()
