"""The entry that a user meets first: which commands make would run, and that all is pinned."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def commands_of(target: str, *variables: str, path: str = os.environ["PATH"]) -> str:
    """What make would run for `target`, in one line."""
    # `make test` itself hands its own settings to a make below it.
    outer = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "PORT", "ARGS", "SET")
    inherited = {name: value for name, value in os.environ.items() if name not in outer}
    done = subprocess.run(
        ["make", "--no-print-directory", "--dry-run", target, *variables],
        cwd=ROOT,
        env=inherited | {"PATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    return " ".join(done.stdout.replace("\\\n", " ").split())


def serve_command(*variables: str) -> str:
    commands = commands_of("serve", *variables)
    return commands[commands.index("sgl_pipeline.launch_server") :]


def setup_commands(tmp_path: Path, nvidia_smi: str, *variables: str) -> str:
    """What a first set-up would run where `nvidia-smi` does what the shell script says."""
    command = tmp_path / "nvidia-smi"
    command.write_text(f"#!/bin/sh\n{nvidia_smi}\n")
    command.chmod(0o700)
    path = f"{tmp_path}:{os.environ['PATH']}"
    return commands_of("setup", f"VENV={tmp_path}/venv", *variables, path=path)


def test_serve_runs_four_stages_on_port_30000() -> None:
    assert serve_command() == "sgl_pipeline.launch_server --pp 4 --port 30000"


@pytest.mark.parametrize("depth", ["--pp 2", "--pp=2", "--pp-size 2", "--pipeline-parallel-size 2"])
def test_a_depth_in_args_replaces_the_default(depth: str) -> None:
    command = serve_command(f"ARGS={depth} --policy sarathi", "PORT=31000")
    assert command == f"sgl_pipeline.launch_server --port 31000 {depth} --policy sarathi"


def test_a_layer_partition_is_no_depth() -> None:
    command = serve_command("ARGS=--pp-layer-partition 5,4,4,3")
    assert "--pp 4 --port 30000 --pp-layer-partition 5,4,4,3" in command


def test_prefill_and_decode_apart_have_flags_of_their_own() -> None:
    commands = commands_of("serve-pd", "VENV=build/none", "PREFILL_ARGS=--pp 2", "ARGS=--ui off")
    assert "--target build/none/router -r requirements/router.txt" in commands
    assert commands.endswith(
        "sgl_pipeline.managers.serve_pd --port 30000 --router-folder build/none/router "
        "--prefill='--pp 2' --decode='' --router='' -- --ui off"
    )


def pins_of(name: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line and line[0] != "#")


def header(versions: str) -> str:
    return f"echo '+------+'; echo '| NVIDIA-SMI 580.95  {versions}  |'; echo '| 0 H200 |'"


@pytest.mark.parametrize(
    "versions",
    [
        "Driver Version: 580.95      CUDA Version: 13.0",
        "KMD Version: 617.14      CUDA UMD Version: 13.4",
        "Driver Version: 900.1      CUDA Version: 20.1",
    ],
)
def test_a_driver_for_cuda_13_gets_the_cuda_set(tmp_path: Path, versions: str) -> None:
    commands = setup_commands(tmp_path, header(versions))
    assert "-c requirements/cuda.txt torch" in commands
    assert "nvidia-smi" not in commands
    assert "-c requirements/cpu.txt" in setup_commands(tmp_path, header(versions), "SET=cpu")


@pytest.mark.parametrize(
    ("nvidia_smi", "reported"),
    [
        (header("Driver Version: 550.54      CUDA Version: 12.4"), "CUDA 12.4"),
        (header("Driver Version: 340.1      CUDA Version: 9.2"), "CUDA 9.2"),
        (header("Driver Version: 580.95      CUDA Version: N/A"), "no CUDA version"),
        ("echo 'NVIDIA-SMI has failed'; exit 9", "no CUDA version"),
    ],
)
def test_another_driver_gets_the_cpu_set_and_the_reason(
    tmp_path: Path, nvidia_smi: str, reported: str
) -> None:
    commands = setup_commands(tmp_path, nvidia_smi)
    assert "-c requirements/cpu.txt torch" in commands
    assert f"nvidia-smi reports {reported}, and the CUDA set needs a driver for CUDA 13" in commands
    assert "nvidia-smi" not in setup_commands(tmp_path, nvidia_smi, "SET=cpu")


def test_the_gpu_tests_have_a_target_that_fails_without_a_gpu() -> None:
    commands = commands_of("test-gpu")
    assert "pytest -m gpu" in commands
    assert "torch.cuda.is_available" in commands.partition("pytest -m gpu")[0]


def test_the_fast_tests_start_no_process() -> None:
    assert "-m 'not multiproc and not slow " in commands_of("test-fast")
    with pytest.raises(pytest.fail.Exception, match="multiproc"):
        subprocess.run([sys.executable, "-c", ""], check=True)


@pytest.mark.multiproc
def test_a_marked_test_may_start_one() -> None:
    subprocess.run([sys.executable, "-c", ""], check=True)


def test_what_compiles_flashinfer_for_minutes_has_a_target_of_its_own() -> None:
    assert "-m 'not gpu and not cuda_toolkit and not alone'" in commands_of("test")
    assert "-m benchmark.gpu.check_cuda" in commands_of("check-cuda")


@pytest.mark.parametrize(
    "name", ["cpu", "cuda", "dev", "contract", "check-cuda", "tracing", "ray", "router"]
)
def test_every_requirement_is_pinned(name: str) -> None:
    lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
    requirements = [line for line in lines if line and not line.startswith("#")]
    assert [line for line in requirements if not re.fullmatch(r"[\w.-]+==[\w.]+", line)] == []
    names = [line.partition("==")[0].lower().replace("_", "-") for line in requirements]
    assert len(names) == len(set(names))


def test_check_cuda_compiles_with_the_pins_of_the_cuda_set() -> None:
    checked, whole = (pins_of(name) for name in ("check-cuda", "cuda"))
    assert checked == {name: whole.get(name) for name in checked}
    assert {"flashinfer-python", "nvidia-cuda-nvcc", "nvidia-nvvm"} <= set(checked)


def test_both_sets_install_the_same_sglang() -> None:
    for name in ("sglang-cpu", "cuda"):
        assert "sglang==0.5.23\n" in (ROOT / "requirements" / f"{name}.txt").read_text()


def test_the_cuda_compiler_is_of_the_same_release_as_its_headers() -> None:
    # FlashInfer's headers refuse another compiler: they compare these releases.
    pins = pins_of("cuda")
    of_the_compiler = ["cuda-nvcc", "cuda-crt", "cuda-nvrtc", "cuda-runtime", "nvvm"]
    versions = [pins[f"nvidia-{name}"] for name in of_the_compiler]
    assert {version.rpartition(".")[0] for version in versions} == {"13.0"}


def test_the_calls_of_flashinfer_are_tested_against_the_release_that_serves() -> None:
    served, tested = (
        set((ROOT / "requirements" / f"{name}.txt").read_text().splitlines())
        for name in ("cuda", "contract")
    )
    pins = {line for line in tested if not line.startswith("#")}
    assert any(pin.startswith("flashinfer-python==") for pin in pins)
    assert pins <= served


def test_tests_without_a_gpu_get_flashinfer_where_servers_do_not_find_it() -> None:
    # A folder that is not there, so that all would be made.
    commands = commands_of("test", "VENV=build/none", "SET=cpu")
    assert "--target build/none/contract -r requirements/contract.txt" in commands
    assert "contract" not in commands_of("test", "VENV=build/none", "SET=cuda")
    assert "contract" not in commands_of("serve", "VENV=build/none", "SET=cpu")


@pytest.mark.parametrize(
    ("target", "name"), [("test", "tracing"), ("test-alone", "ray"), ("test-alone", "router")]
)
def test_tests_get_what_servers_do_not_find_unasked(target: str, name: str) -> None:
    commands = commands_of(target, "VENV=build/none")
    assert f"--target build/none/{name} -r requirements/{name}.txt" in commands
    assert f"{name}.txt" not in commands_of("serve", "VENV=build/none")


@pytest.mark.parametrize("extra", ["tracing", "ray"])
def test_an_extra_fits_the_sets(extra: str) -> None:
    whole = pins_of(extra)
    for name in ("cpu", "cuda"):
        pins = pins_of(name)
        assert {one: pins[one] for one in whole if one in pins} == {
            one: version for one, version in whole.items() if one in pins
        }


def test_the_tracing_extra_is_of_the_release_of_the_sets() -> None:
    whole = pins_of("tracing")
    for name in ("cpu", "cuda"):
        pins = pins_of(name)
        assert whole["opentelemetry-sdk"] == pins["opentelemetry-api"]
