"""What OpenVINO's environment is made of, and what a machine without it is told."""

import re
from pathlib import Path

import pytest

from benchmark.peers.install_openvino import openvino_python
from sgl_pipeline.errors import ConfigurationError

REQUIREMENTS = Path("benchmark/peers/openvino_requirements.txt")


def test_a_machine_without_openvino_is_told_how_to_install_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="install_openvino"):
        openvino_python(tmp_path)


def test_every_requirement_is_pinned() -> None:
    lines = [line for line in REQUIREMENTS.read_text().splitlines() if not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.]+", line)] == []
    names = {line.partition("==")[0] for line in lines}
    assert {"openvino-genai", "openvino-tokenizers", "optimum-intel", "nncf", "uvicorn"} <= names
