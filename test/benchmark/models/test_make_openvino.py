"""How OpenVINO's converter is called, with a stand-in that copies."""

from pathlib import Path

import pytest

from benchmark.models import make_openvino
from sgl_pipeline.errors import ConfigurationError


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint, and a converter that writes its flags; it fails for a model without sizes."""
    converter = tmp_path / "optimum-cli"
    # optimum-cli export openvino --model SOURCE ... TARGET
    converter.write_text(
        '#!/bin/sh\nsource=$4; flags="$@"\nwhile [ $# -gt 1 ]; do shift; done\n'
        'mkdir $1 && test -s $source/config.json && echo "$flags" > $1/flags\n'
    )
    converter.chmod(0o755)
    monkeypatch.setattr(make_openvino, "openvino_python", lambda folder: tmp_path / "python")
    (tmp_path / "0.27b").mkdir()
    (tmp_path / "0.27b" / "config.json").write_text("{}")
    return tmp_path / "0.27b"


def test_four_bits_are_symmetric_groups_of_all_layers(source: Path) -> None:
    target = source.with_name("0.27b-openvino-int4")
    assert make_openvino.main([str(source), str(target), "--weights", "int4"]) == 0
    flags = (target / "flags").read_text()
    assert "--weight-format int4 --sym --group-size 128 --ratio 1.0" in flags
    assert f"--model {source} " in flags


def test_a_conversion_that_fails_leaves_no_model(source: Path) -> None:
    (source / "config.json").write_text("")
    target = source.with_name("copy")
    with pytest.raises(ConfigurationError, match="could not be converted"):
        make_openvino.make_openvino(source, target, "int8")
    assert not target.exists()


def test_a_model_that_is_there_is_left_alone(
    source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert make_openvino.main([str(source), str(source), "--weights", "int8"]) == 1
    assert "exists already" in capsys.readouterr().err
