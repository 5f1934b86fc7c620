"""The same model has one digest wherever it lies; another, or a broken copy, has another."""

import json
import shutil
import struct
from pathlib import Path

import pytest

from sgl_pipeline.cluster.model_digest import model_digest


@pytest.fixture
def model(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"hidden_size": 4}')
    header = json.dumps({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    (model / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
    return model


def test_a_copy_has_the_same(model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "elsewhere")
    (copy / "README.md").write_text("of the copy alone")
    assert model_digest(str(copy)) == model_digest(str(model))


def test_another_config_another_tensor_and_a_file_cut_short_have_others(model: Path) -> None:
    digests = {model_digest(str(model))}
    weights = model / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    digests.add(model_digest(str(model)))
    weights.write_bytes(whole.replace(b'"a"', b'"b"'))
    digests.add(model_digest(str(model)))
    weights.write_bytes(whole)
    (model / "config.json").write_text('{"hidden_size": 5}')
    digests.add(model_digest(str(model)))
    weights.rename(model / "other.safetensors")
    digests.add(model_digest(str(model)))
    assert len(digests) == 5
