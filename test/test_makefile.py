"""The entry that a user meets first: which commands make would run, and that all is pinned."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def serve_command(*variables: str) -> str:
    # `make test` itself hands its own settings to a make below it.
    outer = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "PORT", "ARGS")
    done = subprocess.run(
        ["make", "--no-print-directory", "--dry-run", "serve", *variables],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name not in outer},
        capture_output=True,
        text=True,
        check=True,
    )
    command = done.stdout[done.stdout.index("sgl_pipeline.launch_server") :]
    return " ".join(command.replace("\\\n", " ").split())


def test_serve_runs_four_stages_on_port_30000() -> None:
    assert serve_command() == "sgl_pipeline.launch_server --pp 4 --port 30000"


@pytest.mark.parametrize("depth", ["--pp 2", "--pp=2", "--pp-size 2", "--pipeline-parallel-size 2"])
def test_a_depth_in_args_replaces_the_default(depth: str) -> None:
    command = serve_command(f"ARGS={depth} --policy sarathi", "PORT=31000")
    assert command == f"sgl_pipeline.launch_server --port 31000 {depth} --policy sarathi"


def test_a_layer_partition_is_no_depth() -> None:
    command = serve_command("ARGS=--pp-layer-partition 5,4,4,3")
    assert "--pp 4 --port 30000 --pp-layer-partition 5,4,4,3" in command


@pytest.mark.parametrize("name", ["cpu", "cuda", "dev"])
def test_every_requirement_is_pinned(name: str) -> None:
    lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
    requirements = [line for line in lines if line and not line.startswith("#")]
    assert [line for line in requirements if not re.fullmatch(r"[\w.-]+==[\w.]+", line)] == []
    names = [line.partition("==")[0].lower().replace("_", "-") for line in requirements]
    assert len(names) == len(set(names))


def test_both_sets_install_the_same_sglang() -> None:
    for name in ("cpu", "cuda"):
        assert "sglang==0.5.23\n" in (ROOT / "requirements" / f"{name}.txt").read_text()


def test_the_cuda_compiler_is_of_the_same_release_as_its_headers() -> None:
    # FlashInfer's headers refuse another compiler: they compare these releases.
    lines = (ROOT / "requirements" / "cuda.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line and line[0] != "#")
    of_the_compiler = ["cuda-nvcc", "cuda-crt", "cuda-nvrtc", "cuda-runtime", "nvvm"]
    versions = [pins[f"nvidia-{name}"] for name in of_the_compiler]
    assert {version.rpartition(".")[0] for version in versions} == {"13.0"}
